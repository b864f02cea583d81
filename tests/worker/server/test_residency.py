"""What a worker refuses, breaks off, recovers from and tells about its models, over real gRPC."""

from __future__ import annotations

import asyncio
import itertools
import threading
from dataclasses import replace
from typing import Any

import grpc
import pytest
from small_models import (
    LENGTH,
    MODEL_BYTES,
    generated,
    know,
    loaded,
    memory,
    room_for,
    small_loader,
)
from toy_worker import (
    DEADLINE_S,
    Exchange,
    ask,
    eventually,
    ids,
    running_worker,
    toy_settings,
)
from worker_probes import described, hold

from naru_proto import names
from naru_proto.errors import LoadError
from naru_proto.v1 import worker_pb2
from naru_worker import app
from naru_worker.settings import MemorySettings

READY, FAILED, HOST = worker_pb2.MODEL_STATE_READY, worker_pb2.MODEL_STATE_FAILED, worker_pb2.MODEL_STATE_HOST


async def test_when_all_is_pinned_a_load_is_refused_with_the_reason_and_the_budget_holds() -> None:
    async with running_worker(small_loader(), room_for(2)) as worker:
        for name in ("a", "b"):
            await worker.load(name, f"toy://{name}", residency=worker_pb2.Residency(pinned=True))
        last = (await worker.load("c", "toy://c"))[-1]
        assert last.state == FAILED
        assert "pinned" in last.error.message
        await know(worker, "d")
        (delta,) = await worker.generate(ask("r", model="d"))
        assert (delta.error.code, "pinned" in delta.error.message) == ("service_unavailable", True)
        assert loaded(worker) == {"a", "b"}
        await worker.stub.Unload(worker_pb2.UnloadRequest(model="a", generation=1))
        assert await generated(worker, "d", "now")


async def test_a_model_that_can_never_fit_is_refused_with_the_numbers_and_disturbs_nobody() -> None:
    loader = small_loader(weight_bytes={"toy://big": 10**6 + 1})
    async with running_worker(loader, room_for(2)) as worker:
        await worker.load("a", "toy://a")
        last = (await worker.load("big", "toy://big"))[-1]
        assert last.state == FAILED
        assert "1.0 MB of weights" in last.error.message
        assert "budget" in last.error.message
        assert loaded(worker) == {"a"}
        assert loader.built == ["toy://a"]


async def test_a_failing_model_evicts_nobody_answers_fast_and_recovers_by_itself() -> None:
    loader = small_loader(errors={"toy://bad": LoadError("no such file")})
    async with running_worker(loader, room_for(1)) as worker:
        await worker.load("good", "toy://good")
        await know(worker, "bad")
        for i in range(5):
            (delta,) = await worker.generate(ask(f"r{i}", model="bad"))
            assert (delta.error.code, "no such file" in delta.error.message) == ("service_unavailable", True)
        assert len(loader.prepared) == 2, "one try; the others were told of it"
        assert loaded(worker) == {"good"}
        model = await described(worker, "bad")
        assert model is not None
        assert model.retry_s > 0
        loader.errors.clear()

        async def works() -> bool:
            return (await worker.generate(ask("again", model="bad")))[-1].finish_reason == LENGTH

        await eventually(works, "it did not recover")


async def test_a_load_that_fails_after_making_room_gives_its_bytes_back() -> None:
    loader = small_loader(load_errors={"toy://bad": LoadError("broken weights")})
    async with running_worker(loader, room_for(1)) as worker:
        await know(worker, "good", "bad")
        await generated(worker, "good", "r")
        (delta,) = await worker.generate(ask("r2", model="bad"))
        assert "broken weights" in delta.error.message
        assert (await memory(worker)).weight_bytes in (0, 1000)
        assert await generated(worker, "good", "r3")


async def test_a_load_that_fails_after_its_engine_began_ends_its_requests_and_lets_go_in_order() -> None:
    loader = small_loader(late_errors={"toy://bad": LoadError("layer 3 is damaged")})
    has_failed, steps = threading.Event(), itertools.count()
    # Else its request might have all its tokens before the load fails.
    loader.before_step["toy://bad"] = lambda _: next(steps) < 3 or has_failed.wait(DEADLINE_S)
    async with running_worker(loader, room_for(1)) as worker:
        await know(worker, "bad")
        router = Exchange(worker.stub)
        await router.send(ask("r", model="bad", max_tokens=30))
        await router.read_until(lambda: "r" in router.deltas)
        resident = worker.app.hub.resident("bad")
        assert resident is not None
        loader.begun.set()
        await eventually(lambda: resident.model is None, "the load did not fail")
        has_failed.set()
        await router.finish("r")
        assert router.deltas["r"][-1].error.retryable
        await eventually(lambda: loader.closed == ["toy://bad"], "its weights are still there")
        assert loader.order == ["release toy://bad", "close toy://bad"], "the engine may read until it is released"
        stats = await memory(worker)
        assert (stats.weight_bytes, stats.kv_bytes, stats.unreturned_bytes) == (0, 0, 0)
        loader.late_errors.clear()

        async def works() -> bool:
            return (await worker.generate(ask("again", model="bad")))[-1].finish_reason == LENGTH

        await eventually(works, "it did not recover")
        await router.close()


