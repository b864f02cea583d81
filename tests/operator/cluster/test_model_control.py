"""ModelDeployments through whole turns: revisions, registry, loads, status; restarts, refusals, failures that heal."""

from __future__ import annotations

import logging

import pytest
from cluster_rig import NAMESPACE, ClusterRig, condition, key, model, pool

from naru_operator.adapters.kube.errors import ApiAway, Denied
from naru_operator.core.kube import Object
from naru_proto import names
from naru_proto.errors import NaruError
from naru_proto.registry import ResidentRecord
from naru_proto.v1 import worker_pb2


@pytest.fixture(autouse=True)
async def workers(rig: ClusterRig) -> None:
    """A pool of two workers, ready."""
    rig.kube.put(pool())
    await rig.converge()
    for name in ("default-0", "default-1"):
        await rig.start_worker(name)
    await rig.converge()


def told(rig: ClusterRig, name: str) -> Object:
    return dict(rig.get("ModelDeployment", name)["status"])


async def test_a_model_is_kept_registered_loaded_and_told_and_then_nothing_is_written(rig: ClusterRig) -> None:
    rig.kube.put(model("one", alias="first"))
    await rig.converge()
    (revision,) = rig.kube.named("ControllerRevision").values()
    digest = revision["metadata"]["annotations"][names.ANNOTATION_REVISION_DIGEST]
    records = rig.records()
    assert (records["one"].target, records["one"].aliases) == (f"one@{digest}", ("first",))
    assert [load.model for it in rig.workers.values() for load in it.loads] == [f"one@{digest}"]
    assert (told(rig, "one")["phase"], told(rig, "one")["currentRevision"]) == ("Ready", digest)
    assert {"Accepted", "Loaded"} <= {event.reason for event in rig.kube.events}
    before = len(rig.kube.asked), rig.num_commands
    await rig.turn(3)
    assert (len(rig.kube.asked), rig.num_commands) == before


async def test_a_model_that_is_deleted_leaves_nothing(rig: ClusterRig) -> None:
    rig.kube.put(model("one"))
    rig.kube.put(model("two"))
    await rig.converge()
    rig.kube.remove("ModelDeployment", key("one"))
    await rig.converge()
    assert {names.base_name(name) for name in rig.records()} == {"two"}
    assert {names.base_name(name) for it in rig.workers.values() for name in it.models} == {"two"}


async def test_a_new_leader_that_finds_all_in_place_writes_nothing_and_loads_nothing(rig: ClusterRig) -> None:
    for index in range(4):
        # Half of them may have more copies, and are known where they are not loaded.
        rig.kube.put(model(f"m{index}", replicas={"min": 1} if index % 2 else {"min": 1, "max": 1}))
    await rig.converge()
    before = len(rig.kube.writes), rig.records(), rig.num_commands
    await rig.restart()
    await rig.turn(3)
    assert (len(rig.kube.writes), rig.records(), rig.num_commands) == before


async def test_a_new_leader_reads_what_the_last_one_left_and_goes_on_from_there(rig: ClusterRig) -> None:
    rig.kube.put(model("one"))
    await rig.converge()
    await rig.term.close()
    rig.kube.put(model("one", "hf://org/two"))
    rig.kube.put(model("other"))
    await rig.restart()
    await rig.converge()
    assert told(rig, "one")["phase"] == told(rig, "other")["phase"] == "Ready"
    assert len(rig.kube.named("ControllerRevision")) == 3
    assert rig.records()["one"].target == f"one@{told(rig, 'one')['updateRevision']}"


async def test_a_watch_that_lags_keeps_no_revision_twice_and_tells_nothing_twice(rig: ClusterRig) -> None:
    rig.kube.put(model("one"))
    rig.kube.is_lagging = True
    await rig.turn(4)
    assert len(rig.kube.asked_for("create", "ControllerRevision")) == 1
    num_statuses = len(rig.kube.asked_for("status", "ModelDeployment"))
    await rig.turn(2)
    assert len(rig.kube.asked_for("status", "ModelDeployment")) == num_statuses
    rig.kube.catch_up()
    await rig.turn(2)
    assert len(rig.kube.asked_for("status", "ModelDeployment")) == num_statuses


