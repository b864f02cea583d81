"""Whose request is served first, and that each ends when its time is over, over real gRPC."""

from __future__ import annotations

import asyncio
import math
import threading
from typing import Any

import pytest
from small_models import know, loaded
from toy_worker import Exchange, ToyLoader, ask, eventually, running_worker
from worker_probes import hold

from naru_proto.v1 import worker_pb2


def request(
    request_id: str, tenant: str = "", *, weight: float = 0.0, timeout_s: float = 0.0, **fields: Any
) -> worker_pb2.GenerateRequest:
    """A request of 4 tokens of output, unless told otherwise."""
    message = ask(request_id, fields.pop("prompt", request_id), **{"max_tokens": 4, **fields})
    message.tenant, message.tenant_weight, message.timeout_s = tenant, weight, timeout_s
    return message


def one_at_a_time(**more: Any) -> ToyLoader:
    return ToyLoader(max_num_seqs=1, **more)


def ends(router: Exchange) -> list[str]:
    """Requests in the order in which they ended."""
    return [delta.request_id for frame in router.frames for delta in frame.deltas if delta.request_done]


async def test_held_requests_start_by_priority_and_then_by_turns_of_their_tenants() -> None:
    loader = one_at_a_time(building={"toy://m": (gate := threading.Event())})
    async with running_worker(loader) as worker:
        await know(worker, "m")
        router = Exchange(worker.stub)
        requests = [request(f"burst{i}", "burst", model="m") for i in range(4)]
        requests += [request(f"single{i}", "single", model="m") for i in range(2)]
        urgent = request("urgent", "burst", model="m")
        urgent.priority = -5
        await router.send(*requests, urgent)
        await eventually(lambda: worker.app.board.num_held("m") == 7, "they were not held")
        gate.set()
        await router.finish(*(r.request_id for r in requests), "urgent")
        assert ends(router) == ["urgent", "burst0", "single0", "burst1", "single1", "burst2", "burst3"]
        await router.close()


async def test_a_tenant_that_comes_late_does_not_wait_behind_the_burst_of_another() -> None:
    async with running_worker(one_at_a_time()) as worker:
        await worker.load()
        gate = hold(worker, "toy")
        router = Exchange(worker.stub)
        burst = [request(f"b{i:02}", "burst") for i in range(20)]
        await router.send(*burst)
        await eventually(lambda: len(worker.app.board) == 20, "they did not come")
        gate.set()
        await router.read_until(lambda: "b02" in router.deltas)
        await router.send(request("late", "single"))
        await router.finish("late", *(r.request_id for r in burst))
        position = ends(router).index("late")
        assert position < 19, "it was served before the end of the burst"
        names = ends(router)
        del names[position]
        assert names == sorted(names), "a tenant's own requests keep their order"
        await router.close()


async def test_work_of_tenants_is_shared_by_their_weights() -> None:
    async with running_worker(one_at_a_time()) as worker:
        await worker.load()
        gate = hold(worker, "toy")
        router = Exchange(worker.stub)
        await router.send(request("first", "zero"))
        await eventually(lambda: len(worker.app.board) == 1, "it did not come")
        ones = [request(f"a{i:02}", "one", weight=1.0, prompt="same size") for i in range(12)]
        threes = [request(f"b{i:02}", "three", weight=3.0, prompt="same size") for i in range(12)]
        await router.send(*ones, *threes)
        await eventually(lambda: len(worker.app.board) == 25, "they did not come")
        gate.set()
        await router.finish(*(r.request_id for r in (*ones, *threes)))
        first_twelve = ends(router)[1:13]
        assert sum(name.startswith("b") for name in first_twelve) in (8, 9, 10)
        await router.close()


@pytest.mark.parametrize("where", ["held", "waiting", "running"])
async def test_a_request_ends_when_its_time_is_over_wherever_it_is(where: str) -> None:
    loader = one_at_a_time(building={"toy://m": (gate := threading.Event())})
    async with running_worker(loader) as worker:
        await know(worker, "m")
        router = Exchange(worker.stub)
        if where != "held":
            gate.set()
            await worker.generate(request("warm", model="m"))
            hold(worker, "m", step_s=0.01)
            if where == "waiting":
                await router.send(request("before", model="m", max_tokens=200))
                await router.read_until(lambda: "before" in router.deltas)
        await router.send(request("late", model="m", max_tokens=200, timeout_s=0.4))
        await router.finish("late")
        (*begun, last) = router.deltas["late"]
        assert (last.error.code, last.error.retryable) == ("deadline_exceeded", False)
        assert "0.4 s" in last.error.message
        assert bool(begun) is (where == "running")
        if where == "waiting":
            await router.send(cancel=("before",))
            await router.finish("before")
        await eventually(lambda: len(worker.app.board) == 0, "something stayed")
        gate.set()
        await eventually(lambda: loaded(worker) == {"m"}, "the load was given up with the request")
        await router.close()


async def test_a_request_that_is_done_in_time_has_no_deadline_any_more() -> None:
    async with running_worker(ToyLoader(), None, "toy") as worker:
        deltas = await worker.generate(request("a", timeout_s=30.0))
        assert deltas[-1].request_done and not deltas[-1].HasField("error")
        loop = asyncio.get_running_loop()
        pending = [h for h in loop._scheduled if not h.cancelled() and "_run_out" in repr(h)]  # type: ignore[attr-defined]
        assert not pending


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tenant", "x" * 257),
        ("tenant_weight", -1.0),
        ("tenant_weight", math.nan),
        ("tenant_weight", math.inf),
        ("timeout_s", -0.1),
        ("timeout_s", math.nan),
        ("timeout_s", math.inf),
    ],
)
async def test_terms_out_of_range_are_refused_by_name(field: str, value: object) -> None:
    async with running_worker(ToyLoader(), None, "toy") as worker:
        message = request("a")
        setattr(message, field, value)
        (delta,) = await worker.generate(message)
        assert (delta.error.code, delta.error.param) == ("invalid_request_error", field)
        assert len(worker.app.board) == 0


async def test_tiny_and_huge_weights_are_served() -> None:
    async with running_worker(ToyLoader(), None, "toy") as worker:
        weights = [5e-324, 1e308, 0.0]
        answers = await asyncio.gather(
            *(worker.generate(request(f"r{i}", f"t{i % 3}", weight=weights[i % 3])) for i in range(6))
        )
        assert all(deltas[-1].request_done and not deltas[-1].HasField("error") for deltas in answers)