async def test_a_load_without_end_is_broken_off_and_its_memory_given_back() -> None:
    loader = small_loader(building={"toy://stuck": threading.Event()})
    async with running_worker(loader, room_for(1)) as worker:
        await know(worker, "good")
        call = asyncio.create_task(worker.load("stuck", "toy://stuck", load_timeout_s=0.2))
        await eventually(lambda: worker.app.hub.resident("stuck") is not None, "no load began")
        (delta,) = await worker.generate(ask("r", model="stuck"))
        assert (delta.error.code, "0.2 s" in delta.error.message) == ("service_unavailable", True)
        assert (await call)[-1].state == FAILED
        assert await generated(worker, "good", "r2")


async def test_a_request_waits_no_longer_than_it_may() -> None:
    loader = small_loader(building={"toy://a": (gate := threading.Event())})
    settings = replace(room_for(1), server=replace(toy_settings().server, hold_timeout_s=0.1))
    async with running_worker(loader, settings) as worker:
        await know(worker, "a")
        (delta,) = await worker.generate(ask("r", model="a"))
        assert (delta.error.code, delta.error.retryable) == ("service_unavailable", True)
        assert "0.1 s" in delta.error.message
        gate.set()
        # The load went on, though nobody waited for it any more.
        await eventually(lambda: loaded(worker) == {"a"}, "the load was given up")
        assert loader.built == ["toy://a"]


async def test_clients_that_give_up_during_a_load_do_not_throw_it_away() -> None:
    loader = small_loader(building={"toy://a": (gate := threading.Event())})
    async with running_worker(loader, room_for(1)) as worker:
        await know(worker, "a")
        for i in range(5):
            call = worker.stub.Generate(ask(f"r{i}", model="a"))
            await eventually(lambda: worker.app.board.num_held("a") == 1, "not held")
            call.cancel()
            await eventually(lambda: worker.app.board.num_held("a") == 0, "still held")
        gate.set()
        assert await generated(worker, "a", "patient")
        assert loader.built == ["toy://a"]


async def test_requests_at_any_moment_of_coming_and_going_are_served() -> None:
    async with running_worker(small_loader(), room_for(1)) as worker:
        await know(worker, "a", "b")
        router = Exchange(worker.stub)
        sent: list[str] = []
        for turn in range(20):
            for name in ("a", "b"):
                sent.append(f"{name}{turn}")
                await router.send(ask(sent[-1], "x" * (turn % 7 + 1), model=name, max_tokens=1 + turn % 5))
            if turn % 3 == 0:
                await router.read()
        await router.finish(*sent)
        assert {router.deltas[name][-1].finish_reason for name in sent} == {LENGTH}
        assert worker.loader.built.count("toy://a") >= 1
        await router.close()


async def test_an_evicted_model_comes_back_for_a_request_though_the_router_thinks_it_is_there() -> None:
    async with running_worker(small_loader(), room_for(1)) as worker:
        await worker.load("a", "toy://a")
        before = await generated(worker, "a", "r1")
        await worker.load("b", "toy://b")
        assert loaded(worker) == {"b"}
        assert await generated(worker, "a", "r2") == before


async def test_a_prefetched_model_waits_in_host_memory_and_is_loaded_without_its_files() -> None:
    async with running_worker(small_loader(), room_for(1, host_models=2)) as worker:
        progress = await worker.load("a", "toy://a", tier=worker_pb2.TIER_HOST)
        assert progress[-1].state == HOST
        assert (await memory(worker)).host_bytes == 1000
        worker.loader.errors["toy://a"] = LoadError("the file is gone")
        assert await generated(worker, "a", "r")
        assert (await memory(worker)).host_bytes == 0
        # Evicted, it goes back to where it came from.
        await worker.load("b", "toy://b")
        model = await described(worker, "a")
        assert model is not None
        assert model.state == HOST
        assert "b" in model.last_eviction


