"""Route keys of the real model: they stand for tokens as its tokenizer cuts them, and no tenant learns another's."""

from __future__ import annotations

from pathlib import Path

import pytest
from hearer import Hearer, hear_until
from toy_worker import ask
from worker_process import WorkerProcess, worker_process

from naru_proto.route_keys import boundaries, key_root, keys_of_text, pack_keys, shared_key_root
from naru_proto.v1 import worker_pb2
from naru_worker.adapters.models.opening import open_model

pytestmark = [pytest.mark.smollm2, pytest.mark.timeout(300)]

B = 16
SYSTEM = "<|im_start|>system\nYou keep a lighthouse. 守り人 — answer in one line, naïvely, 12345 times.<|im_end|>\n" + (
    "<|im_start|>system\nRules: " + "; ".join(f"rule {i} says {i * 37}" for i in range(30)) + ".<|im_end|>\n"
)
USER = "<|im_start|>user\n" + "What do you see at sea today? " * 10
OTHER = "<|im_start|>user\n" + "Name three birds, and their wings. " * 10
END = "<|im_end|>\n<|im_start|>assistant\n"


async def load(worker: WorkerProcess, path: Path, num_blocks: int) -> None:
    options = worker_pb2.EngineOptions(max_model_len=1024, kv_cache_bytes=num_blocks * B * 23040)
    request = worker_pb2.LoadRequest(model="m", uri=f"file://{path}", options=options)
    progress = [p async for p in worker.stub.Load(request)]
    assert progress[-1].state == worker_pb2.MODEL_STATE_READY, progress[-1]


def keys_of(text: str, salt: bytes = b"", num_shared_bytes: int = 0) -> tuple[bytes, ...]:
    shared_root = shared_key_root("m")
    return keys_of_text(
        text.encode(), key_root(salt, "m"), shared_root=shared_root, shared_prefix_bytes=num_shared_bytes
    )


async def cached_tokens(worker: WorkerProcess, text: str, salt: bytes = b"", num_shared_bytes: int = 0) -> int:
    request = ask("r", text, model="m", max_tokens=1)
    request.cache_salt, request.shared_prefix_bytes = salt, num_shared_bytes
    request.route_keys = pack_keys(keys_of(text, salt, num_shared_bytes))
    deltas: list[worker_pb2.Delta] = [d async for d in worker.stub.Generate(request)]
    assert deltas[-1].request_done and not deltas[-1].error.code, deltas[-1]
    return deltas[0].cached_tokens


async def test_keys_promise_what_the_cache_holds_to_less_than_a_block_until_it_is_evicted(smollm2_path: Path) -> None:
    tokenizer = open_model(smollm2_path).tokenizer
    first, second = SYSTEM + USER + END, SYSTEM + OTHER + END

    def num_tokens(num_bytes: int) -> int:
        ids = tokenizer.encode(first, add_special_tokens=False)
        return max(n for n in range(len(ids) + 1) if sum(len(tokenizer.token_bytes(i)) for i in ids[:n]) <= num_bytes)

    async with worker_process() as worker:
        await load(worker, smollm2_path, 65)
        hearer = Hearer(worker.stub)
        assert await cached_tokens(worker, first) == 0
        await hear_until(hearer, lambda: hearer.keys.get("m") == set(keys_of(first)))
        num_held = next(i for i, key in enumerate(keys_of(second)) if key not in hearer.keys["m"])
        expected = num_tokens(boundaries(len(second.encode()))[num_held - 1])
        cached = await cached_tokens(worker, second)
        # The common beginning may go on a little behind the last boundary in it.
        assert expected - B < cached <= num_tokens(len(SYSTEM.encode()) + 64)
        assert expected > 300
        # A third prompt needs all blocks: keys of the others leave, and nothing is hit any more.
        third = "<|im_start|>user\n" + " ".join(f"{i}:{i * i}" for i in range(95)) + END
        await cached_tokens(worker, third)
        await hear_until(hearer, lambda: hearer.keys["m"].issuperset(keys_of(third)))
        left = next((i for i, key in enumerate(keys_of(first)) if key not in hearer.keys["m"]), None)
        assert left is not None
        expected = num_tokens(boundaries(len(first.encode()))[left - 1]) if left else 0
        assert abs(await cached_tokens(worker, first) - expected) <= 2 * B
        await hearer.exchange.close()


async def test_a_tenant_sees_the_same_whether_or_not_another_sent_its_prompt(smollm2_path: Path) -> None:
    text, num_shared_bytes = SYSTEM + USER + END, len(SYSTEM.encode())
    tokenizer = open_model(smollm2_path).tokenizer
    num_shared = len(tokenizer.encode(SYSTEM.rstrip("\n"), add_special_tokens=False)) // B * B
    async with worker_process() as worker:
        await load(worker, smollm2_path, 400)
        # Nobody was here; then A with another question; then A with the very same one.
        assert await cached_tokens(worker, text, b"a", num_shared_bytes) == 0
        assert await cached_tokens(worker, SYSTEM + OTHER + END, b"a", num_shared_bytes) == num_shared
        for number, probe in enumerate((text, SYSTEM + OTHER + END, SYSTEM + "<|im_start|>user\nSomething new" + END)):
            salt = b"b%d" % number
            assert await cached_tokens(worker, probe, salt, num_shared_bytes) == num_shared
        # Its own comes back to it; isolated, it shares nothing; and no question can be called a part of what is shared.
        assert await cached_tokens(worker, text, b"a", num_shared_bytes) > num_shared
        assert await cached_tokens(worker, text, b"c", 0) == 0
        assert await cached_tokens(worker, text, b"d", len((SYSTEM + USER).encode()) - 3) == num_shared
        assert await cached_tokens(worker, text, b"", 0) == 0
        assert await cached_tokens(worker, text, b"e", len(text.encode())) == num_shared
