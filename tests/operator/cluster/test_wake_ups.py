"""What makes the loop take a turn at once, and that a quiet one does next to nothing. Looks of its own come after an
hour here: whatever happens sooner was a wake-up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from cluster_rig import ClusterRig, key, model, pool, until

from naru_operator.adapters.cluster import controller as controller_module
from naru_operator.adapters.cluster.controller import ClusterController
from naru_proto import names


@pytest.fixture
async def loop(rig: ClusterRig, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ClusterController]:
    """The loop over a pool of one worker."""
    rig.kube.put(pool(workers=1))
    await rig.converge()
    await rig.start_worker("default-0")
    await rig.converge()
    await rig.term.close()
    monkeypatch.setattr(controller_module, "_LOOK_S", 3600.0)
    monkeypatch.setattr(controller_module, "_LEAST_S", 0.01)
    controller = ClusterController(rig.surroundings)
    task = asyncio.create_task(controller.run())
    await until(lambda: controller.turns.num_turns > 0)
    await until(lambda: dict(rig.board.pubsub_numsub(names.CHANNEL_CHANGES))[names.CHANNEL_CHANGES.encode()])
    yield controller
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_new_object_and_a_renewed_lease_each_cause_a_turn(rig: ClusterRig, loop: ClusterController) -> None:
    worker = rig.workers["default-0"]
    rig.kube.put(model("one"))  # the store has changed
    await until(lambda: worker.models)
    await worker.renew()
    await until(lambda: rig.phase("ModelDeployment", "one") == "Ready")


async def test_a_commands_end_asks_for_a_look_and_that_one_is_a_full_turn(rig: ClusterRig) -> None:
    rig.kube.put(pool(workers=1))
    await rig.converge()
    worker = await rig.start_worker("default-0")
    await rig.converge()
    worker.may_end.clear()
    rig.kube.put(model("one"))
    await rig.term.look(-2)
    await until(lambda: worker.loads)
    num_wakes, num_turns = rig.num_wakes, rig.turns.num_turns
    worker.may_end.set()
    await until(lambda: rig.num_wakes > num_wakes)
    await rig.term.look(-2)  # the store is as it was
    assert rig.turns.num_turns == num_turns + 1


async def test_a_change_in_the_middle_of_a_turn_is_not_lost(rig: ClusterRig, loop: ClusterController) -> None:
    with rig.kube.holding("create", "ControllerRevision") as gate:
        rig.kube.put(model("one"))
        await until(lambda: rig.kube.asked_for("create", "ControllerRevision"))
        rig.kube.put(pool(workers=2))
        gate.set()
        await until(lambda: "default-1" in rig.kube.named("Pod"))


async def test_a_pod_that_vanishes_is_replaced_at_once(rig: ClusterRig, loop: ClusterController) -> None:
    before = rig.get("Pod", "default-0")["metadata"]["uid"]
    rig.kube.remove("Pod", key("default-0"))
    await until(lambda: rig.kube.named("Pod") and rig.get("Pod", "default-0")["metadata"]["uid"] != before)


async def test_a_quiet_look_asks_redis_three_small_things_and_writes_nothing(rig: ClusterRig) -> None:
    rig.kube.put(pool(workers=1))
    rig.kube.put(model("one"))
    await rig.converge()
    await rig.start_worker("default-0")
    await rig.converge()
    await rig.look()
    num_turns, num_asked = rig.turns.num_turns, len(rig.kube.asked)
    rig.board.config_resetstat()
    for _ in range(5):
        await rig.look()
    calls = {name: stats["calls"] for name, stats in rig.board.info("commandstats").items()}
    ours = {name: count for name, count in calls.items() if not name.startswith(("cmdstat_info", "cmdstat_config"))}
    assert ours == {"cmdstat_smembers": 5, "cmdstat_mget": 5, "cmdstat_hlen": 5}
    assert (rig.turns.num_turns, len(rig.kube.asked)) == (num_turns, num_asked)