async def test_stale_commands_are_refused_with_the_newer_generation_and_change_nothing() -> None:
    async with running_worker(small_loader(), room_for(2)) as worker:
        await worker.load("a", "toy://a", generation=7, fencing_token=3)
        before = await described(worker, "a")
        for request in (
            worker_pb2.LoadRequest(model="a", uri="toy://x", generation=6),
            worker_pb2.LoadRequest(model="a", uri="toy://x", generation=8, fencing_token=2),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in worker.stub.Load(request):
                    pass
            metadata: dict[str, Any] = dict(caught.value.trailing_metadata() or ())  # type: ignore[arg-type]
            assert metadata[names.METADATA_ERROR_CODE] == "stale_command"
            assert metadata[names.METADATA_GENERATION] == "7"
        with pytest.raises(grpc.aio.AioRpcError):
            await worker.stub.Unload(worker_pb2.UnloadRequest(model="a", generation=6))
        after = await described(worker, "a")
        assert before is not None
        assert after is not None
        assert (after.uri, after.generation, after.state) == (before.uri, 7, READY)


async def test_an_unload_that_fails_keeps_its_bytes_booked_and_shows_them() -> None:
    async with running_worker(small_loader(), room_for(2)) as worker:
        await worker.load("a", "toy://a")

        def refuse() -> None:
            raise OSError(5, "I/O error")

        worker.app.hub.models_by_name()["a"].release = refuse
        await worker.stub.Unload(worker_pb2.UnloadRequest(model="a"))
        stats = await memory(worker)
        assert stats.unreturned_bytes == MODEL_BYTES
        assert (stats.weight_bytes, stats.kv_bytes) == (0, 0)
        # The rest serves on.
        await worker.load("b", "toy://b")
        assert await generated(worker, "b", "r")


async def test_bytes_seen_in_memory_after_an_unload_stay_booked_until_they_are_gone() -> None:
    loader = small_loader(unreturned={"toy://a": 600})
    async with running_worker(loader, room_for(1)) as worker:
        await worker.load("a", "toy://a")
        await worker.stub.Unload(worker_pb2.UnloadRequest(model="a"))
        assert (await memory(worker)).unreturned_bytes == 600
        held = asyncio.create_task(worker.load("b", "toy://b"))
        loader.unreturned.clear()

        async def is_back() -> bool:
            return (await memory(worker)).unreturned_bytes == 0

        await eventually(is_back, "they stay booked")
        assert (await held)[-1].state in (READY, FAILED)
        assert (await worker.load("b", "toy://b", generation=1))[-1].state == READY


async def test_explain_says_what_a_model_waits_for() -> None:
    async with running_worker(small_loader(), room_for(1, fair_wait_s=1e6)) as worker:
        await worker.load("busy", "toy://busy")
        hold(worker, "busy")
        router = Exchange(worker.stub)
        await router.send(ask("long", model="busy", max_tokens=30))
        await know(worker, "late")
        await router.send(ask("held", model="late"))

        async def explained() -> bool:
            reply = await worker.stub.Explain(worker_pb2.ExplainRequest(model="late"))
            return any("busy" in reason for reason in reply.reasons)

        await eventually(explained, "it does not name what it waits for")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker.stub.Explain(worker_pb2.ExplainRequest(model="never heard of"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        router.break_off()


async def test_idle_models_leave_down_to_the_low_watermark(monkeypatch: pytest.MonkeyPatch) -> None:
    # Else a load that this machine took long over would be worth keeping.
    make_config = app.hub_config
    monkeypatch.setattr(app, "hub_config", lambda *args: replace(make_config(*args), reload_floor_s=60.0))
    settings = replace(
        room_for(10),
        memory=MemorySettings(
            memory_budget_bytes=10 * MODEL_BYTES, host_budget_bytes=0, high_watermark=0.8, low_watermark=0.5
        ),
    )
    async with running_worker(small_loader(), settings) as worker:
        for i in range(8):
            await worker.load(f"m{i}", f"toy://m{i}")
        assert len(loaded(worker)) == 8
        await worker.load("m8", "toy://m8")
        await eventually(lambda: len(loaded(worker)) == 5, "nobody left")
        assert loaded(worker) == {"m4", "m5", "m6", "m7", "m8"}


async def test_a_model_leaves_when_it_was_idle_for_its_time_and_comes_back() -> None:
    async with running_worker(small_loader(), room_for(2)) as worker:
        await worker.load("a", "toy://a", residency=worker_pb2.Residency(idle_ttl_s=0.05))
        await eventually(lambda: loaded(worker) == set(), "it stays")
        assert await generated(worker, "a", "r")


async def test_what_waits_for_a_model_ends_when_the_worker_leaves() -> None:
    loader = small_loader(building={"toy://a": threading.Event()})
    settings = replace(room_for(1), server=replace(toy_settings().server, drain_timeout_s=0.1))
    async with running_worker(loader, settings) as worker:
        await know(worker, "a")
        call = asyncio.create_task(worker.generate(ask("r", model="a")))
        await eventually(lambda: worker.app.board.num_held("a") == 1, "not held")
        async with asyncio.timeout(DEADLINE_S):
            await worker.app.shut_down()
        (delta,) = await call
        assert (delta.error.code, delta.error.retryable) == ("service_unavailable", True)
        assert ids([delta]) == []
