"""Loading, unloading, draining, health and dying, over real gRPC with toy models."""

from __future__ import annotations

import asyncio
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from toy_worker import (
    BLOCK_BYTES,
    DEADLINE_S,
    WEIGHT_BYTES,
    Exchange,
    RunningWorker,
    ToyLoader,
    ask,
    eventually,
    ids,
    running_worker,
    toy_settings,
)

from naru_proto.errors import LoadError
from naru_proto.v1 import inference_pb2, worker_pb2
from naru_worker.adapters.ops.protocol import BatchInputs

READY, FAILED = worker_pb2.MODEL_STATE_READY, worker_pb2.MODEL_STATE_FAILED
FETCHING, LOADING = worker_pb2.MODEL_STATE_FETCHING, worker_pb2.MODEL_STATE_LOADING
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def health(worker: RunningWorker, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(worker.channel)
    reply = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return int(reply.status)


async def described(worker: RunningWorker, name: str = "toy") -> worker_pb2.ModelInfo | None:
    reply = await worker.stub.Describe(worker_pb2.DescribeRequest())
    return next((m for m in reply.models if m.model == name), None)


async def test_a_load_tells_its_progress_and_what_it_loaded() -> None:
    loader = ToyLoader(opening={"toy://a": (gate := threading.Event())})
    async with running_worker(loader) as worker:
        call = worker.stub.Load(worker_pb2.LoadRequest(model="toy", uri="toy://a", generation=3))
        seen: list[worker_pb2.LoadProgress] = []
        async for progress in call:
            seen.append(progress)
            if progress.bytes_done >= 3:
                gate.set()
        assert [p.state for p in seen if p.state != FETCHING] in ([LOADING, READY], [READY])
        assert seen[0].state == FETCHING
        assert [p.bytes_done for p in seen if p.state == FETCHING] == sorted(
            p.bytes_done for p in seen if p.state == FETCHING
        )
        model = await described(worker)
        assert model is not None
        assert (model.state, model.generation, model.uri) == (READY, 3, "toy://a")
        assert (model.max_model_len, model.vocab_size, model.eos_token) == (256, 264, "<eos>")
        assert model.weight_bytes == WEIGHT_BYTES
        assert model.kv_bytes_per_token * model.block_size == BLOCK_BYTES
        assert model.revision == "digest of toy://a"


async def test_loads_of_one_model_at_once_are_one_load() -> None:
    loader = ToyLoader(opening={"toy://a": (gate := threading.Event())})
    async with running_worker(loader) as worker:
        calls = [asyncio.create_task(worker.load()) for _ in range(20)]
        await eventually(lambda: len(loader.opened) == 1, "no load began")
        gate.set()
        for progress in await asyncio.gather(*calls):
            assert progress[-1].state == READY
        assert loader.opened == loader.built == ["toy://a"]
        again = await worker.load()
        assert [p.state for p in again] == [READY]
        assert loader.opened == ["toy://a"]


async def test_a_load_goes_on_when_its_caller_leaves() -> None:
    loader = ToyLoader(opening={"toy://a": (gate := threading.Event())})
    async with running_worker(loader) as worker:
        call = worker.stub.Load(worker_pb2.LoadRequest(model="toy", uri="toy://a"))
        await call.read()
        call.cancel()
        gate.set()
        assert (await worker.load())[-1].state == READY
        assert loader.opened == ["toy://a"]


async def test_a_failed_load_says_why_frees_its_bytes_and_can_be_tried_again() -> None:
    loader = ToyLoader(errors={"toy://a": LoadError("config.json: hidden_size is 'x'")})
    async with running_worker(loader, None) as worker:
        free = worker.app.host.free_bytes()
        for attempt in range(1, 3):
            last = (await worker.load())[-1]
            assert (last.state, last.error.code) == (FAILED, "model_load_failed")
            assert "hidden_size" in last.error.message
            assert len(loader.opened) == attempt
        model = await described(worker)
        assert model is not None
        assert (model.state, model.error.message) == (FAILED, last.error.message)
        (delta,) = await worker.generate(ask("r"))
        assert delta.error.code == "service_unavailable"
        assert "hidden_size" in delta.error.message
        assert worker.app.host.free_bytes() == free
        loader.errors.clear()
        assert (await worker.load())[-1].state == READY
        assert len(ids(await worker.generate(ask("r")))) == 12


@pytest.mark.parametrize("error", [ValueError("odd"), MemoryError(), OSError(5, "I/O error"), RecursionError()])
async def test_whatever_a_load_raises_the_worker_lives_on(error: Exception) -> None:
    loader = ToyLoader(errors={"toy://bad": error})
    async with running_worker(loader, None, "toy") as worker:
        assert (await worker.load("bad", "toy://bad"))[-1].state == FAILED
        assert len(ids(await worker.generate(ask("r")))) == 12
        assert await health(worker) == SERVING


async def test_an_older_generation_is_refused_naming_the_newer() -> None:
    async with running_worker() as worker:
        await worker.load(generation=5)
        for attempt in (
            worker.load(generation=4),
            worker.load("toy", "toy://b", generation=5),
            worker.stub.Unload(worker_pb2.UnloadRequest(model="toy", generation=4)),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await attempt
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "5" in (caught.value.details() or "")
        await worker.stub.Unload(worker_pb2.UnloadRequest(model="toy", generation=6))
        with pytest.raises(grpc.aio.AioRpcError):
            await worker.load(generation=5)
        assert await described(worker) is None


async def test_a_newer_generation_with_other_files_replaces_and_voids_the_cache() -> None:
    async with running_worker() as worker:
        await worker.load(generation=1)
        first = await worker.generate(ask("a", "a prompt of several blocks"))
        again = await worker.generate(ask("b", "a prompt of several blocks"))
        assert again[-1].usage.cached_tokens > 0
        epoch = (await worker.stub.Describe(worker_pb2.DescribeRequest())).epoch
        assert (await worker.load("toy", "toy://b", generation=2))[-1].state == READY
        assert worker.loader.released == ["toy://a"]
        other = await worker.generate(ask("c", "a prompt of several blocks"))
        assert other[-1].usage.cached_tokens == 0
        assert ids(other) != ids(first)
        assert (await worker.stub.Describe(worker_pb2.DescribeRequest())).epoch != epoch


async def test_a_newer_generation_of_the_same_is_ready_at_once() -> None:
    async with running_worker() as worker:
        await worker.load(generation=1)
        assert [p.state for p in await worker.load(generation=9)] == [READY]
        assert worker.loader.opened == ["toy://a"]
        model = await described(worker)
        assert model is not None
        assert model.generation == 9


async def test_unload_lets_requests_finish_and_gives_everything_back() -> None:
    async with running_worker() as worker:
        free = worker.app.host.free_bytes()
        await worker.load()
        runner = worker.loader.runners["toy"]
        router = Exchange(worker.stub)
        await router.send(ask("r", max_tokens=100))
        await router.read_until(lambda: "r" in router.deltas)
        unload = asyncio.ensure_future(
            worker.stub.Unload(worker_pb2.UnloadRequest(model="toy", drain_timeout_s=DEADLINE_S))
        )
        await router.finish("r")
        await unload
        assert len(ids(router.deltas["r"])) == 100
        assert runner.is_closed
        assert worker.app.host.free_bytes() == free
        assert await described(worker) is None
        (delta,) = await worker.generate(ask("late"))
        assert delta.error.code == "model_not_found"
        await worker.stub.Unload(worker_pb2.UnloadRequest(model="toy"))
        await worker.stub.Unload(worker_pb2.UnloadRequest(model="never heard of"))
        await router.close()


async def test_unload_ends_what_outlasts_its_timeout() -> None:
    async with running_worker(None, None, "toy", "other") as worker:
        hold(worker, "toy")
        router = Exchange(worker.stub)
        await router.send(ask("r", max_tokens=200), ask("o", model="other", max_tokens=50))
        await router.read_until(lambda: {"r", "o"} <= router.deltas.keys())
        await worker.stub.Unload(worker_pb2.UnloadRequest(model="toy", drain_timeout_s=0.0))
        await router.finish("r", "o")
        assert router.deltas["r"][-1].error.code == "service_unavailable"
        assert router.deltas["r"][-1].error.retryable
        assert len(ids(router.deltas["o"])) == 50
        await router.close()


def hold(worker: RunningWorker, name: str, step_s: float = 0.005) -> threading.Event:
    """Makes steps of a toy model take time, so that something is under way while a test acts. Setting it lets go."""
    pause = threading.Event()

    def wait(batch: BatchInputs) -> None:
        pause.wait(step_s)

    worker.loader.runners[name].before_step = wait
    return pause


async def test_requests_while_a_model_comes_and_goes_end_in_text_or_a_clear_error() -> None:
    async with running_worker() as worker:
        router = Exchange(worker.stub)
        names: list[str] = []
        for turn in range(12):
            load = asyncio.create_task(worker.load())
            for i in range(6):
                name = f"{turn}-{i}"
                names.append(name)
                await router.send(ask(name, "x" * (1 + 7 * i), max_tokens=5 + i))
                await router.read_until(lambda: len(router.frames) > 0)
            await load
            names.append(f"{turn}-ready")
            await router.send(ask(names[-1]))
            await worker.stub.Unload(worker_pb2.UnloadRequest(model="toy", drain_timeout_s=(turn % 2) * DEADLINE_S))
        await router.finish(*names)
        codes = {router.deltas[name][-1].error.code for name in names}
        assert codes <= {"", "model_not_found", "service_unavailable"}
        assert "" in codes
        assert worker.loader.opened == worker.loader.released
        await router.close()


async def test_the_last_wish_wins_over_what_is_under_way() -> None:
    gates = {"toy://a": threading.Event(), "toy://b": threading.Event()}
    loader = ToyLoader(opening=gates)
    async with running_worker(loader) as worker:
        first = asyncio.create_task(worker.load("toy", "toy://a", generation=1))
        await eventually(lambda: loader.opened == ["toy://a"], "no load began")
        second = asyncio.create_task(worker.load("toy", "toy://b", generation=2))
        last = (await first)[-1]
        assert (last.state, "2" in last.error.message) == (FAILED, True)
        await eventually(lambda: loader.opened == ["toy://a", "toy://b"], "the second load did not begin")
        unload = asyncio.ensure_future(worker.stub.Unload(worker_pb2.UnloadRequest(model="toy", generation=3)))
        assert (await second)[-1].state == FAILED
        await unload
        assert await described(worker) is None
        assert loader.built == []
        third = asyncio.create_task(worker.load("toy", "toy://b", generation=4))
        gates["toy://b"].set()
        assert (await third)[-1].state == READY


async def test_a_load_that_takes_too_long_fails_and_the_next_one_may_work() -> None:
    loader = ToyLoader(opening={"toy://a": (gate := threading.Event())})
    async with running_worker(loader, toy_settings(load_timeout_s=0.2)) as worker:
        last = (await worker.load())[-1]
        assert (last.state, "0.2 s" in last.error.message) == (FAILED, True)
        gate.set()
        assert (await worker.load())[-1].state == READY


async def test_a_model_that_does_not_fit_is_refused_before_a_weight_is_read() -> None:
    loader = ToyLoader(weight_bytes={"toy://big": 10**6 + 1})
    async with running_worker(loader, None, "toy") as worker:
        last = (await worker.load("big", "toy://big"))[-1]
        assert last.state == FAILED
        assert "1.0 MB of weights" in last.error.message
        assert "are free" in last.error.message
        assert loader.built == ["toy://a"]
        assert len(ids(await worker.generate(ask("r")))) == 12


async def test_two_loads_at_once_never_promise_the_same_bytes() -> None:
    loader = ToyLoader(
        weight_bytes={"toy://x": 600_000, "toy://y": 600_000},
        building={"toy://x": (gate := threading.Event()), "toy://y": gate},
    )
    async with running_worker(loader) as worker:
        loads = [asyncio.create_task(worker.load(uri[-1], uri)) for uri in ("toy://x", "toy://y")]
        done, _ = await asyncio.wait(loads, return_when=asyncio.FIRST_COMPLETED)
        assert next(iter(done)).result()[-1].state == FAILED
        gate.set()
        states = sorted([(await load)[-1].state for load in loads])
        assert states == sorted([READY, FAILED])


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
        assert await health(worker) == NOT_SERVING
        assert await health(worker, "naru.v1.Worker") == NOT_SERVING
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


async def test_a_dead_engine_loop_ends_requests_turns_health_and_leaves_with_an_error() -> None:
    async with running_worker(None, None, "toy") as worker:
        hold(worker, "toy")
        router = Exchange(worker.stub)
        await router.send(ask("r", max_tokens=240))
        await router.read_until(lambda: "r" in router.deltas)

        def kill() -> None:
            raise ValueError("nobody catches this")

        worker.app.loop.call(kill)
        await router.finish("r")
        assert router.deltas["r"][-1].error.code == "internal_error"
        await eventually(worker.app.stopping.is_set, "the process does not leave")
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
        assert worker.loader.opened == []


async def test_a_request_to_a_model_that_loads_is_told_so() -> None:
    loader = ToyLoader(opening={"toy://a": (gate := threading.Event())})
    async with running_worker(loader) as worker:
        load = asyncio.create_task(worker.load())
        await eventually(lambda: bool(loader.opened), "no load began")
        (delta,) = await worker.generate(ask("r"))
        assert (delta.error.code, delta.error.retryable) == ("service_unavailable", True)
        gate.set()
        await load
        assert (await worker.generate(ask("r")))[-1].finish_reason == inference_pb2.FINISH_REASON_LENGTH
