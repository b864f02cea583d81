"""The engine of models that do not generate, over a pretend encoder: in virtual time, a batch a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from naru_proto.errors import DeadlineExceeded, InvalidRequest, Overloaded
from naru_worker.adapters.engine import batch_engine as module
from naru_worker.adapters.engine.batch_engine import BatchEngine, EncoderBatches
from naru_worker.adapters.engine.batch_request import BatchInput, BatchRequest
from naru_worker.adapters.engine.batch_runner import EncoderInput
from naru_worker.adapters.engine.deltas import Outbox, SequenceDelta
from naru_worker.adapters.ops.protocol import DeviceFault, FloatArray
from naru_worker.core.batching import BatchLimits
from naru_worker.core.request import FinishReason, Request, RequestId
from naru_worker.core.sampling import SamplingParams


class SumEncoder:
    """A text's vector: its tokens' sum and number. The token 13 is more than it can bear."""

    weight_bytes = workspace_bytes = 0
    width = 2
    max_num_tokens = 10

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        """Lengths of the inputs, by batch."""

    def encode(self, inputs: Sequence[EncoderInput]) -> FloatArray:
        self.batches.append([len(each.token_ids) for each in inputs])
        if any(13 in each.token_ids for each in inputs):
            raise InvalidRequest("thirteen")
        return np.array([[sum(each.token_ids), len(each.token_ids)] for each in inputs], np.float32)

    def close(self) -> None:
        pass


class Bench:
    """An engine, its runner, its clock and what came out."""

    def __init__(self, max_rows: int = 4, max_delay_s: float = 1.0, window: int = 1) -> None:
        self.runner = SumEncoder()
        self.now_s = 100.0
        limits = BatchLimits(max_rows, max_delay_s, self.runner.max_num_tokens, window=window)
        self.engine = BatchEngine(EncoderBatches(self.runner), limits, clock=lambda: self.now_s)
        self.outbox: Outbox = []
        self._arrivals = 0

    def submit(self, request_id: str, *texts: tuple[int, ...], priority: int = 0) -> None:
        inputs = tuple(BatchInput(EncoderInput(text), len(text)) for text in texts)
        arrivals = tuple(range(self._arrivals, self._arrivals + len(texts)))
        self._arrivals += len(texts)
        request = BatchRequest(RequestId(request_id), inputs, arrivals, priority)
        self.engine.submit_batch(request, self.now_s, self.outbox)

    def drain(self) -> None:
        """Steps while there is work, and waits where there will be."""
        while self.engine.wake_s is not None:
            self.now_s = max(self.now_s, self.engine.wake_s)
            assert self.engine.has_work
            self.engine.step(self.outbox)

    def last(self, request_id: str) -> SequenceDelta:
        (delta,) = [each for each in self.outbox if each.request_id == request_id]
        assert delta.is_last
        return delta

    def sums(self, request_id: str) -> list[float]:
        output = self.last(request_id).output
        assert output is not None
        assert [each.index for each in output.vectors] == list(range(len(output.vectors)))
        return [float(each.values[0]) for each in output.vectors]


def test_a_failed_device_ends_the_engine_and_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.submit("a", (1,), (1,), (1,), (1,))

    def fail(inputs: Sequence[EncoderInput]) -> FloatArray:
        raise DeviceFault("ECC error")

    monkeypatch.setattr(bench.runner, "encode", fail)
    with pytest.raises(DeviceFault, match="ECC error"):
        bench.engine.step(bench.outbox)
    assert not bench.outbox


def test_inputs_of_one_request_run_in_several_batches_and_come_back_in_order() -> None:
    bench = Bench()
    bench.submit("a", *((value,) for value in range(1, 7)))
    bench.submit("b", (1, 2), (3,))
    bench.drain()
    assert bench.runner.batches == [[1, 1, 1, 1], [1, 1, 2, 1]]
    assert bench.sums("a") == [1, 2, 3, 4, 5, 6]
    assert bench.sums("b") == [3, 3]
    usage = bench.last("a").usage
    assert usage is not None and usage.prompt_tokens == 6
    assert bench.engine.stats.finished == {"stop": 2}


def test_a_batch_has_no_more_tokens_than_the_runner_takes() -> None:
    bench = Bench()
    bench.submit("a", (1,) * 6, (1,) * 4, (1,) * 5, (1,) * 9)
    bench.drain()
    assert bench.runner.batches == [[6, 4], [5], [9]]


def test_what_others_have_to_say_leaves_before_a_batch_is_computed() -> None:
    bench = Bench()
    seen: list[int] = []

    def look() -> None:
        seen.append(len(bench.runner.batches))

    bench.engine.step(bench.outbox, before_long=look)
    bench.submit("a", (1,), (1,), (1,), (1,))
    bench.engine.step(bench.outbox, before_long=look)
    assert (seen, len(bench.runner.batches)) == ([0], 1)


def test_texts_of_like_length_run_together_whoever_sent_them() -> None:
    bench = Bench(max_rows=2, window=3)
    bench.submit("a", (1,), (1,) * 5, (2,))
    bench.submit("b", (1,) * 5)
    bench.drain()
    assert bench.runner.batches == [[1, 1], [5, 5]]


def test_the_urgent_go_first() -> None:
    bench = Bench(max_rows=2)
    bench.submit("late", (1,), (1,), priority=1)
    bench.submit("soon", (1, 1), (1, 1), priority=0)
    bench.drain()
    assert bench.runner.batches == [[2, 2], [1, 1]]
    assert [delta.request_id for delta in bench.outbox] == ["soon", "late"]


def test_a_bad_input_costs_its_own_request_alone() -> None:
    bench = Bench()
    bench.submit("a", (1,), (2,))
    bench.submit("bad", (13,), (5,))
    bench.drain()
    assert bench.runner.batches == [[1, 1, 1, 1], [1], [1], [1]]
    assert bench.sums("a") == [1, 2]
    error = bench.last("bad").error
    assert isinstance(error, InvalidRequest) and error.message == "thirteen"
    assert bench.engine.stats.num_failed_steps == 2
    assert bench.engine.wake_s is None, "the other input of the bad one is not computed any more"


def test_what_is_cancelled_runs_no_more() -> None:
    bench = Bench()
    bench.submit("a", (1,))
    bench.submit("b", (2,))
    bench.submit("c", (3,))
    bench.engine.cancel(RequestId("b"), None, bench.outbox)
    bench.engine.cancel(RequestId("c"), DeadlineExceeded("late"), bench.outbox)
    bench.engine.cancel(RequestId("unknown"), None, bench.outbox)
    bench.drain()
    assert bench.runner.batches == [[1]]
    assert bench.last("b").finish_reason is FinishReason.CANCELLED
    assert isinstance(bench.last("c").error, DeadlineExceeded)
    assert bench.engine.stats.finished == {"cancelled": 1, "error": 1, "stop": 1}


def test_numbers_tell_what_waits_and_how_batches_went() -> None:
    bench = Bench()
    bench.submit("a", (1, 1), (1,))
    bench.now_s += 0.25
    stats = bench.engine.stats
    assert (stats.num_waiting, stats.num_waiting_tokens, stats.num_taken) == (2, 3, 1)
    assert bench.engine.queue_age_s() == 0.25
    bench.drain()
    assert (stats.num_waiting, stats.num_waiting_tokens, stats.num_running) == (0, 0, 0)
    assert (stats.batch_rows.total, sum(stats.batch_rows.counts)) == (2, 1)
    assert (stats.batch_wait_s.total, sum(stats.batch_wait_s.counts)) == (2.0, 2)
    assert bench.engine.queue_age_s() == 0.0


def test_too_many_waiting_inputs_are_refused_as_overload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_INPUTS", 3)
    bench = Bench()
    bench.submit("a", (1,), (1,))
    bench.submit("b", (1,), (1,))
    assert isinstance(bench.last("b").error, Overloaded)
    bench.drain()
    assert bench.sums("a") == [1, 1]


def test_what_waits_holds_no_more_than_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 100)
    bench = Bench()
    for request_id, num_bytes in (("a", 150), ("b", 1)):
        inputs = (BatchInput(EncoderInput((1,)), 1, num_bytes=num_bytes),)
        request = BatchRequest(RequestId(request_id), inputs, (len(bench.outbox) + num_bytes,))
        bench.engine.submit_batch(request, bench.now_s, bench.outbox)
    assert isinstance(bench.last("b").error, Overloaded), "the first may be larger, as it would never fit"
    bench.drain()
    bench.submit("c", (4,))
    bench.drain()
    assert bench.sums("c") == [4]


def test_a_request_for_text_is_refused() -> None:
    bench = Bench()
    request = Request(RequestId("r"), (1,), SamplingParams(), seed=0, arrival=0)
    bench.engine.submit(request, 0.0, bench.outbox)
    error = bench.last("r").error
    assert error is not None and (error.code, error.param) == ("invalid_request_error", "model")
