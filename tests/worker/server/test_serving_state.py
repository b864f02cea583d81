"""Models side by side, draining, faults and what health says of them."""

from __future__ import annotations

import asyncio
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from toy_worker import (
    DEADLINE_S,
    Exchange,
    ToyLoader,
    ask,
    eventually,
    ids,
    running_worker,
    toy_settings,
)
from worker_probes import health, hold

from naru_proto.v1 import inference_pb2, worker_pb2
from naru_worker.adapters.ops.protocol import BatchInputs, DeviceFault

READY, FAILED = worker_pb2.MODEL_STATE_READY, worker_pb2.MODEL_STATE_FAILED
FETCHING, LOADING = worker_pb2.MODEL_STATE_FETCHING, worker_pb2.MODEL_STATE_LOADING
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def test_models_take_turns_and_keep_their_own_output() -> None:
    async with running_worker() as worker:
        await worker.load("a", "toy://a")
        await worker.load("b", "toy://b")
        expected = {name: ids(await worker.generate(ask("solo", model=name, max_tokens=60))) for name in "ab"}
        assert expected["a"] != expected["b"]
        router = Exchange(worker.stub)
        await router.send(*(ask(f"{name}{i}", model=name, max_tokens=60) for i in range(3) for name in "ab"))
        await router.read_until(lambda: len(router.deltas) == 6)
        assert not any(router.is_done(r) for r in router.deltas), "one model ran to its end before the other began"
        await router.finish(*(f"{name}{i}" for i in range(3) for name in "ab"))
        for request_id, deltas in router.deltas.items():
            assert ids(deltas) == expected[request_id[0]]
        await router.close()


async def test_draining_finishes_what_runs_and_refuses_the_rest() -> None:
    async with running_worker(None, None, "toy") as worker:
        hold(worker, "toy")
        assert await health(worker) == SERVING
        assert await health(worker, "naru.v1.Worker") == SERVING
        router = Exchange(worker.stub)
        await router.send(ask("r", max_tokens=40))
        await router.read_until(lambda: "r" in router.deltas)
        await worker.stub.Drain(worker_pb2.DrainRequest())
        await worker.stub.Drain(worker_pb2.DrainRequest())
        await router.send(ask("late"))
        await router.finish("r", "late")
        assert router.deltas["late"][-1].error.code == "service_unavailable"
        assert router.deltas["late"][-1].error.retryable
        assert len(ids(router.deltas["r"])) == 40
        # It is alive: a probe that fails would have it killed in the middle of its drain.
        assert await health(worker) == SERVING
        assert await health(worker, "naru.v1.Worker") == NOT_SERVING
        assert await health(worker, "ready") == NOT_SERVING
        assert (await worker.stub.Describe(worker_pb2.DescribeRequest())).draining
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker.load("other")
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await router.close()


async def test_shutting_down_ends_what_outlasts_the_drain_and_tells_the_reader() -> None:
    async with running_worker(None, toy_settings(drain_timeout_s=0.05), "toy") as worker:
        hold(worker, "toy", step_s=0.02)
        router = Exchange(worker.stub)
        await router.send(ask("r", max_tokens=240))
        await router.read_until(lambda: "r" in router.deltas)
        leaving = asyncio.create_task(worker.app.shut_down())
        await router.finish("r")
        assert router.deltas["r"][-1].error.code == "service_unavailable"
        assert await router.code() is grpc.StatusCode.OK
        assert await leaving == 0


async def test_a_failing_step_leaves_health_and_the_next_request_alone() -> None:
    async with running_worker(None, None, "toy") as worker:
        runner = worker.loader.runners["toy"]

        def fail(batch: BatchInputs) -> None:
            runner.before_step = lambda batch: None
            raise RuntimeError("once")

        runner.before_step = fail
        deltas = await worker.generate(ask("hit"))
        assert deltas[-1].error.code == "internal_error"
        assert deltas[-1].error.retryable
        assert len(ids(await worker.generate(ask("next")))) == 12
        assert await health(worker) == SERVING


