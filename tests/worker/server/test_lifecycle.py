"""Loading, unloading, draining, health and dying, over real gRPC with toy models."""

from __future__ import annotations

import asyncio
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2
from toy_worker import (
    BLOCK_BYTES,
    DEADLINE_S,
    WEIGHT_BYTES,
    Exchange,
    ToyLoader,
    ask,
    eventually,
    ids,
    running_worker,
    toy_settings,
)
from worker_probes import described, health, hold

from naru_proto.errors import LoadError
from naru_proto.v1 import worker_pb2

READY, FAILED = worker_pb2.MODEL_STATE_READY, worker_pb2.MODEL_STATE_FAILED
FETCHING, LOADING = worker_pb2.MODEL_STATE_FETCHING, worker_pb2.MODEL_STATE_LOADING
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_load_tells_its_progress_and_what_it_loaded() -> None:
    loader = ToyLoader(opening={"toy://a": (gate := threading.Event())})
    async with running_worker(loader) as worker:
        call = worker.stub.Load(worker_pb2.LoadRequest(model="toy", uri="toy://a", generation=3))
        seen: list[worker_pb2.LoadProgress] = []
        async for progress in call:
            seen.append(progress)
            if progress.eta_s > 0:
                gate.set()
        assert [p.state for p in seen if p.state != FETCHING] in ([LOADING, READY], [READY])
        assert seen[0].state == FETCHING
        assert any(p.eta_s > 0 for p in seen if p.state == FETCHING), "by the pace of the bytes so far"
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
        await eventually(lambda: len(loader.prepared) == 1, "no load began")
        gate.set()
        for progress in await asyncio.gather(*calls):
            assert progress[-1].state == READY
        assert loader.prepared == loader.built == ["toy://a"]
        again = await worker.load()
        assert [p.state for p in again] == [READY]
        assert loader.prepared == ["toy://a"]


async def test_a_load_goes_on_when_its_caller_leaves() -> None:
    loader = ToyLoader(opening={"toy://a": (gate := threading.Event())})
    async with running_worker(loader) as worker:
        call = worker.stub.Load(worker_pb2.LoadRequest(model="toy", uri="toy://a"))
        await call.read()
        call.cancel()
        gate.set()
        assert (await worker.load())[-1].state == READY
        assert loader.prepared == ["toy://a"]


async def test_a_failed_load_says_why_frees_its_bytes_and_can_be_tried_again() -> None:
    loader = ToyLoader(errors={"toy://a": LoadError("config.json: hidden_size is 'x'")})
    async with running_worker(loader, None) as worker:
        free = worker.app.hub.operations.bookings.ledger.free_bytes()
        for attempt in range(1, 3):
            last = (await worker.load(generation=attempt))[-1]
            assert (last.state, last.error.code) == (FAILED, "model_load_failed")
            assert "hidden_size" in last.error.message
            assert len(loader.prepared) == attempt
            # The same again is not tried at once.
            assert (await worker.load(generation=attempt))[-1].error.message == last.error.message
            assert len(loader.prepared) == attempt
        model = await described(worker)
        assert model is not None
        assert (model.state, model.error.message) == (FAILED, last.error.message)
        (delta,) = await worker.generate(ask("r"))
        assert delta.error.code == "service_unavailable"
        assert "hidden_size" in delta.error.message
        assert worker.app.hub.operations.bookings.ledger.free_bytes() == free
        loader.errors.clear()
        assert (await worker.load(generation=3))[-1].state == READY
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
        stale, invalid = grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT
        for attempt, code in (
            (worker.load(generation=4), stale),
            (worker.load("toy", "toy://b", generation=5), invalid),
            (worker.stub.Unload(worker_pb2.UnloadRequest(model="toy", generation=4)), stale),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await attempt
            assert caught.value.code() is code
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
        before = await described(worker)
        assert (await worker.load("toy", "toy://b", generation=2))[-1].state == READY
        assert worker.loader.released == ["toy://a"]
        other = await worker.generate(ask("c", "a prompt of several blocks"))
        assert other[-1].usage.cached_tokens == 0
        assert ids(other) != ids(first)
        after = await described(worker)
        assert before is not None
        assert after is not None
        assert after.epoch > before.epoch


async def test_a_newer_generation_of_the_same_is_ready_at_once() -> None:
    async with running_worker() as worker:
        await worker.load(generation=1)
        assert [p.state for p in await worker.load(generation=9)] == [READY]
        assert worker.loader.prepared == ["toy://a"]
        model = await described(worker)
        assert model is not None
        assert model.generation == 9


async def test_unload_lets_requests_finish_and_gives_everything_back() -> None:
    async with running_worker() as worker:
        free = worker.app.hub.operations.bookings.ledger.free_bytes()
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
        assert worker.app.hub.operations.bookings.ledger.free_bytes() == free
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
        assert worker.loader.prepared == worker.loader.released
        await router.close()


async def test_the_last_wish_wins_over_what_is_under_way() -> None:
    gates = {"toy://a": threading.Event(), "toy://b": threading.Event()}
    loader = ToyLoader(opening=gates)
    async with running_worker(loader) as worker:
        first = asyncio.create_task(worker.load("toy", "toy://a", generation=1))
        await eventually(lambda: loader.prepared == ["toy://a"], "no load began")
        second = asyncio.create_task(worker.load("toy", "toy://b", generation=2))
        last = (await first)[-1]
        assert (last.state, "2" in last.error.message) == (FAILED, True)
        await eventually(lambda: loader.prepared == ["toy://a", "toy://b"], "the second load did not begin")
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
        assert (await worker.load(generation=1))[-1].state == READY


async def test_a_model_that_does_not_fit_is_refused_before_a_weight_is_read() -> None:
    loader = ToyLoader(weight_bytes={"toy://big": 10**6 + 1})
    async with running_worker(loader, None, "toy") as worker:
        last = (await worker.load("big", "toy://big"))[-1]
        assert last.state == FAILED
        assert "1.0 MB of weights" in last.error.message
        assert "budget is 1.0 MB" in last.error.message
        assert loader.built == ["toy://a"]
        assert len(ids(await worker.generate(ask("r")))) == 12


async def test_two_loads_at_once_never_promise_the_same_bytes() -> None:
    loader = ToyLoader(
        weight_bytes={"toy://x": 600_000, "toy://y": 600_000},
        building={"toy://x": (gate := threading.Event()), "toy://y": gate},
    )
    async with running_worker(loader) as worker:
        loads = [asyncio.create_task(worker.load(uri[-1], uri)) for uri in ("toy://x", "toy://y")]
        ledger = worker.app.hub.operations.bookings.ledger
        await eventually(lambda: ledger.free_bytes() < 400_000, "no load began")
        gate.set()
        assert [(await load)[-1].state for load in loads] == [READY, READY]
        # The second one waited until the first could leave.
        assert len(worker.app.hub.models()) == 1
        assert sorted(loader.built) == ["toy://x", "toy://y"]
