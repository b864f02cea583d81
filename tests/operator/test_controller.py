"""The control loop with a real Redis, real gRPC and workers that do what the test says."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable

import grpc
import pytest
import redis
from fake_worker import FakeWorker

from naru_operator.adapters import commands, controller
from naru_operator.adapters.child_process import ProcessSpec
from naru_operator.adapters.controller import Controller
from naru_operator.adapters.route_map import Board, RouteMap
from naru_operator.adapters.supervisor import Supervisor
from naru_operator.adapters.worker_client import LoadReport
from naru_operator.core.desired import DesiredModel, DesiredPool, DesiredState, EngineLimits, Residency, Tier
from naru_operator.core.local_plan import plan
from naru_operator.core.model_plan import KNOWN, LoadModel, UnloadModel
from naru_proto import names
from naru_proto.errors import InvalidRequest, LoadError, NaruError, StaleCommand
from naru_proto.registry import ResidentRecord
from naru_proto.v1 import worker_pb2

POOL = DesiredPool("p", 1, None, None, 5.0)
SLEEPER = (sys.executable, "-I", "-S", "-c", "import signal; signal.pause()")


ON_DEMAND = Residency(Tier.COLD, priority=7, min_residency_s=1.5, idle_ttl_s=60.0)


def model(
    name: str, uri: str = "pypi://x", limits: EngineLimits | None = None, residency: Residency | None = None
) -> DesiredModel:
    return DesiredModel(name, uri, "r", (), 1, ("p",), limits or EngineLimits(), residency or Residency())


def desired(*models: DesiredModel, pool: DesiredPool = POOL) -> DesiredState:
    return DesiredState(models, (pool,))


class Told:
    """Everything that was told."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.reports: list[LoadReport] = []
        self.failures: list[tuple[LoadModel | UnloadModel, NaruError]] = []
        self.troubles: list[str] = []
        self.news = asyncio.Event()

    def planned(self, reasons: tuple[str, ...]) -> None:
        self.reasons += reasons
        self.news.set()

    def loading(self, command: LoadModel, report: LoadReport) -> None:
        self.reports.append(report)
        self.news.set()

    def failed(self, command: LoadModel | UnloadModel, error: NaruError) -> None:
        self.failures.append((command, error))
        self.news.set()

    def trouble(self, message: str) -> None:
        self.troubles.append(message)
        self.news.set()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                self.news.clear()
                await self.news.wait()


class Rig:
    def __init__(self, route_map: RouteMap, worker: FakeWorker) -> None:
        self.told = Told()
        self.worker = worker
        self.supervisor = Supervisor(lambda *_: None, lambda _: None)
        self.controller = Controller(
            route_map, self.supervisor, lambda w, _: ProcessSpec(w, SLEEPER), self.told, started={}
        )
        self.task = asyncio.create_task(self.controller.run())

    async def until(self, condition: Callable[[Board], bool]) -> None:
        async with asyncio.timeout(20):
            await self.controller.wait_for(condition)

    async def until_ready(self, name: str, generation: int) -> None:
        await self.told.until(lambda: any(report.state == "ready" for report in self.told.reports))
        await self.worker.renew()

        def is_shown(board: Board) -> bool:
            held = board.workers["p-0"].models.get(name)
            return held is not None and held.generation == generation

        await self.until(is_shown)


@pytest.fixture
async def rig(route_map: RouteMap, redis_server_url: str) -> AsyncIterator[Rig]:
    worker = FakeWorker("p-0", redis_server_url)
    await worker.start()
    made = Rig(route_map, worker)
    yield made
    made.task.cancel()
    await asyncio.gather(made.task, return_exceptions=True)
    for name in made.supervisor.names:
        await made.supervisor.stop(name, 5)
    await worker.stop()