@pytest.mark.parametrize(
    ("reason", "code"),
    [(ValueError("nobody catches this"), "internal_error"), (DeviceFault("ECC error"), "service_unavailable")],
    ids=["a fault of ours", "a failed device"],
)
async def test_a_dead_engine_loop_ends_requests_turns_health_and_leaves_with_an_error(
    reason: Exception, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_worker(None, None, "toy") as worker:
        hold(worker, "toy")
        router = Exchange(worker.stub)
        await router.send(ask("r", max_tokens=240))
        await router.read_until(lambda: "r" in router.deltas)

        def kill() -> None:
            raise reason

        worker.app.loop.call(kill)
        await router.finish("r")
        assert router.deltas["r"][-1].error.code == code
        assert router.deltas["r"][-1].error.retryable
        await eventually(worker.app.stopping.is_set, "the process does not leave")
        word = "ECC error" if code == "service_unavailable" else "the engine has stopped (ValueError)"
        assert f"{word}; this worker ends" in caplog.text
        assert not worker.app.loop.is_alive
        assert await health(worker) == NOT_SERVING
        (delta,) = await worker.generate(ask("late"))
        assert delta.error.code in ("internal_error", "service_unavailable")
        assert await worker.app.shut_down() == 1


async def test_a_step_that_hangs_is_noticed() -> None:
    settings = toy_settings()
    settings = type(settings)(
        settings.server, type(settings.engine)(backend="ref", step_timeout_s=0.3), settings.memory
    )
    async with running_worker(None, settings, "toy") as worker:
        hang = hold(worker, "toy", DEADLINE_S)
        try:
            deltas = await worker.generate(ask("r"))
            assert deltas[-1].error.code == "internal_error"
            await eventually(worker.app.stopping.is_set, "the process does not leave")
            assert await health(worker) == NOT_SERVING
            assert await worker.app.shut_down() == 1
        finally:
            hang.set()


async def test_the_engine_runs_in_one_thread_and_rests_when_idle() -> None:
    async with running_worker(None, None, "toy") as worker:
        await asyncio.gather(*(worker.generate(ask(f"r{i}")) for i in range(8)))
        runner = worker.loader.runners["toy"]
        assert len(runner.threads) == 1
        assert threading.get_ident() not in runner.threads
        steps = runner.num_steps
        await worker.stub.Stats(worker_pb2.StatsRequest())
        assert runner.num_steps == steps
        assert worker.app.loop.stuck_for_s() == 0.0


async def test_stats_count_tokens_steps_and_blocks() -> None:
    async with running_worker(None, None, "toy") as worker:
        await worker.generate(ask("a", "sixteen tokens!!", max_tokens=5))
        await worker.generate(ask("b", "sixteen tokens!!", max_tokens=5))
        (model,) = (await worker.stub.Stats(worker_pb2.StatsRequest())).models
        assert (model.model, model.generated_tokens, model.num_running, model.num_waiting) == ("toy", 10, 0, 0)
        assert (model.prefix_query_tokens, model.prefix_hit_tokens) == (32, 15)
        assert model.num_steps == 10
        assert model.num_free_blocks == model.num_blocks == 256
        assert model.num_cached_blocks > 0


async def test_reflection_lists_the_services() -> None:
    async with running_worker() as worker:
        stub = reflection_pb2_grpc.ServerReflectionStub(worker.channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        names = [s.name async for reply in call for s in reply.list_services_response.service]
    assert {"naru.v1.Worker", "grpc.health.v1.Health"} <= set(names)


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (worker_pb2.LoadRequest(model="", uri="toy://a"), "model"),
        (worker_pb2.LoadRequest(model="a\nb", uri="toy://a"), "model"),
        (worker_pb2.LoadRequest(model="x" * 1000, uri="toy://a"), "model"),
        (worker_pb2.LoadRequest(model="toy"), "uri"),
        (
            worker_pb2.LoadRequest(model="toy", uri="a", options=worker_pb2.EngineOptions(max_num_seqs=0)),
            "max_num_seqs",
        ),
        (worker_pb2.LoadRequest(model="toy", uri="a", options=worker_pb2.EngineOptions(kv_cache_bytes=-5)), "kv_cache"),
    ],
)
async def test_loads_that_make_no_sense_are_refused(request_: worker_pb2.LoadRequest, param: str) -> None:
    async with running_worker() as worker:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in worker.stub.Load(request_):
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert param in (caught.value.details() or "")
        assert worker.loader.prepared == []


async def test_a_request_for_a_model_that_loads_waits_for_it() -> None:
    loader = ToyLoader(opening={"toy://a": (gate := threading.Event())})
    async with running_worker(loader) as worker:
        load = asyncio.create_task(worker.load())
        await eventually(lambda: bool(loader.prepared), "no load began")
        held = asyncio.create_task(worker.generate(ask("r")))
        await eventually(lambda: worker.app.board.num_held("toy") == 1, "it is not held")
        gate.set()
        await load
        assert (await held)[-1].finish_reason == inference_pb2.FINISH_REASON_LENGTH
