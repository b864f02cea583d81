"""Redis away, emptied, slow, and leases that flap: nothing is deleted, no status turns bad, the registry comes back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from cluster_rig import ClusterRig, condition, model, pool, until
from fake_worker import FakeWorker
from local_redis import local_redis

from naru_operator.adapters.cluster import leases, term
from naru_operator.adapters.cluster.leases import Change, Leases
from naru_operator.adapters.route_map import RouteMap, open_route_map
from naru_operator.core.kube import Object
from naru_proto import names
from naru_proto.errors import Unavailable
from naru_proto.registry import ModelRecord, ResidentRecord


async def settled(rig: ClusterRig, *models: Object, workers: int = 2) -> None:
    """A pool with its workers, and models loaded on them."""
    rig.kube.put(pool(workers=workers))
    await rig.converge()
    for slot in range(workers):
        await rig.start_worker(f"default-{slot}")
    for each in models:
        rig.kube.put(each)
    await rig.converge()
    assert rig.phase("WorkerPool", "default") == "Ready"


def statuses(rig: ClusterRig) -> dict[str, Any]:
    found = {**rig.kube.named("WorkerPool"), **rig.kube.named("ModelDeployment")}
    return {name: obj.get("status") for name, obj in found.items()}


def lose_redis(rig: ClusterRig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(*_: object) -> Any:
        raise Unavailable("Redis does not answer")

    for name in ("read", "read_workers", "num_models", "write_models", "last_events", "events_since"):
        monkeypatch.setattr(rig.route_map, name, away)


async def test_without_redis_no_pod_goes_and_no_status_changes(
    rig: ClusterRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await settled(rig, model("one"))
    before = statuses(rig)
    with monkeypatch.context() as patch:
        lose_redis(rig, patch)
        rig.kube.put(pool(workers=1))
        for _ in range(3):
            with pytest.raises(Unavailable):
                await rig.turn()
        assert not rig.kube.asked_for("delete", "Pod")
        assert statuses(rig)["one"] == before["one"]
        told = rig.get("WorkerPool", "default")["status"]["workers"]
        assert told == {"desired": 1, "ready": 2, "draining": 0}
    # It answers again: for a moment nobody knows which leases are only late.
    await rig.turn()
    assert not rig.kube.asked_for("delete", "Pod")
    monkeypatch.setattr(rig.term._leases, "_doubt_until_s", 0.0)
    await rig.turn()
    assert rig.kube.asked_for("delete", "Pod") == ["default-1"]


async def test_a_term_that_begins_without_redis_makes_pods_and_leaves_statuses_alone(
    rig: ClusterRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await settled(rig, model("one"))
    before = statuses(rig)
    await rig.restart()
    with monkeypatch.context() as patch:
        lose_redis(rig, patch)
        rig.kube.put(pool("fresh", 1))
        for _ in range(2):
            with pytest.raises(Unavailable):
                await rig.turn()
    now = statuses(rig)
    assert "fresh-0" in rig.kube.named("Pod")
    assert now.pop("fresh")["phase"] == "Pending"
    assert now == before
    rig.board.flushall()  # it comes back with nothing in it, sooner than the workers
    await rig.look()
    await rig.workers["default-1"].renew()
    await rig.look()
    await rig.turn()
    now = statuses(rig)
    assert now["default"] == before["default"]
    # What may hold it has changed, and nothing else.
    assert {**now["one"], "selector": ""} == {**before["one"], "selector": ""}


async def test_pods_that_a_plan_would_replace_are_not_doubled_while_redis_is_away(
    rig: ClusterRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.kube.put(pool())
    await rig.converge()  # two pods that never become ready
    lose_redis(rig, monkeypatch)
    rig.kube.put(pool(image="naru/worker:2"))
    for _ in range(3):
        with pytest.raises(Unavailable):
            await rig.turn()
    assert not rig.kube.asked_for("delete", "Pod")
    assert list(rig.kube.named("Pod")) == ["default-0", "default-1"]


async def test_an_emptied_redis_is_written_anew_and_nothing_seems_lost_meanwhile(rig: ClusterRig) -> None:
    await settled(rig, model("one"), model("lazy", residency={"policy": "OnDemand"}))
    before, registry = statuses(rig), rig.records()
    num_commands, num_writes = rig.num_commands, len(rig.kube.writes)
    rig.board.flushall()
    await rig.look()  # before any worker has written its lease again
    assert rig.records() == registry
    await rig.workers["default-1"].renew()  # one is sooner than the other
    await rig.look()
    await rig.turn(2)
    assert statuses(rig) == before
    assert (rig.num_commands, len(rig.kube.writes)) == (num_commands, num_writes)


async def test_a_new_leader_that_finds_redis_emptied_waits_for_the_workers_of_ready_pods(rig: ClusterRig) -> None:
    await settled(rig, model("one"))
    before, registry, num_commands = statuses(rig), rig.records(), rig.num_commands
    rig.board.flushall()
    await rig.restart()
    await rig.look()
    await rig.workers["default-1"].renew()
    await rig.look()
    assert (statuses(rig), rig.records(), rig.num_commands) == (before, {}, num_commands)
    await rig.turn(2)
    assert statuses(rig) == before
    assert {name: it.target for name, it in rig.records().items()} == {name: it.target for name, it in registry.items()}


async def test_a_new_leader_does_not_wait_for_ever_for_a_worker_that_never_comes(
    rig: ClusterRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await settled(rig)
    await rig.lose_worker("default-1")
    await rig.restart()
    monkeypatch.setattr(term, "DOUBT_S", 0.0)
    await rig.turn(2)
    assert rig.get("WorkerPool", "default")["status"]["workers"]["ready"] == 1


async def test_a_worker_that_is_lost_loses_its_models_to_another_at_once(rig: ClusterRig) -> None:
    await settled(rig, model("one"), model("two"))
    (lost,) = [it for it in rig.workers if any(name.startswith("one@") for name in rig.workers[it].models)]
    (other,) = [it for it in rig.workers if it != lost]
    await rig.lose_worker(lost)
    await rig.converge()
    assert any(name.startswith("one@") for name in rig.workers[other].models)
    assert condition(rig.get("ModelDeployment", "one"), "Available")["status"] == "True"


async def test_a_lease_that_flaps_costs_no_load_on_its_own_worker(rig: ClusterRig) -> None:
    await settled(rig, model("one"), workers=1)
    worker = rig.workers["default-0"]
    num_loads = len(worker.loads)
    for _ in range(3):
        rig.board.delete(names.key_worker("default-0"))
        await rig.look()
        await worker.renew()
        await rig.look()
    assert len(worker.loads) == num_loads
    assert rig.phase("ModelDeployment", "one") == "Ready"


async def test_commands_to_a_worker_that_is_gone_are_given_up(rig: ClusterRig) -> None:
    await settled(rig)
    for worker in rig.workers.values():
        worker.may_end.clear()
    rig.kube.put(model("one"))
    await rig.term.look(-2)
    await until(lambda: any(it.loads for it in rig.workers.values()))
    (lost,) = [it.worker_id for it in rig.workers.values() if it.loads]
    (other,) = [it for it in rig.workers.values() if not it.loads]
    other.may_end.set()
    await rig.lose_worker(lost)
    await rig.look()
    await rig.turn()
    assert any(name.startswith("one@") for name in other.models)


# --- the leases themselves ---


class Gone:
    def __init__(self) -> None:
        self.ids: list[str] = []

    def __call__(self, worker_id: str) -> None:
        self.ids.append(worker_id)


@pytest.fixture
async def worker(route_map: RouteMap, redis_server_url: str) -> AsyncIterator[FakeWorker]:
    made = FakeWorker("w-0", redis_server_url)
    await made.start()
    yield made
    await made.stop()


async def test_use_alone_is_no_news_and_a_new_state_is(route_map: RouteMap, worker: FakeWorker) -> None:
    board = Leases(route_map, Gone())
    assert await board.refresh() is Change.NEWS
    assert await board.refresh() is Change.NOTHING
    worker.models["m@1"] = ResidentRecord("loading", 1)
    await worker.renew()
    assert await board.refresh() is Change.NEWS
    worker.models["m@1"] = ResidentRecord("loading", 1, bytes_done=5, eta_s=2.0)
    await worker.renew(num_running=3, used_bytes=7)
    assert await board.refresh() is Change.USE
    worker.models["m@1"] = ResidentRecord("ready", 1)
    await worker.renew()
    assert await board.refresh() is Change.NEWS


async def test_a_new_process_under_an_old_name_ends_the_life_of_the_last(
    route_map: RouteMap, worker: FakeWorker
) -> None:
    gone = Gone()
    board = Leases(route_map, gone)
    await board.refresh()
    await worker.renew(epoch="2")
    assert await board.refresh() is Change.NEWS
    assert gone.ids == ["w-0"]


async def test_one_lost_lease_among_others_is_believed_and_all_at_once_are_not(
    route_map: RouteMap, worker: FakeWorker, redis_server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = FakeWorker("w-1", redis_server_url)
    await other.start()
    gone = Gone()
    board = Leases(route_map, gone)
    await board.refresh()
    with redis.Redis.from_url(redis_server_url) as raw:
        raw.delete(names.key_worker("w-1"))
        await board.refresh()
        assert (gone.ids, board.is_certain) == (["w-1"], True)
        raw.delete(names.key_worker("w-0"))
        await board.refresh()
    assert (gone.ids, board.is_certain, set(board.board.workers)) == (["w-1"], False, {"w-0"})
    monkeypatch.setattr(board, "_doubt_until_s", 0.0)
    await board.refresh()
    assert (gone.ids, board.is_certain, set(board.board.workers)) == (["w-1", "w-0"], True, set())
    await other.stop()


async def test_a_worker_that_said_that_it_leaves_is_gone_with_its_lease(
    route_map: RouteMap, worker: FakeWorker, redis_server_url: str
) -> None:
    board = Leases(route_map, Gone())
    await worker.renew(leaving=True)
    await board.refresh()
    with redis.Redis.from_url(redis_server_url) as raw:
        raw.delete(names.key_worker("w-0"))
    await board.refresh()
    assert board.board.workers == {}


async def test_a_record_that_cannot_be_read_is_no_reason_to_read_all_again(
    route_map: RouteMap, redis_server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = Leases(route_map, Gone())
    with redis.Redis.from_url(redis_server_url) as raw:
        raw.hset(names.KEY_MODELS, "odd", "no record")
    await route_map.write_models([ModelRecord("m", "hf://a/b", 1)], [])
    await board.refresh()
    reads = 0
    whole = route_map.read

    async def counted() -> Any:
        nonlocal reads
        reads += 1
        return await whole()

    monkeypatch.setattr(route_map, "read", counted)
    await board.refresh()
    assert reads == 0
    with redis.Redis.from_url(redis_server_url) as raw:
        raw.hdel(names.KEY_MODELS, "m")  # another hand
    assert await board.refresh() is Change.NEWS
    assert (reads, board.board.models) == (1, {})


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """A server that a test may stop, and its process."""
    with local_redis(tmp_path) as url, redis.Redis.from_url(url) as raw:
        yield url, int(raw.info("server")["process_id"])


async def test_leases_that_expired_while_redis_stood_still_are_not_believed_to_be_gone(
    own_redis: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, process_id = own_redis
    monkeypatch.setattr(leases, "_SLOW_S", 0.2)
    route_map, gone = open_route_map(url), Gone()
    board = Leases(route_map, gone)
    with redis.Redis.from_url(url) as raw:
        for name in ("w-0", "w-1"):
            worker = FakeWorker(name, url)
            worker.address = "127.0.0.1:1"
            await worker.renew()
            await worker.stop()
        await board.refresh()
        raw.delete(names.key_worker("w-1"))  # as if it had expired
    os.kill(process_id, signal.SIGSTOP)
    looking = asyncio.create_task(board.refresh())
    await asyncio.sleep(0.3)  # the fault itself: an answer that takes long
    os.kill(process_id, signal.SIGCONT)
    await looking
    assert (gone.ids, board.is_certain, set(board.board.workers)) == ([], False, {"w-0", "w-1"})
    await route_map.close()