async def test_a_model_is_registered_and_loaded_once_with_its_limits(rig: Rig) -> None:
    limits = EngineLimits(
        99,
        enable_prefix_caching=False,
        max_batch_size=8,
        max_batch_delay_s=0.5,
        speculation="auto",
        max_draft_tokens=4,
        kv_cache_dtype="int8",
        tensor_parallel_size=2,
    )
    rig.controller.desire(desired(model("a", limits=limits)))
    await rig.until_ready("a", 1)
    assert rig.supervisor.names == ("p-0",)
    (load,) = rig.worker.loads
    assert (load.model, load.uri, load.revision, load.generation) == ("a", "pypi://x", "r", 1)
    assert load.options == worker_pb2.EngineOptions(
        max_model_len=99,
        enable_prefix_caching=False,
        max_batch_size=8,
        max_batch_delay_s=0.5,
        speculation="auto",
        max_draft_tokens=4,
        kv_cache_dtype="int8",
        tensor_parallel_size=2,
    )
    assert (load.tier, load.residency) == (worker_pb2.TIER_ACTIVE, worker_pb2.Residency(priority=100))
    assert [(r.state, r.bytes_done, r.bytes_total, r.detail) for r in rig.told.reports] == [
        ("fetching", 1, 2, "half"),
        ("ready", 0, 0, ""),
    ]
    await rig.until(lambda board: board.models["a"].generation == 1)
    assert rig.told.failures == []
    assert rig.told.troubles == []


async def test_a_load_under_way_is_not_begun_again(rig: Rig) -> None:
    rig.worker.may_end.clear()
    rig.controller.desire(desired(model("a")))
    await rig.told.until(lambda: rig.told.reports)
    for _ in range(5):
        assert (await rig.controller.reconcile()).is_empty
    rig.worker.may_end.set()
    await rig.told.until(lambda: len(rig.told.reports) == 2)
    # The lease does not show it yet; the word of the worker counts.
    assert (await rig.controller.reconcile()).is_empty
    assert len(rig.worker.loads) == 1


async def test_an_edit_loads_the_next_generation_and_a_removal_unloads(rig: Rig) -> None:
    rig.controller.desire(desired(model("a")))
    await rig.until_ready("a", 1)
    rig.told.reports.clear()
    rig.controller.desire(desired(model("a", uri="pypi://y")))
    await rig.until_ready("a", 2)
    assert [load.uri for load in rig.worker.loads] == ["pypi://x", "pypi://y"]
    rig.controller.desire(desired(model("b")))
    await rig.until(lambda board: set(board.models) == {"b"})
    await rig.told.until(lambda: len(rig.worker.loads) == 3 and bool(rig.worker.unloads))
    assert [unload.model for unload in rig.worker.unloads] == ["a"]
    assert rig.worker.unloads[0].generation >= 2


@pytest.mark.parametrize("way", ["as progress", "as a status"])
async def test_a_failed_load_is_told_once_and_tried_again_after_an_edit_only(rig: Rig, way: str) -> None:
    if way == "as progress":
        rig.worker.error = worker_pb2.Error(code="model_load_failed", message="no such file")
    else:
        rig.worker.abort = (grpc.StatusCode.FAILED_PRECONDITION, "no such file", "model_load_failed")
    rig.controller.desire(desired(model("a")))
    await rig.told.until(lambda: rig.told.failures)
    for _ in range(3):
        assert (await rig.controller.reconcile()).is_empty
    ((command, error),) = rig.told.failures
    assert command.model == "a"
    assert isinstance(error, LoadError)
    assert error.message == "no such file"
    rig.worker.error = rig.worker.abort = None
    rig.controller.desire(desired(model("a", uri="pypi://y")))
    await rig.until_ready("a", 2)


async def test_a_refusal_of_another_kind_keeps_its_kind(rig: Rig) -> None:
    rig.worker.abort = (grpc.StatusCode.INVALID_ARGUMENT, "old generation", "invalid_request_error")
    rig.controller.desire(desired(model("a")))
    await rig.told.until(lambda: rig.told.failures)
    assert isinstance(rig.told.failures[0][1], InvalidRequest)


async def test_a_worker_that_went_away_is_loaded_when_it_is_back(
    rig: Rig, redis_server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "_RETRY_S", 0.02)
    monkeypatch.setattr(controller, "_RESYNC_S", 0.02)
    rig.worker.may_end.clear()
    rig.controller.desire(desired(model("a")))
    await rig.told.until(lambda: rig.told.reports)
    await rig.worker.stop()
    rig.controller.worker_ended("p-0")
    following = FakeWorker("p-0", redis_server_url)
    await following.start()
    try:
        await rig.told.until(lambda: following.loads)
        assert following.loads[0].generation == 1
        assert rig.told.failures == []
    finally:
        await following.stop()


