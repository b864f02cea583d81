"""Steps whose weights are still on their way: held, run again as they are, dropped when nobody waits for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from toy_model import ToyRunner, toy_engine

from naru_proto.errors import InternalError, LoadError
from naru_worker.adapters.engine.deltas import SequenceDelta
from naru_worker.adapters.engine.engine import PENDING_RETRY_S, ModelEngine
from naru_worker.adapters.memory.kv_space import KVSpace
from naru_worker.adapters.memory.ledger import MemoryLedger
from naru_worker.adapters.ops.protocol import BatchInputs, WeightsPending
from naru_worker.core.kv_growth import KVLayout
from naru_worker.core.request import FinishReason, Request, RequestId
from naru_worker.core.sampling import SamplingParams


def request(name: str, prompt: str, arrival: int = 0, **params: Any) -> Request:
    given: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, **params}
    return Request(RequestId(name), tuple(prompt.encode()), SamplingParams(**given), 7, arrival)


class Late:
    """An engine whose weights are not there yet, and its clock."""

    def __init__(self, **options: Any) -> None:
        self.now_s = 0.0
        self.engine, self.runner, self.scheduler = toy_engine(clock=lambda: self.now_s, **options)
        self.outbox: list[SequenceDelta] = []
        self.tries: list[BatchInputs] = []
        self.error: Exception = WeightsPending()
        self.runner.before_step = self.be_late

    def be_late(self, batch: BatchInputs) -> None:
        self.tries.append(batch)
        raise self.error

    def submit(self, item: Request) -> None:
        self.engine.submit(item, self.now_s, self.outbox)

    def arrive(self) -> None:
        """The weights are there."""
        self.runner.before_step = lambda batch: None

    def step(self) -> None:
        self.engine.step(self.outbox)
        self.now_s += PENDING_RETRY_S

    def finish(self) -> None:
        for _ in range(200):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work
        assert self.engine.wake_s is None
        self.scheduler.check()
        assert self.engine.kv_stats().num_used_blocks == 0

    def ids(self, name: str) -> list[int]:
        (last,) = [d for d in self.outbox if d.request_id == name and d.is_last]
        assert last.error is None
        return [i for d in self.outbox if d.request_id == name for i in d.token_ids]

    def errors(self) -> dict[str, object]:
        return {str(d.request_id): d.error for d in self.outbox if d.is_last and d.error is not None}


def solo(item: Request) -> list[int]:
    engine, _, _ = toy_engine()
    outbox: list[SequenceDelta] = []
    engine.submit(item, 0.0, outbox)
    while engine.has_work:
        engine.step(outbox)
    return [i for d in outbox for i in d.token_ids]


def test_the_very_same_step_is_run_until_its_weights_are_there() -> None:
    late = Late()
    late.submit(request("a", "once upon"))
    late.submit(request("b", "a time", 1))
    late.step()
    first = {name: np.array(getattr(late.tries[0], name)) for name in ("token_ids", "slots", "block_table")}
    late.submit(request("c", "there was", 2))
    for _ in range(4):
        late.step()
    assert len(late.tries) == 5
    for name, expected in first.items():
        assert np.array_equal(getattr(late.tries[-1], name), expected)
    assert late.outbox == []
    assert (late.engine.stats.num_steps, late.engine.stats.num_failed_steps, late.engine.stats.num_waiting) == (0, 0, 1)
    assert sum(late.engine.stats.step_s.counts) == 0, "nothing was stepped yet"
    late.arrive()
    late.finish()
    for name, prompt in (("a", "once upon"), ("b", "a time"), ("c", "there was")):
        assert late.ids(name) == solo(request(name, prompt))


def test_an_engine_that_waits_for_weights_has_no_work_before_its_time() -> None:
    late = Late()
    late.submit(request("a", "once upon"))
    late.engine.step(late.outbox)
    assert not late.engine.has_work
    assert late.engine.wake_s == PENDING_RETRY_S
    late.now_s = PENDING_RETRY_S
    assert late.engine.has_work


def test_copies_of_a_held_step_may_be_made_again() -> None:
    late = Late()
    late.arrive()
    late.submit(request("a", "forks of the prompt", n=3, temperature=1.0))
    late.step()
    plan_copies: list[list[list[int]]] = []

    def be_late(batch: BatchInputs) -> None:
        plan_copies.append(batch.copies.tolist())
        if len(plan_copies) == 1:
            late.runner.logits(batch)  # all of it was done, but for the drawing
        if len(plan_copies) < 4:
            raise WeightsPending

    late.runner.before_step = be_late
    late.step()
    assert plan_copies[0], "forks copy the block they share"
    late.finish()
    assert plan_copies[0] == plan_copies[1] == plan_copies[3]
    alone, _, _ = toy_engine()
    outbox: list[SequenceDelta] = []
    alone.submit(request("a", "forks of the prompt", n=3, temperature=1.0), 0.0, outbox)
    while alone.has_work:
        alone.step(outbox)
    for index in range(3):
        assert [i for d in late.outbox if d.index == index for i in d.token_ids] == [
            i for d in outbox if d.index == index for i in d.token_ids
        ]


def test_a_request_of_a_held_step_is_cancelled_at_once_and_the_others_go_on() -> None:
    late = Late()
    late.submit(request("stays", "once upon"))
    late.submit(request("goes", "a time", 1))
    late.step()
    late.engine.cancel(RequestId("goes"), None, late.outbox)
    assert [(d.request_id, d.finish_reason, d.is_last) for d in late.outbox] == [("goes", FinishReason.CANCELLED, True)]
    late.submit(request("new", "a time", 2))
    late.step()
    assert len(late.tries) == 2
    late.arrive()
    late.finish()
    assert late.ids("stays") == solo(request("stays", "once upon"))
    assert late.ids("new") == solo(request("new", "a time"))
    assert late.ids("goes") == []


def test_a_held_step_that_nobody_waits_for_is_dropped_though_its_weights_never_come() -> None:
    late = Late()
    late.submit(request("a", "once upon"))
    late.submit(request("b", "a time", 1, n=2))
    late.step()
    for name in ("a", "b"):
        late.engine.cancel(RequestId(name), None, late.outbox)
    assert [d.is_last for d in late.outbox].count(True) == 2
    late.finish()
    assert len(late.tries) == 1
    late.submit(request("c", "once upon", 2))
    late.arrive()
    late.finish()
    assert late.ids("c") == solo(request("c", "once upon"))


def test_when_the_load_dies_the_requests_end_with_its_error() -> None:
    late = Late(max_num_seqs=2)
    for index, name in enumerate(("a", "b", "waits")):
        late.submit(request(name, "once upon", index))
    late.step()
    late.error = LoadError("the image is damaged in layer 7")
    late.finish()
    errors = late.errors()
    assert set(errors) == {"a", "b", "waits"}
    assert all(error is late.error for error in errors.values())


def test_a_fault_after_a_cancellation_ends_the_rest_of_the_held_step() -> None:
    late = Late()
    late.submit(request("a", "once upon"))
    late.submit(request("b", "a time", 1))
    late.step()
    late.engine.cancel(RequestId("a"), None, late.outbox)
    late.error = RuntimeError("fire")
    late.finish()
    errors = late.errors()
    assert set(errors) == {"b"}
    assert isinstance(errors["b"], InternalError)
    assert "fire" not in errors["b"].message


def test_no_memory_is_given_up_under_a_held_step() -> None:
    """Cancelled rows are still computed, in blocks that nobody holds any more."""
    ledger = MemoryLedger(40)
    layout = KVLayout(4, 4, 10, 1, 4)
    assert ledger.book_kv("m", layout.floor_bytes)

    def make_space(runner: ToyRunner) -> KVSpace:
        return KVSpace("m", ledger, runner, layout)

    late = Late(num_blocks=40, make_space=make_space)
    late.submit(request("stays", "once"))
    late.submit(request("goes", "upon a time there was a king", 1))
    late.step()
    late.engine.cancel(RequestId("goes"), None, late.outbox)
    engine: ModelEngine = late.engine
    assert engine.kv_committed_bytes == 12
    assert engine.trim_kv(100) == 0
    late.arrive()
    late.finish()
    assert engine.trim_kv(100) == 8
    assert late.ids("stays") == solo(request("stays", "once"))


@pytest.mark.parametrize("num_tries", [0, 1, 3])
def test_latency_counts_the_wait_for_weights(num_tries: int) -> None:
    late = Late()
    late.submit(request("a", "once upon", max_tokens=1))
    for _ in range(num_tries):
        late.step()
    late.arrive()
    late.finish()
    assert late.engine.stats.ttft_s.total == pytest.approx(num_tries * PENDING_RETRY_S)


def test_beside_models_with_work_no_step_is_begun_before_all_weights_are_there() -> None:
    late = Late()
    late.runner.is_ready = False
    late.submit(request("a", "once upon"))
    late.engine.step(late.outbox, is_alone=False)
    assert late.tries == []
    assert not late.engine.has_work
    assert late.engine.wake_s == PENDING_RETRY_S
    late.now_s = PENDING_RETRY_S
    assert late.engine.has_work
    late.engine.step(late.outbox, is_alone=True)
    assert len(late.tries) == 1, "alone it begins with the layers it has"
    late.runner.is_ready = True
    late.arrive()
    late.now_s += PENDING_RETRY_S
    late.engine.step(late.outbox, is_alone=False)
    late.finish()
    assert late.ids("a") == solo(request("a", "once upon"))


def test_a_request_that_is_cancelled_while_its_model_is_put_off_leaves_no_work() -> None:
    late = Late()
    late.runner.is_ready = False
    late.submit(request("a", "once upon"))
    late.engine.step(late.outbox, is_alone=False)
    late.engine.cancel(RequestId("a"), None, late.outbox)
    assert not late.engine.has_work
    assert late.engine.wake_s is None