@pytest.mark.parametrize("kind", [Denied, ApiAway])
async def test_a_revision_that_cannot_be_kept_costs_neither_its_load_nor_another_model(
    rig: ClusterRig, caplog: pytest.LogCaptureFixture, kind: type[NaruError]
) -> None:
    rig.kube.put(model("poor"))
    rig.kube.put(model("rich"))
    refusal = kind("cannot create controllerrevisions in namespace 'ns': exceeded quota")
    blocked = rig.kube.create

    async def create(obj: Object, namespace: str | None = None) -> Object:
        if obj["metadata"]["name"].startswith("poor-"):
            raise refusal
        return await blocked(obj, namespace)

    rig.kube.create = create  # type: ignore[method-assign]
    await rig.turn(4)
    assert told(rig, "poor")["phase"] == told(rig, "rich")["phase"] == "Ready"
    assert sum(refusal.message in record.message for record in caplog.records) == 1
    rig.kube.create = blocked  # type: ignore[method-assign]
    await rig.converge()
    assert len(rig.kube.named("ControllerRevision")) == 2


async def test_a_revisions_name_that_something_else_has_is_asked_for_once(rig: ClusterRig) -> None:
    rig.kube.put(model("one"))
    await rig.converge()
    name = next(iter(rig.kube.named("ControllerRevision")))
    rig.kube.remove("ModelDeployment", key("one"))
    rig.kube.remove("ControllerRevision", key(name))
    await rig.converge()
    metadata = {"name": name, "namespace": NAMESPACE}
    rig.kube.put({"apiVersion": "apps/v1", "kind": "ControllerRevision", "metadata": metadata, "revision": 1})
    rig.kube.put(model("one"))
    before = len(rig.kube.asked_for("create", "ControllerRevision"))
    await rig.turn(5)
    assert len(rig.kube.asked_for("create", "ControllerRevision")) == before + 1
    assert told(rig, "one")["phase"] == "Ready"


async def test_surplus_revisions_go_by_their_uid(rig: ClusterRig) -> None:
    for number in range(3):
        rig.kube.put(model("one", f"hf://org/v{number}", rollout={"historyLimit": 0}))
        await rig.converge(16)
    assert len(rig.kube.named("ControllerRevision")) == 1
    assert len(rig.kube.asked_for("delete", "ControllerRevision")) == 2


async def test_a_model_that_cannot_be_read_is_told_so_and_what_it_served_goes_on(rig: ClusterRig) -> None:
    rig.kube.put(model("one"))
    await rig.converge()
    before, num_commands = rig.records(), rig.num_commands
    rig.kube.put(model("one", fromALaterVersion=1))
    rig.kube.put(model("other"))
    await rig.converge()
    accepted = condition(rig.get("ModelDeployment", "one"), "Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "InvalidSpec")
    assert "fromALaterVersion" in accepted["message"]
    assert told(rig, "other")["phase"] == "Ready"
    assert {name: rig.records()[name] for name in before} == before
    assert rig.num_commands == num_commands + 1


async def test_a_load_that_failed_and_that_its_worker_mended_is_no_trouble_any_more(rig: ClusterRig) -> None:
    for worker in rig.workers.values():
        worker.error = worker_pb2.Error(code="model_load_failed", message="hub answers 503 at https://u:pw@hub/x")
    rig.kube.put(model("one"))
    await rig.turn(3)
    assert told(rig, "one")["phase"] == "Failed"
    assert "503" in told(rig, "one")["lastError"]["message"]
    (worker,) = [it for it in rig.workers.values() if it.loads]
    worker.models[worker.loads[0].model] = ResidentRecord("ready", worker.loads[0].generation)
    await rig.converge()
    assert told(rig, "one")["phase"] == "Ready"
    assert condition(rig.get("ModelDeployment", "one"), "Degraded")["status"] == "False"
    assert "lastError" not in told(rig, "one")
    assert len(worker.loads) == 1
    worker.models.clear()  # and what it loses later is loaded again
    worker.error = None
    await rig.converge()
    assert len(worker.loads) == 2


async def test_passwords_in_a_workers_words_reach_neither_log_nor_status_nor_events(
    rig: ClusterRig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for worker in rig.workers.values():
        worker.error = worker_pb2.Error(code="model_load_failed", message="cannot fetch https://user:hush-hush@hub/x")
    rig.kube.put(model("one"))
    await rig.turn(3)
    assert "cannot fetch" in caplog.text
    seen = f"{caplog.text}{told(rig, 'one')}{rig.kube.events}"
    assert "hush-hush" not in seen


async def test_a_model_made_anew_under_its_name_is_another_object(rig: ClusterRig) -> None:
    rig.kube.put(model("one"))
    await rig.converge()
    rig.kube.remove("ModelDeployment", key("one"))
    fresh = rig.kube.put(model("one"))
    await rig.converge()
    assert told(rig, "one")["phase"] == "Ready"
    assert rig.get("ModelDeployment", "one")["metadata"]["uid"] == fresh["metadata"]["uid"]