async def test_at_rest_the_board_is_read_in_one_exchange_and_nothing_is_planned(
    rig: Rig, redis_server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "_RESYNC_S", 0.02)
    monkeypatch.setattr(names, "WORKER_LEASE_TTL_S", 0.05)
    rig.controller.desire(desired(model("a")))
    await rig.until_ready("a", 1)
    with redis.Redis.from_url(redis_server_url) as client:

        async def calls(name: str) -> int:
            await asyncio.sleep(0.01)
            found = client.info("commandstats").get(f"cmdstat_{name}")
            return found["calls"] if found else 0

        async with asyncio.timeout(20):
            while not (rig.controller._is_settled and rig.controller._commands.is_settled):
                await calls("hgetall")
            client.config_resetstat()
            while await calls("mget") < 5:
                assert await calls("hgetall") - await calls("smembers") <= 1
        assert await calls("hgetall") - await calls("smembers") <= 1, "what placement goes by is not read again"
    rig.worker.models.clear()
    await rig.worker.renew(epoch="2")
    await rig.told.until(lambda: len(rig.worker.loads) == 2)


async def test_a_worker_that_is_restarted_by_itself_is_loaded_again(rig: Rig) -> None:
    rig.controller.desire(desired(model("a")))
    await rig.until_ready("a", 1)
    rig.controller.worker_ended("p-0")
    rig.worker.models.clear()
    await rig.worker.renew(epoch="2")
    await rig.told.until(lambda: len(rig.worker.loads) == 2)


async def test_models_on_demand_are_told_once_for_each_life_and_generation(rig: Rig) -> None:
    many = [model(f"m{index:03}", residency=ON_DEMAND) for index in range(200)]
    rig.controller.desire(desired(*many))
    await rig.told.until(lambda: len(rig.told.reports) == 400)
    assert {report.state for report in rig.told.reports} == {"cold", KNOWN}
    assert len(rig.worker.loads) == 200
    load = rig.worker.loads[0]
    assert load.tier == worker_pb2.TIER_COLD
    assert load.residency == worker_pb2.Residency(priority=7, min_residency_s=1.5, idle_ttl_s=60.0)
    # The lease shows none of them.
    await rig.worker.renew(num_known=200)
    await rig.until(lambda board: board.workers["p-0"].num_known == 200)
    assert (await rig.controller.reconcile()).is_empty
    assert len(rig.worker.loads) == 200
    rig.worker.known.clear()
    rig.controller.worker_ended("p-0")
    await rig.worker.renew(epoch="2")
    await rig.told.until(lambda: len(rig.worker.known) == 200)
    assert len(rig.worker.loads) == 400


async def test_a_model_on_demand_that_is_removed_is_unloaded_where_it_was_known(rig: Rig) -> None:
    rig.controller.desire(desired(model("a", residency=ON_DEMAND), model("b", residency=ON_DEMAND)))
    await rig.told.until(lambda: len(rig.told.reports) == 4)
    rig.controller.desire(desired(model("b", residency=ON_DEMAND)))
    await rig.until(lambda _: rig.worker.known == {"b"})
    assert [unload.tier for unload in rig.worker.unloads] == [worker_pb2.TIER_UNSPECIFIED]
    assert (await rig.controller.reconcile()).is_empty


async def test_an_evicted_model_is_not_loaded_again_until_it_changes(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "WORKER_LEASE_TTL_S", 0.0)  # the lease is believed at once
    rig.controller.desire(desired(model("a")))
    await rig.until_ready("a", 1)
    for left in ("draining", "host", None):
        rig.worker.models = {"a": ResidentRecord(left, 1)} if left else {}
        await rig.worker.renew()
        await rig.until(lambda board, left=left: _state(board) == left)  # type: ignore[misc]
        assert (await rig.controller.reconcile()).is_empty
    rig.controller.desire(desired(model("a", uri="pypi://y")))
    await rig.told.until(lambda: [load.generation for load in rig.worker.loads] == [1, 2])


