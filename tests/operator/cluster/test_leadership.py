"""The lead is lost or won again: a replica that may not act writes nothing; turns that hang or fail end nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from cluster_rig import ClusterRig, key, model, pool, until

from naru_operator.adapters.cluster import controller as controller_module
from naru_operator.adapters.cluster.controller import ClusterController
from naru_operator.adapters.kube.errors import NotLeader
from naru_operator.core.kube import Object


@contextlib.asynccontextmanager
async def running(controller: ClusterController) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(controller.run(), name="control loop")
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def ready(rig: ClusterRig) -> None:
    """A pool of one worker, ready, and a model on it."""
    rig.kube.put(pool(workers=1))
    await rig.converge()
    await rig.start_worker("default-0")
    rig.kube.put(model("one"))
    await rig.converge()


@pytest.mark.usefixtures("ready")
async def test_a_lead_lost_in_mid_turn_keeps_registry_and_workers_untouched(rig: ClusterRig) -> None:
    before = rig.records(), rig.num_commands, len(rig.kube.writes)
    rig.kube.put(model("two"))
    with rig.kube.holding("create", "ControllerRevision") as gate:
        turn = asyncio.create_task(rig.turn())
        await until(lambda: len(rig.kube.asked_for("create", "ControllerRevision")) == 2)
        rig.is_leader = False
        gate.set()
        with pytest.raises(NotLeader):
            await turn
    assert (rig.records(), rig.num_commands, len(rig.kube.writes)) == before


@pytest.mark.usefixtures("ready")
async def test_a_lead_lost_behind_a_revision_that_exists_stops_the_turn_too(rig: ClusterRig) -> None:
    before = rig.records(), rig.num_commands
    rig.kube.put(model("two"))
    refused = rig.kube.create

    async def create(obj: Object, namespace: str | None = None) -> Object:
        made = await refused(obj, namespace)
        rig.is_leader = False  # the answer comes when the lease has run out
        return made

    rig.kube.create = create  # type: ignore[method-assign]
    with pytest.raises(NotLeader):
        await rig.turn()
    assert (rig.records(), rig.num_commands) == before


@pytest.mark.usefixtures("ready")
async def test_statuses_of_a_replica_that_leads_no_more_are_dropped_in_silence(
    rig: ClusterRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.is_leader = False
    rig.kube.set_status("Pod", key("default-0"), {"phase": "Running"})
    with contextlib.suppress(NotLeader):
        await rig.turn()
    assert len(rig.kube.asked_for("status", "WorkerPool")) > 0
    assert not caplog.records


async def test_the_loop_acts_only_while_it_leads_and_a_new_term_reads_anew(rig: ClusterRig) -> None:
    rig.is_leader = False
    controller = ClusterController(rig.surroundings)
    rig.kube.put(pool(workers=1))
    async with running(controller):
        await until(lambda: controller.turns.last_look_s > 0)
        assert controller.turns.num_turns == 0
        rig.is_leader = True
        controller.lead_changed(True)
        await until(lambda: "default-0" in rig.kube.named("Pod"))
        rig.is_leader = False
        controller.lead_changed(False)
        rig.kube.put(pool(workers=2))
        looked_s = controller.turns.last_look_s
        await until(lambda: controller.turns.last_look_s > looked_s)
        assert list(rig.kube.named("Pod")) == ["default-0"]
        rig.kube.remove("Pod", key("default-0"))  # while another one leads
        rig.is_leader = True
        controller.lead_changed(True)
        await until(lambda: list(rig.kube.named("Pod")) == ["default-0", "default-1"])


async def test_a_lead_lost_and_won_again_between_two_looks_begins_a_new_term(rig: ClusterRig) -> None:
    controller = ClusterController(rig.surroundings)
    rig.kube.put(pool(workers=1))
    async with running(controller):
        await until(lambda: rig.phase("WorkerPool", "default") == "Pending")
        (num_budgets,) = {len(rig.kube.asked_for("apply", "PodDisruptionBudget"))}
        controller.lead_changed(False)
        controller.lead_changed(True)
        # Only a term that knows nothing of the last one applies again.
        await until(lambda: len(rig.kube.asked_for("apply", "PodDisruptionBudget")) > num_budgets)


@pytest.mark.usefixtures("ready")
async def test_commands_that_wait_are_given_up_the_moment_the_lead_is_lost(rig: ClusterRig) -> None:
    await rig.term.close()
    worker = rig.workers["default-0"]
    worker.may_end.clear()
    controller = ClusterController(rig.surroundings)
    async with running(controller):
        rig.kube.put(model("two"))
        await until(lambda: len(worker.loads) == 2)
        with rig.kube.holding("create", "Pod"):
            rig.kube.put(pool(workers=2))  # the turn hangs over a pod
            await until(lambda: rig.kube.asked_for("create", "Pod") == ["default-0", "default-1"])
            rig.is_leader = False
            controller.lead_changed(False)
            ours = [it for it in asyncio.all_tasks() if it.get_name().startswith("loading two@")]
            await asyncio.wait(ours, timeout=10)
            assert all(it.done() for it in ours)
    worker.may_end.set()


@pytest.mark.usefixtures("ready")
async def test_an_api_server_that_never_answers_holds_neither_the_models_nor_the_loop(
    rig: ClusterRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.term.close()
    monkeypatch.setattr(controller_module, "_MAX_LOOK_S", 0.5)
    controller = ClusterController(rig.surroundings)
    with rig.kube.holding("create", "Pod"):
        async with running(controller):
            rig.kube.put(pool(workers=2))
            await until(lambda: len(rig.kube.asked_for("create", "Pod")) == 2)
            rig.kube.put(model("two"))
            await until(lambda: any(name.startswith("two@") for name in rig.workers["default-0"].models))
            await until(lambda: controller.turns.num_failures > 1)


async def test_a_fault_of_our_own_ends_neither_the_loop_nor_fills_the_log(
    rig: ClusterRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a case nobody thought of")

    controller = ClusterController(rig.surroundings)
    monkeypatch.setattr(controller_module, "_LOOK_S", 0.02)
    with monkeypatch.context() as patch:
        patch.setattr("naru_operator.adapters.cluster.models.plan_models", broken)
        rig.kube.put(pool(workers=1))
        async with running(controller):
            await until(lambda: controller.turns.num_failures >= 2)
            assert "default-0" in rig.kube.named("Pod")
            patch.undo()
            await until(lambda: controller.turns.num_turns > 0)
    assert sum("a case nobody thought of" in record.message for record in caplog.records) == 1


async def test_the_end_leaves_no_task_behind(rig: ClusterRig) -> None:
    before = asyncio.all_tasks()
    controller = ClusterController(rig.surroundings)
    with rig.kube.holding("status", "WorkerPool"):
        async with running(controller):
            rig.kube.put(pool(workers=1))
            await until(lambda: rig.kube.asked_for("status", "WorkerPool"))
        assert asyncio.all_tasks() <= before
