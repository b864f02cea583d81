"""Steps in two halves, one ahead of the other, over graphs, on a device that is never in a hurry."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from batches import Lane, batch_of, lanes_for
from real_engine import choices_of, engine_over, request_of, run_all
from sampling_batches import sampling_batch
from toy_model import ToyTokenizer

from naru_proto.errors import Unavailable
from naru_worker.adapters.ops.protocol import BatchInputs, RunnerOptions, SampleOutput, SamplingBatch

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from fake_cuda_streams import FakeStreams, StreamMisuse  # noqa: E402
from memory_models import checkpoint_of, config_of  # noqa: E402

from naru_worker.adapters.ops.cuda.backend import weight_bytes  # noqa: E402
from naru_worker.adapters.ops.cuda.device import open_gpu  # noqa: E402
from naru_worker.adapters.ops.cuda.graphs import NoGraph  # noqa: E402
from naru_worker.adapters.ops.cuda.memory.errors import DeviceError  # noqa: E402
from naru_worker.adapters.ops.cuda.runner import CudaRunner  # noqa: E402
from naru_worker.adapters.ops.cuda.staging import NUM_HOST_BUFFERS, Staging  # noqa: E402

MODEL = checkpoint_of(config_of(num_layers=1, num_heads=2, num_kv_heads=1, head_dim=32, vocab_size=61))
VOCAB_SIZE = MODEL.config.vocab_size
BLOCK = 16


def runner_on(streams: FakeStreams | None = None, num_blocks: int = 16) -> CudaRunner:
    options = RunnerOptions(BLOCK, num_blocks, 64, 4, 128, kv_format="f32")
    return CudaRunner(open_gpu(), MODEL, options, weight_bytes(MODEL), streams)


def sampling(lanes: list[Lane], num_drawn: int, num_logprobs: int = -1) -> SamplingBatch:
    """Greedy ones and others, each with its place in the random stream."""
    rows: list[dict[str, Any]] = [
        {"temperature": float(i % 2), "seed": 10 + i, "counter": num_drawn, "num_logprobs": num_logprobs}
        for i in range(len(lanes))
    ]
    return sampling_batch(rows, VOCAB_SIZE, max(0, num_logprobs))


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with"), DeviceError),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), Unavailable),
        (RuntimeError("shapes do not fit"), RuntimeError),
    ],
)
def test_only_a_failed_device_is_the_end_of_it(
    raised: RuntimeError, expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_on()

    def fail(*args: object) -> None:
        raise raised

    monkeypatch.setattr(runner, "_compute", fail)
    [lane] = lanes_for([[5, 6]], BLOCK, 1)
    with pytest.raises(expected) as caught:
        runner.launch(batch_of([(lane, 2)], BLOCK), sampling([lane], 0))
    assert type(caught.value) is expected
    assert "\n" not in str(caught.value)


def prefill(runner: CudaRunner, lanes: list[Lane]) -> None:
    for lane in lanes:
        drawn = runner.run(batch_of([(lane, len(lane.token_ids))], BLOCK), sampling([lane], 0)).token_ids
        lane.num_computed = len(lane.token_ids)
        lane.token_ids.append(int(drawn[0]))


def next_step(lanes: list[Lane], *, is_ahead: bool) -> BatchInputs:
    """One token of each, the newest one; `is_ahead`: it is what the step before is about to draw."""
    if not is_ahead:
        return batch_of([(lane, 1) for lane in lanes], BLOCK)
    for lane in lanes:
        lane.token_ids.append(0)
    batch = batch_of([(lane, 1) for lane in lanes], BLOCK)
    return replace(batch, token_ids=-1 - np.arange(len(lanes), dtype=np.int32))


def decoded(runner: CudaRunner, prompts: list[list[int]], num_steps: int, *, is_ahead: bool) -> list[list[int]]:
    lanes = lanes_for(prompts, BLOCK, num_steps + 2)
    prefill(runner, lanes)
    outputs = [[lane.token_ids[-1]] for lane in lanes]

    def take(output: SampleOutput) -> None:
        for kept, token in zip(outputs, output.token_ids.tolist(), strict=True):
            kept.append(token)

    flight = None
    for i in range(num_steps):
        batch = next_step(lanes, is_ahead=is_ahead and i > 0)
        handle = runner.launch(batch, sampling(lanes, i + 1))
        # The arrays are the runner's no more.
        batch.token_ids[:] = 60
        batch.slots[:] = 16
        batch.block_table[:] = 1
        if flight is not None:
            take(runner.fetch(flight))
        flight = handle if is_ahead else None
        for lane in lanes:
            lane.num_computed += 1
        if not is_ahead:
            output = runner.fetch(handle)
            take(output)
            for lane, token in zip(lanes, output.token_ids.tolist(), strict=True):
                lane.token_ids.append(token)
    if flight is not None:
        take(runner.fetch(flight))
    return outputs


PROMPTS = [[5, 6, 7], [9] * 15, [3, 4]]
NUM_STEPS = 4


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """One step after another, kernel by kernel."""
    runner = runner_on()
    tokens = decoded(runner, PROMPTS, NUM_STEPS, is_ahead=False)
    assert set(runner.plain_steps) == {NoGraph.OFF}
    return tokens


@pytest.mark.parametrize(
    ("is_ahead", "seed"),
    [(True, 0), *[pytest.param(*each, marks=pytest.mark.gpu_offline) for each in [(False, 1), (True, 2)]]],
)
def test_graphs_and_steps_ahead_draw_the_same_tokens(is_ahead: bool, seed: int, expected: list[list[int]]) -> None:
    streams = FakeStreams(seed)
    runner = runner_on(streams)
    assert decoded(runner, PROMPTS, NUM_STEPS, is_ahead=is_ahead) == expected
    assert runner.graphs.num_graphs == 1
    assert runner.graphs.num_replays == NUM_STEPS - 1
    assert runner.plain_steps == {NoGraph.PROMPTS: 3}
    runner.close()
    assert streams.is_idle


@pytest.mark.gpu_offline
def test_an_engine_one_step_ahead_says_what_the_plain_loop_says() -> None:
    def answers(streams: FakeStreams | None, *, is_ahead: bool) -> list[list[tuple[int, ...]]]:
        runner = runner_on(streams, num_blocks=7)
        engine, scheduler = engine_over(
            runner, ToyTokenizer(), VOCAB_SIZE, (7,), max_num_batched_tokens=24, max_num_seqs=4, max_model_len=64
        )
        if not is_ahead:
            engine.steps_ahead = None
        requests = [
            request_of([1, 2, 3], "a", max_tokens=12, temperature=1.0, seed=3),
            request_of([4] * 30, "b", max_tokens=5, temperature=1.0, seed=4),
            request_of([5] * 14, "c", max_tokens=9, temperature=0.0, frequency_penalty=1.9, seed=5),
            request_of([6] * 20, "d", max_tokens=7, temperature=1.0, n=2, seed=6),
        ]
        for number, each in enumerate(requests):
            each.seed = number
        deltas = run_all(engine, scheduler, requests)
        assert engine.steps_ahead is None or engine.steps_ahead.num_ahead > 2
        runner.close()
        return [choices_of(deltas, name) for name in "abcd"]

    plain = answers(None, is_ahead=False)
    assert answers(FakeStreams(6), is_ahead=True) == plain


@pytest.mark.gpu_offline
def test_scores_of_a_step_come_with_its_own_tokens() -> None:
    found = []
    for streams in (None, FakeStreams(3)):
        runner = runner_on(streams)
        lanes = lanes_for(PROMPTS, BLOCK, 4)
        prefill(runner, lanes)
        handles = []
        for i in range(2):
            handles.append(runner.launch(next_step(lanes, is_ahead=i > 0), sampling(lanes, i + 1, num_logprobs=2)))
            for lane in lanes:
                lane.num_computed += 1
        found.append([runner.fetch(handle) for handle in handles])
    for plain, fake in zip(*found, strict=True):
        assert plain.token_ids.tolist() == fake.token_ids.tolist()
        assert plain.top_ids.tolist() == fake.top_ids.tolist()
        assert np.allclose(plain.top_logprobs, fake.top_logprobs, atol=1e-5)
        assert np.allclose(plain.logprobs, fake.logprobs, atol=1e-5)
        assert plain.ranks.tolist() == fake.ranks.tolist()


def test_a_step_without_wanted_rows_draws_nothing() -> None:
    runner = runner_on(FakeStreams(4))
    [lane] = lanes_for([[1, 2, 3]], BLOCK, 1)
    batch = replace(batch_of([(lane, 2)], BLOCK), logits_rows=np.zeros(0, np.int32))
    assert len(runner.run(batch, sampling([], 0)).token_ids) == 0


def test_a_closed_runner_holds_no_tensor_for_the_garbage_collector_to_find() -> None:
    runner = runner_on(FakeStreams(6))
    lane = Lane([1, 2, 3, 4], [1, 2], num_prompt_tokens=2)
    for count in (2, 1, 1):  # a prompt, then eagerly, then by a graph
        runner.run(batch_of([(lane, count)], BLOCK), sampling([lane], 0))
        lane.num_computed += count
    owners = (runner._sampler, runner._staging, runner.graphs._staging, runner._ops)
    held = [weakref.ref(owner) for owner in owners]
    assert all(each() is not None for each in held)
    del owners
    gc.disable()
    try:
        runner.close()
        assert [each() for each in held] == [None] * 4
        runner.close()
    finally:
        gc.enable()


def test_a_device_that_dies_says_so_in_every_later_call_and_can_be_closed() -> None:
    streams = FakeStreams(5)
    runner = runner_on(streams)
    [lane] = lanes_for([[1, 2, 3]], BLOCK, 2)
    handle = runner.launch(batch_of([(lane, 3)], BLOCK), sampling([lane], 0))
    streams.dies_after = streams.num_run
    with pytest.raises(DeviceError, match="ECC"):
        runner.fetch(handle)
    with pytest.raises(DeviceError, match="ECC"):
        runner.launch(batch_of([(lane, 3)], BLOCK), sampling([lane], 0))
    runner.close()


def test_a_step_that_finds_no_memory_ends_as_such_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_on()
    [lane] = lanes_for([[1, 2, 3]], BLOCK, 2)
    batch = batch_of([(lane, 3)], BLOCK)

    def refuse(step: object, logits_out: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    released: list[object] = []

    def release(gpu: object) -> None:
        released.append(gpu)

    with monkeypatch.context() as patch:
        patch.setattr(runner._ops, "begin", refuse)
        patch.setattr(type(runner._gpu), "release", release)
        with pytest.raises(Unavailable, match=r"3 tokens .* 20\.00 GiB"):
            runner.run(batch, sampling([lane], 0))
    assert released == [runner._gpu], "what is kept unused goes to whoever needs it"
    assert len(runner.run(batch, sampling([lane], 0)).token_ids) == 1


@pytest.mark.parametrize("seed", range(4))
def test_staged_arrays_arrive_whole_however_late_the_copies_run(seed: int) -> None:
    streams = FakeStreams(seed, drift_odds=0.1)
    staging = Staging(torch.device("cpu"), streams, 64)
    found: list[list[int]] = []
    for i in range(12):
        tensors = staging.put({"a": np.full(5 * i, i, np.int32), "b": np.array([i], np.int64)})

        def read(a: Tensor = tensors["a"], b: Tensor = tensors["b"]) -> None:
            found.append([*a.tolist(), *b.tolist()])

        streams.compute.submit(read)
    streams.synchronize()
    assert found == [[i] * (5 * i + 1) for i in range(12)]


def test_the_fake_device_catches_a_host_buffer_that_is_reused_too_early() -> None:
    streams = FakeStreams(0, drift_odds=0.0)
    staging = Staging(torch.device("cpu"), streams, 64)
    for buffer in staging._buffers:
        buffer.memory = staging._buffers[0].memory
    for i in range(NUM_HOST_BUFFERS):
        staging.put({"a": np.array([i])})
    with pytest.raises(StreamMisuse, match="before its upload"):
        streams.synchronize()