def _state(board: Board) -> str | None:
    held = board.workers["p-0"].models.get("a")
    return held.state if held else None


@pytest.mark.parametrize("residency", [Residency(), ON_DEMAND], ids=["preferred", "on demand"])
async def test_a_stale_command_is_given_again_in_a_newer_generation(rig: Rig, residency: Residency) -> None:
    rig.worker.newest["a"] = 5
    rig.controller.desire(desired(model("a", residency=residency)))
    await rig.told.until(lambda: [load.generation for load in rig.worker.loads] == [1, 6])
    await rig.until(lambda board: board.models["a"].generation == 6)
    assert [type(error) for _, error in rig.told.failures] == [StaleCommand]


async def test_an_unload_that_a_worker_refuses_is_tried_again_after_a_pause(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "_RETRY_UNLOAD_S", 0.02)
    monkeypatch.setattr(controller, "_RESYNC_S", 0.02)
    rig.controller.desire(desired(model("a", residency=ON_DEMAND), model("b")))
    await rig.told.until(lambda: any(report.state == KNOWN for report in rig.told.reports))
    rig.worker.newest["a"] = 9
    rig.controller.desire(desired(model("b")))
    await rig.until(lambda _: not rig.worker.known)
    assert [unload.generation for unload in rig.worker.unloads] == [2, 9]


async def test_a_model_that_was_just_being_told_is_unloaded_until_that_is_done(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "_RETRY_UNLOAD_S", 0.02)
    monkeypatch.setattr(controller, "_RESYNC_S", 0.02)
    rig.worker.may_end.clear()
    rig.controller.desire(desired(model("a", residency=ON_DEMAND), model("b")))
    await rig.until(lambda _: rig.worker.known == {"a"})
    rig.worker.newest["a"] = 9
    rig.controller.desire(desired(model("b")))
    await rig.until(lambda _: not rig.worker.known)
    assert [unload.generation for unload in rig.worker.unloads] == [2, 9]


async def test_a_draining_worker_gets_no_command(rig: Rig) -> None:
    await rig.worker.renew(draining=True)
    rig.controller.desire(desired(model("a")))
    await rig.until(lambda board: "a" in board.models)
    await rig.controller.reconcile()
    assert rig.worker.loads == []


async def test_an_emptied_redis_is_filled_again(rig: Rig, redis_server_url: str) -> None:
    rig.controller.desire(desired(model("a")))
    await rig.until_ready("a", 1)
    with redis.Redis.from_url(redis_server_url) as board:
        board.flushall()
        board.publish(names.CHANNEL_CHANGES, "models")
    await rig.until(lambda board: "a" not in board.models)
    await rig.worker.renew()
    await rig.until(lambda board: "a" in board.models and board.models["a"].generation == 1)
    assert len(rig.worker.loads) == 1


async def test_a_pool_that_shrinks_stops_its_process_and_one_that_grows_starts_it(rig: Rig) -> None:
    two = DesiredPool("p", 2, None, None, 5.0)
    rig.controller.desire(desired(model("a"), pool=two))
    await rig.told.until(lambda: "p-1" in rig.controller.workers)
    rig.controller.desire(desired(model("a")))
    await rig.told.until(lambda: "stop worker 'p-1': no pool has it" in rig.told.reasons)
    await rig.until(lambda _: "p-1" not in rig.controller.workers)
    assert rig.supervisor.names == ("p-0",)
    rig.controller.desire(desired(model("a"), pool=two))
    await rig.told.until(lambda: rig.told.reasons.count("start worker 'p-1': pool 'p' has 2") == 2)


async def test_a_fault_in_one_turn_is_told_and_the_loop_goes_on(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "plan", lambda *_, **__: 1 / 0)
    rig.controller.desire(desired(model("a")))
    await rig.told.until(lambda: rig.told.troubles)
    assert "ZeroDivisionError" in rig.told.troubles[0]
    monkeypatch.setattr(controller, "plan", plan)
    rig.controller.wake()
    await rig.until_ready("a", 1)
