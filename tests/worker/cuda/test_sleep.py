"""A runner that slept, under Triton's interpreter: the same answers and graphs, all memory given back meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from naru_worker.adapters.ops.cuda.memory.chunk_pool import ChunkPool

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from batches import batch_of, lanes_for  # noqa: E402
from fake_cuda_streams import FakeStreams  # noqa: E402
from mapped_host import MappedHost, map_host  # noqa: E402
from memory_models import checkpoint_of, config_of  # noqa: E402
from sampling_batches import sampling_batch  # noqa: E402

from naru_proto.errors import InternalError, LoadError  # noqa: E402
from naru_worker.adapters.ops.cuda import backend  # noqa: E402
from naru_worker.adapters.ops.cuda.device import open_gpu, open_upload_slots  # noqa: E402
from naru_worker.adapters.ops.cuda.memory.device_memory import DeviceMemory  # noqa: E402
from naru_worker.adapters.ops.cuda.memory.errors import DeviceError, OutOfDeviceMemory  # noqa: E402
from naru_worker.adapters.ops.cuda.memory.pinned_pool import NoPinnedSlot, PinnedPool, make_pinned_pool  # noqa: E402
from naru_worker.adapters.ops.cuda.memory.weight_space import WeightSpace  # noqa: E402
from naru_worker.adapters.ops.cuda.runner import CudaRunner  # noqa: E402
from naru_worker.adapters.ops.protocol import RunnerOptions  # noqa: E402

OPTIONS = RunnerOptions(16, 8, 64, 4, 128, kv_format="f32")
CHECKPOINT = checkpoint_of(config_of(num_layers=1, num_heads=2, num_kv_heads=1, head_dim=32, vocab_size=61))
SLOT_BYTES = 4096


@pytest.fixture
def host() -> MappedHost:
    return MappedHost()


@pytest.fixture
def chunks(host: MappedHost, monkeypatch: pytest.MonkeyPatch) -> ChunkPool:
    """What all models of the test have of the GPU."""
    pool = map_host(monkeypatch, host).pool
    assert pool is not None
    return pool


def slots() -> PinnedPool:
    return make_pinned_pool(200, SLOT_BYTES, is_pinned=False)


def decoded(runner: CudaRunner, num_steps: int = 4) -> list[int]:
    """What it draws, greedily, behind a prompt."""
    [lane] = lanes_for([[5, 6, 7]], 16, num_steps + 1)
    drawn: list[int] = []
    for i in range(num_steps):
        batch = batch_of([(lane, 3 if i == 0 else 1)], 16)
        rows = sampling_batch([{"temperature": 0.0, "seed": 0, "counter": i}], CHECKPOINT.config.vocab_size, 0)
        drawn.append(int(runner.run(batch, rows).token_ids[0]))
        lane.num_computed = len(lane.token_ids)
        lane.token_ids.append(drawn[-1])
    return drawn


def test_a_runner_that_slept_has_its_graphs_and_gives_the_answers_it_gave(chunks: ChunkPool) -> None:
    streams = FakeStreams(1)
    runner = CudaRunner(open_gpu(), CHECKPOINT, OPTIONS, backend.weight_bytes(CHECKPOINT), streams)
    assert runner.can_sleep
    expected = decoded(runner)
    assert streams.num_captures == 1
    held_bytes, pool = chunks.held_bytes, slots()
    for _ in range(2):
        assert runner.sleep(pool) == held_bytes == chunks.idle_bytes
        assert chunks.held_bytes == 0 and pool.num_taken * SLOT_BYTES >= runner.weight_bytes
        assert runner.sleep(pool) == 0, "it sleeps already"
        with pytest.raises(InternalError, match="asleep"):
            decoded(runner)
        runner.wake()
        assert chunks.held_bytes < held_bytes, "blocks that no step has written to yet have no memory"
        assert pool.num_taken == 0
        num_replays = streams.num_replays
        assert decoded(runner) == expected
        assert streams.num_captures == 1 and streams.num_replays > num_replays
        held_bytes = chunks.held_bytes
    runner.close()
    assert chunks.held_bytes == 0


def test_what_other_models_did_meanwhile_changes_nothing(chunks: ChunkPool) -> None:
    runner = backend.load_runner(CHECKPOINT, OPTIONS)
    expected = decoded(runner)
    runner.sleep(pool := slots())
    other = backend.load_runner(checkpoint_of(config_of(num_layers=1, vocab_size=97)), OPTIONS)
    runner.wake()
    assert decoded(runner) == expected
    runner.sleep(pool)
    runner.close()
    assert pool.num_taken == 0, "one that is closed in its sleep lets go of its slots"
    other.close()
    assert chunks.held_bytes == 0


def test_a_pool_that_is_too_small_or_full_changes_nothing(chunks: ChunkPool) -> None:
    runner = backend.load_runner(CHECKPOINT, OPTIONS)
    expected, held_bytes = decoded(runner), chunks.held_bytes
    with pytest.raises(ValueError, match="slots are asked for"):
        runner.sleep(make_pinned_pool(1, 64, is_pinned=False))
    pool = slots()
    pool.take(pool.num_slots - 1)
    with pytest.raises(NoPinnedSlot):
        runner.sleep(pool)
    assert chunks.held_bytes == held_bytes and decoded(runner) == expected
    runner.close()


def calls_of(host: MappedHost, work: Callable[[], Any]) -> int:
    """Calls that some work makes to the device."""
    host.calls.clear()
    work()
    return len(host.calls)


def test_a_device_without_room_lets_a_runner_sleep_on_until_there_is_some(host: MappedHost, chunks: ChunkPool) -> None:
    runner, pool = backend.load_runner(CHECKPOINT, OPTIONS), slots()
    expected = decoded(runner)
    runner.sleep(pool)
    chunks.trim()
    num_calls = calls_of(host, runner.wake)
    runner.sleep(pool)
    taken = pool.num_taken
    for n in range(1, num_calls + 1):
        chunks.trim()
        host.fails_in = n
        with pytest.raises((OutOfDeviceMemory, DeviceError)):
            runner.wake()
        assert chunks.held_bytes == 0 and pool.num_taken == taken, f"call {n}"
    host.fails_in = 0
    runner.wake()
    assert decoded(runner) == expected and pool.num_taken == 0
    runner.close()
    assert (chunks.held_bytes, host.num_ranges) == (0, 0)


def test_a_load_that_fails_anywhere_leaves_nothing(host: MappedHost, chunks: ChunkPool) -> None:
    num_calls = calls_of(host, lambda: backend.load_runner(CHECKPOINT, OPTIONS).close())
    num_failed = 0
    for n in range(1, num_calls + 1):
        chunks.trim()
        host.fails_in = n
        try:
            backend.load_runner(CHECKPOINT, OPTIONS)
        except (LoadError, OutOfDeviceMemory, DeviceError):
            num_failed += 1
        else:
            break
        assert (chunks.held_bytes, host.num_ranges, open_upload_slots().num_taken) == (0, 0, 0), f"call {n}"
    assert num_failed > 5


class Broken(Exception):
    """Somebody had enough."""


def test_a_load_tells_of_each_tensor_and_may_be_broken_off_there(host: MappedHost, chunks: ChunkPool) -> None:
    shares: list[tuple[int, int]] = []
    backend.load_runner(CHECKPOINT, OPTIONS, lambda done, total: shares.append((done, total))).close()
    assert [done for done, _ in shares] == sorted(done for done, _ in shares)
    assert shares[0][0] == 0 and len(shares) > 9 and {total for _, total in shares} == {shares[0][1]}
    assert shares[-1][0] < shares[0][1]
    for last in range(len(shares)):
        count = 0

        def stop(done: int, total: int, last: int = last) -> None:
            nonlocal count
            if count == last:
                raise Broken
            count += 1

        with pytest.raises(Broken):
            backend.load_runner(CHECKPOINT, OPTIONS, stop)
        assert (chunks.held_bytes, host.num_ranges, open_upload_slots().num_taken) == (0, 0, 0)


def test_on_the_host_lies_one_matrix_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the file and the slots: packed tensors live until they are on their way."""
    alive, most = [0], [0]
    place = WeightSpace.place

    def counted(space: WeightSpace, tensor: Any) -> Any:
        alive[0] += tensor.nbytes
        most[0] = max(most[0], alive[0])

        class Mark:
            def __init__(self, num_bytes: int) -> None:
                self.num_bytes = num_bytes

            def __del__(self) -> None:
                alive[0] -= self.num_bytes

        tensor.mark = Mark(tensor.nbytes)
        return place(space, tensor)

    monkeypatch.setattr(WeightSpace, "place", counted)
    checkpoint = checkpoint_of(config_of(num_layers=4))
    backend.load_runner(checkpoint, OPTIONS).close()
    config = checkpoint.config
    largest = 4 * max(config.vocab_size * config.hidden_size, 2 * config.intermediate_size * config.hidden_size)
    assert alive[0] == 0 and most[0] <= largest < backend.weight_bytes(checkpoint) / 4


