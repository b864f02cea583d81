"""Many models in one worker over real gRPC: what is held, loaded and evicted, and that nothing is lost."""

from __future__ import annotations

import asyncio

from small_models import (
    LENGTH,
    generated,
    is_in_state,
    know,
    loaded,
    memory,
    room_for,
    small_loader,
)
from toy_worker import (
    Exchange,
    ask,
    eventually,
    running_worker,
    text,
)
from worker_probes import hold

from naru_proto.v1 import worker_pb2

READY, FAILED, HOST = worker_pb2.MODEL_STATE_READY, worker_pb2.MODEL_STATE_FAILED, worker_pb2.MODEL_STATE_HOST


async def test_a_request_for_a_known_model_brings_it_up() -> None:
    async with running_worker(small_loader(), room_for(2)) as worker:
        await know(worker, "a")
        assert loaded(worker) == set()
        assert await generated(worker, "a", "r")
        assert loaded(worker) == {"a"}
        assert (await memory(worker)).num_loads == 1


async def test_many_requests_for_a_cold_model_are_one_load_and_all_are_served() -> None:
    async with running_worker(small_loader(), room_for(1)) as worker:
        await know(worker, "a")
        texts = await asyncio.gather(*(generated(worker, "a", f"r{i}") for i in range(50)))
        assert len(set(texts)) == 1
        assert worker.loader.built == ["toy://a"]


async def test_more_models_than_fit_are_all_served_in_turn_and_answer_as_ever() -> None:
    async with running_worker(small_loader(), room_for(2)) as worker:
        models = [f"m{i}" for i in range(6)]
        await know(worker, *models)
        first = {name: await generated(worker, name, name) for name in models}
        assert len(set(first.values())) == len(models)
        for turn in range(3):
            again = await asyncio.gather(*(generated(worker, name, f"{name}-{turn}") for name in reversed(models)))
            assert dict(zip(reversed(models), again, strict=True)) == first
            assert len(loaded(worker)) <= 2
        assert (await memory(worker)).num_evictions >= 10


async def test_a_running_stream_is_never_cut_for_another_model() -> None:
    loader = small_loader()
    async with running_worker(loader, room_for(1)) as worker:
        await know(worker, "a", "b")
        undisturbed = await generated(worker, "a", "alone", max_tokens=36)
        release = hold(worker, "a")
        router = Exchange(worker.stub)
        await router.send(ask("long", model="a", max_tokens=36))
        await eventually(lambda: worker.app.hub.core.entry("a").num_in_flight == 1, "not running")  # type: ignore[union-attr]
        other = asyncio.create_task(generated(worker, "b", "b"))
        state = worker_pb2.MODEL_STATE_DRAINING
        await eventually(lambda: is_in_state(worker, "a", state), "a was not asked to make room")
        # What comes for it now waits behind the other model.
        late = asyncio.create_task(generated(worker, "a", "late", max_tokens=36))
        assert not other.done()
        release.set()
        await router.finish("long")
        assert text(router.deltas["long"]) == undisturbed
        assert await other
        assert await late == undisturbed
        await router.close()


async def test_two_models_that_do_not_fit_together_both_make_progress_under_constant_demand() -> None:
    async with running_worker(small_loader(), room_for(1)) as worker:
        await know(worker, "a", "b")
        stopping = False

        async def demand(name: str) -> int:
            count = 0
            while not stopping:
                await generated(worker, name, f"{name}{count}")
                count += 1
            return count

        # Two clients each, so that neither model is ever idle by itself.
        tasks = [asyncio.create_task(demand(name)) for name in ("a", "b")]
        built = worker.loader.built
        await eventually(lambda: built.count("toy://a") >= 3 and built.count("toy://b") >= 3, "one of them starves")
        stopping = True
        assert all(count > 0 for count in await asyncio.gather(*tasks))


async def test_requests_that_alternate_between_two_models_swap_them_a_few_times_and_not_for_each() -> None:
    async with running_worker(small_loader(), room_for(1, fair_wait_s=1.0)) as worker:
        await know(worker, "a", "b")
        router = Exchange(worker.stub)
        await router.send(*(ask(f"r{i}", model="ab"[i % 2], max_tokens=4) for i in range(60)))
        await router.finish(*(f"r{i}" for i in range(60)))
        assert sum(deltas[-1].finish_reason == LENGTH for deltas in router.deltas.values()) == 60
        assert len(worker.loader.built) <= 4, "two are enough, when each serves all that wait for it"
        await router.close()


async def test_one_load_evicts_only_what_it_needs() -> None:
    async with running_worker(small_loader(), room_for(9.5)) as worker:
        models = [f"m{i}" for i in range(9)]
        for name in models:
            assert (await worker.load(name, f"toy://{name}"))[-1].state == READY
        assert (await worker.load("new", "toy://new"))[-1].state == READY
        assert len(loaded(worker) & set(models)) == 8, "one leaves, and no other"
        assert (await memory(worker)).num_evictions == 1


async def test_two_loads_at_once_evict_for_each_and_never_promise_the_same_bytes() -> None:
    async with running_worker(small_loader(), room_for(4)) as worker:
        for name in ("m0", "m1", "m2", "m3"):
            await worker.load(name, f"toy://{name}")
        ends = await asyncio.gather(*(worker.load(name, f"toy://{name}") for name in ("x", "y")))
        assert [progress[-1].state for progress in ends] == [READY, READY]
        assert {"x", "y"} < loaded(worker)
        assert len(loaded(worker)) == 4
        assert (await memory(worker)).num_evictions == 2


async def test_models_with_equal_weights_count_them_once() -> None:
    async with running_worker(small_loader(), room_for(4)) as worker:
        for name in ("a", "b", "c"):
            assert (await worker.load(name, "toy://same"))[-1].state == READY
        stats = await memory(worker)
        assert (stats.weight_bytes, stats.kv_bytes) == (1000, 3 * 1700)
        await worker.stub.Unload(worker_pb2.UnloadRequest(model="a"))
        assert (await memory(worker)).weight_bytes == 1000
        for name in ("b", "c"):
            await worker.stub.Unload(worker_pb2.UnloadRequest(model=name))
        assert (await memory(worker)).weight_bytes == 0
