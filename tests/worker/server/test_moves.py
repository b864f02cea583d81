"""The Move call over real gRPC: what it answers, and the codes of its refusals."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from small_models import generated, is_in_state, know, loaded, room_for, small_loader
from toy_worker import Exchange, RunningWorker, ask, eventually, running_worker
from worker_probes import hold

from naru_proto import names
from naru_proto.v1 import worker_pb2

ACTIVE, COLD = worker_pb2.TIER_ACTIVE, worker_pb2.TIER_COLD


async def refusal(worker: RunningWorker, **fields: Any) -> tuple[grpc.StatusCode, str, str]:
    """Status, error code, and message."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.stub.Move(worker_pb2.MoveRequest(**fields))
    metadata: dict[str, Any] = dict(caught.value.trailing_metadata() or ())  # type: ignore[arg-type]
    return caught.value.code(), metadata[names.METADATA_ERROR_CODE], caught.value.details() or ""


async def test_a_known_model_is_brought_up_and_taken_down() -> None:
    async with running_worker(small_loader(), room_for(2)) as worker:
        await know(worker, "a")
        reply = await worker.stub.Move(worker_pb2.MoveRequest(model="a", tier=ACTIVE, fencing_token=2))
        assert reply.state in (
            worker_pb2.MODEL_STATE_FETCHING,
            worker_pb2.MODEL_STATE_LOADING,
            worker_pb2.MODEL_STATE_READY,
        )
        await eventually(lambda: loaded(worker) == {"a"}, "it never came up")
        assert await generated(worker, "a", "r")
        code, error, message = await refusal(worker, model="a", tier=COLD, fencing_token=1)
        assert (code, error) == (grpc.StatusCode.FAILED_PRECONDITION, "stale_command")
        assert "fencing token 1" in message
        await worker.stub.Move(worker_pb2.MoveRequest(model="a", tier=COLD, fencing_token=2, only_if_idle=True))
        await eventually(lambda: not loaded(worker), "it never left")
        assert not await is_in_state(worker, "a", worker_pb2.MODEL_STATE_READY)


async def test_a_model_it_does_not_know_is_not_found() -> None:
    async with running_worker(small_loader(), room_for(2)) as worker:
        code, error, message = await refusal(worker, model="a", tier=ACTIVE)
        assert (code, error) == (grpc.StatusCode.NOT_FOUND, "model_not_found")
        assert "'a' is not known" in message


async def test_a_busy_model_is_not_taken_down_when_only_an_idle_one_may_be() -> None:
    async with running_worker(small_loader(), room_for(2)) as worker:
        await worker.load("a", "toy://a")
        pause = hold(worker, "a", 30.0)
        stream = Exchange(worker.stub)
        await stream.send(ask("r", model="a"))
        await eventually(lambda: any(r.entry.num_in_flight for r in worker.app.hub.residents()), "no request")
        code, error, message = await refusal(worker, model="a", tier=COLD, only_if_idle=True)
        assert (code, error) == (grpc.StatusCode.UNAVAILABLE, "service_unavailable")
        assert "1 requests in flight" in message
        pause.set()
        await stream.close()


@pytest.mark.parametrize(
    "fields", [{"model": ""}, {"model": "a", "tier": 9}, {"model": "a", "tier": COLD, "drain_timeout_s": -1.0}]
)
async def test_fields_that_make_no_sense_are_refused(fields: dict[str, Any]) -> None:
    async with running_worker(small_loader(), room_for(2)) as worker:
        await know(worker, "a")
        code, error, _ = await refusal(worker, **fields)
        assert (code, error) == (grpc.StatusCode.INVALID_ARGUMENT, "invalid_request_error")


async def test_a_worker_that_drains_brings_nothing_up() -> None:
    async with running_worker(small_loader(), room_for(2)) as worker:
        await know(worker, "a")
        await worker.stub.Drain(worker_pb2.DrainRequest())
        code, _, message = await refusal(worker, model="a", tier=ACTIVE)
        assert code is grpc.StatusCode.UNAVAILABLE and "draining" in message