def test_a_buffer_that_cannot_be_unmapped_does_not_sleep() -> None:
    runner = backend.load_runner(CHECKPOINT, OPTIONS)
    assert not runner.can_sleep
    runner.close()


def test_a_gpu_without_room_for_the_weights_says_so_before_any_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_memory: DeviceMemory, num_bytes: int) -> None:
        raise OutOfDeviceMemory(num_bytes, "full")

    monkeypatch.setattr(DeviceMemory, "make_arena", full)
    with pytest.raises(LoadError, match=r"no room for .* bytes of weights; lower memory_budget_bytes"):
        backend.load_runner(CHECKPOINT, OPTIONS)


def test_weights_on_their_way_through_slots_arrive_whole(chunks: ChunkPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that copies as late as it may: a slot that is filled too early would show (`StreamMisuse`)."""
    small = make_pinned_pool(2, 512, is_pinned=False)
    monkeypatch.setattr("naru_worker.adapters.ops.cuda.runner.open_upload_slots", lambda: small)
    plain = backend.load_runner(CHECKPOINT, OPTIONS)
    expected = decoded(plain, 1)
    plain.close()
    for seed in range(3):
        streams = FakeStreams(seed, drift_odds=0.05)
        runner = CudaRunner(open_gpu(), CHECKPOINT, OPTIONS, backend.weight_bytes(CHECKPOINT), streams)
        assert decoded(runner, 1) == expected
        runner.close()
