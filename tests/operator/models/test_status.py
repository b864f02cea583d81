"""Status, conditions and events of one model: tables of what is seen and what is told."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from model_world import World, raw_model, raw_pool

from naru_operator.core.kube import ObjectKey
from naru_operator.core.model_plan import EVICTED, ObservedModel
from naru_operator.core.models.changes import is_progress_only, model_events
from naru_operator.core.models.facts import CopyFact, Eviction, ModelFacts, model_facts, read_eviction
from naru_operator.core.models.model import ClusterWorker, Verdict
from naru_operator.core.models.status import model_status
from naru_proto.crd.units import timestamp_of
from naru_proto.crd.v1alpha1 import ModelDeploymentStatus
from naru_proto.registry import ResidentRecord, WorkerRecord

KEY = ObjectKey("default", "m")
NOW_S = 1_700_000_000
NOTHING = ModelDeploymentStatus()
DONE = Verdict(
    KEY,
    True,
    "Accepted",
    "fine",
    current="aaa",
    update="aaa",
    rollout_reason="RolloutComplete",
    placed_on=("w-0",),
    num_desired=1,
    pools=("p",),
)
FIRST = dataclasses.replace(DONE, current="", rollout_reason="WaitingForCopies")
ROLLING = dataclasses.replace(DONE, update="bbb", rollout_reason="WaitingForCopies", placed_on=("w-1",))
STOPPED = dataclasses.replace(
    ROLLING, rollout_reason="RevisionFailed", rollout_message="bbb cannot be loaded: no file", has_rollout_failed=True
)
ON_DEMAND = dataclasses.replace(DONE, is_on_demand=True, num_desired=0)
REFUSED = Verdict(KEY, False, "NoPool", "add labels", update="aaa", rollout_reason="NotAccepted")


def held(worker_id: str, state: str, digest: str = "aaa", **fields: Any) -> CopyFact:
    return CopyFact(worker_id, "p", digest, ResidentRecord(state, 1, **fields), state in ("ready", "active"))


def status_of(
    verdict: Verdict, *copies: CopyFact, previous: ModelDeploymentStatus = NOTHING, now_s: int = NOW_S, **facts: Any
) -> ModelDeploymentStatus:
    """What would be written; it passes the schema and reads back equal."""
    status = model_status(verdict, ModelFacts(copies, **facts), previous, generation=4, now_s=now_s)
    assert ModelDeploymentStatus.model_validate(status.to_wire()) == status
    return status


def conditions(status: ModelDeploymentStatus) -> dict[str, tuple[str, str]]:
    return {each.type: (each.status, each.reason) for each in status.conditions}


READY = held("w-0", "ready")
CASES: list[tuple[str, Verdict, tuple[CopyFact, ...], dict[str, Any], str, dict[str, str]]] = [
    ("it serves", DONE, (READY,), {}, "Ready",
     {"Accepted": "True Accepted", "Placed": "True Placed", "WeightsCached": "True Cached", "Loaded": "True Loaded",
      "Available": "True Serving", "Progressing": "True RolloutComplete", "Degraded": "False AsAskedFor"}),
    ("it is placed", FIRST, (), {}, "Placing",
     {"Placed": "True Placed", "WeightsCached": "False NotFetched", "Loaded": "False Waiting",
      "Available": "False Waiting", "Progressing": "True WaitingForCopies", "Degraded": "False AsAskedFor"}),
    ("its files are fetched", FIRST, (held("w-0", "fetching"),), {}, "Fetching",
     {"WeightsCached": "False Fetching", "Loaded": "False Fetching", "Available": "False Fetching"}),
    ("it is loaded", FIRST, (held("w-0", "loading"),), {}, "Loading",
     {"WeightsCached": "True Cached", "Loaded": "False Loading", "Available": "False Loading"}),
    ("its load failed", FIRST, (held("w-0", "failed", error="no file"),), {}, "Failed",
     {"WeightsCached": "Unknown LoadFailed", "Loaded": "False LoadFailed", "Available": "False LoadFailed",
      "Degraded": "True LoadFailed"}),
    ("a command failed", FIRST, (), {"failed": "refused"}, "Failed",
     {"Loaded": "False LoadFailed", "Available": "False LoadFailed", "Degraded": "True LoadFailed"}),
    ("no worker takes it", dataclasses.replace(FIRST, placed_on=()), (), {}, "Pending",
     {"Placed": "False NoWorker", "Loaded": "False NoWorker", "Available": "False NoWorker"}),
    ("too few workers", dataclasses.replace(DONE, num_desired=3), (READY,), {}, "Degraded",
     {"Placed": "False TooFewWorkers", "Loaded": "False Waiting", "Available": "True Serving",
      "Degraded": "True TooFewCopies"}),
    ("it was evicted", DONE, (), {"num_known": 1}, "Unloaded",
     {"Loaded": "False Evicted", "Available": "True LoadsOnRequest", "Degraded": "True TooFewCopies"}),
    ("it is in host memory", DONE, (held("w-0", "host"),), {}, "Unloaded",
     {"WeightsCached": "True Cached", "Loaded": "False Evicted", "Available": "True LoadsOnRequest"}),
    ("it drains", DONE, (held("w-0", "draining"),), {}, "Draining", {"Available": "False Waiting"}),
    ("nobody asked for it", ON_DEMAND, (), {"num_known": 1}, "Unloaded",
     {"Placed": "True KnownToWorkers", "Loaded": "False NotAskedFor", "Available": "True LoadsOnRequest",
      "Degraded": "False AsAskedFor"}),
    ("a request loads it", ON_DEMAND, (held("w-0", "loading"),), {}, "Loading",
     {"Loaded": "False Loading", "Available": "True LoadsOnRequest"}),
    ("on demand and failed", ON_DEMAND, (held("w-0", "failed", error="no file"),), {}, "Failed",
     {"Loaded": "False LoadFailed", "Available": "False LoadFailed", "Degraded": "True LoadFailed"}),
    ("a rollout goes on", ROLLING, (READY, held("w-1", "loading", "bbb")), {}, "Ready",
     {"Loaded": "False Loading", "Available": "True Serving", "Progressing": "True WaitingForCopies",
      "Degraded": "False AsAskedFor"}),
    ("a rollout failed", STOPPED, (READY, held("w-1", "failed", "bbb", error="no file")), {}, "Degraded",
     {"Loaded": "False LoadFailed", "Available": "True Serving", "Progressing": "False RevisionFailed",
      "Degraded": "True RevisionFailed"}),
    ("refused from the start", REFUSED, (), {}, "Failed",
     {"Accepted": "False NoPool", "Placed": "False NotAccepted", "Loaded": "False NotAccepted",
      "Available": "False NotAccepted", "Progressing": "False NotAccepted", "Degraded": "False NotAccepted"}),
    ("refused while an earlier one serves", dataclasses.replace(REFUSED, current="aaa", update="bbb"), (READY,), {},
     "Degraded", {"Accepted": "False NoPool", "Available": "True Serving", "Degraded": "True SpecRefused"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("verdict", "copies", "facts", "phase", "told"), [each[1:] for each in CASES], ids=[each[0] for each in CASES]
)
def test_phase_and_conditions(
    verdict: Verdict, copies: tuple[CopyFact, ...], facts: dict[str, Any], phase: str, told: dict[str, str]
) -> None:
    status = status_of(verdict, *copies, **facts)
    found = conditions(status)
    assert list(found) == ["Accepted", "Placed", "WeightsCached", "Loaded", "Available", "Progressing", "Degraded"]
    assert {kind: " ".join(found[kind]) for kind in told} == told
    assert status.phase == phase
    assert all(
        each.message and each.observed_generation == 4 for each in status.conditions if each.type != "Progressing"
    )


def test_messages_say_who_and_why() -> None:
    status = status_of(STOPPED, READY, held("w-1", "failed", "bbb", error="no file at s3://u:pw@b/x"))
    said = {each.type: each.message for each in status.conditions}
    assert said["Loaded"] == "w-1: no file at s3://***@b/x"
    assert said["Progressing"] == said["Degraded"] == "bbb cannot be loaded: no file"
    few = dataclasses.replace(DONE, num_desired=3)
    assert (
        "1 of 3 copies have a worker, one each: 'w-0'; add workers to the pools 'p'"
        in {each.type: each.message for each in status_of(few, READY).conditions}["Placed"]
    )


def test_copies_are_counted_and_listed_once_for_each_worker() -> None:
    verdict = dataclasses.replace(ROLLING, num_desired=2)
    status = status_of(
        verdict,
        held("w-1", "active", weight_bytes=5, kv_bytes=2, num_in_flight=3, since_s=NOW_S - 9, last_used_s=NOW_S - 60),
        held("w-0", "failed", error="x"),
        held("w-0", "loading", "bbb"),
        held("w-1", "loading", "bbb"),
    )
    assert (status.replicas.desired, status.replicas.resident, status.replicas.ready) == (2, 3, 1)
    assert [(each.worker, each.state) for each in status.residents] == [("w-0", "Loading"), ("w-1", "Active")]
    resident = status.residents[1]
    assert (resident.pool, resident.weight_bytes, resident.kv_bytes, resident.in_flight) == ("p", 5, 2, 3)
    assert (resident.since, resident.last_used) == (timestamp_of(NOW_S - 9), timestamp_of(NOW_S - 60))
    assert (status.weight_bytes, status.last_used) == (5, timestamp_of(NOW_S - 60))
    assert (status.current_revision, status.update_revision, status.observed_generation) == ("aaa", "bbb", 4)
    assert status.selector == "serving.naru.dev/pool in (p)"


def test_progress_is_cut_to_whole_percents_and_the_load_keeps_its_start() -> None:
    first = status_of(FIRST, held("w-0", "fetching", bytes_done=12_345, bytes_total=100_000, eta_s=61.2, since_s=NOW_S))
    assert first.load is not None
    assert (first.load.worker, first.load.bytes_done, first.load.bytes_total) == ("w-0", 12_000, 100_000)
    assert (first.load.eta_seconds, first.load.started_at) == (65, timestamp_of(NOW_S))
    second = status_of(
        FIRST,
        held("w-0", "loading", bytes_done=12_999, bytes_total=100_000, eta_s=3.1),
        previous=first,
        now_s=NOW_S + 9,
    )
    assert second.load is not None
    assert (second.load.bytes_done, second.load.eta_seconds) == (12_000, 4)
    assert second.load.started_at == timestamp_of(NOW_S)
    unknown = status_of(FIRST, held("w-0", "fetching", bytes_done=7)).load
    assert unknown is not None
    assert (unknown.bytes_done, unknown.bytes_total, unknown.eta_seconds) == (7, 0, None)
    assert status_of(DONE, READY, previous=second).load is None


def test_what_a_lease_should_not_hold_breaks_no_status() -> None:
    wild: dict[str, Any] = {
        "bytes_done": -5,
        "bytes_total": -1,
        "eta_s": float("inf"),
        "since_s": 10**18,
        "last_used_s": -4,
    }
    status = status_of(FIRST, held("w-0", "loading", **wild, kv_bytes=-1), held("w-1", "state 99"))
    assert [each.state for each in status.residents] == ["Loading", "Cold"]
    assert status.load is not None and status.load.bytes_done == 0
    assert status.last_used is None


def test_equal_facts_give_an_equal_status_at_any_time() -> None:
    copies = (READY, held("w-1", "failed", "bbb", error="no file"))
    first = status_of(STOPPED, *copies)
    assert status_of(STOPPED, *copies, previous=first, now_s=NOW_S + 5000) == first


def test_a_condition_keeps_its_time_until_its_status_changes() -> None:
    first = status_of(FIRST, held("w-0", "fetching"))
    second = status_of(FIRST, held("w-0", "loading"), previous=first, now_s=NOW_S + 10)
    third = status_of(DONE, READY, previous=second, now_s=NOW_S + 20)
    times = [
        next(each.last_transition_time for each in status.conditions if each.type == "Loaded")
        for status in (first, second, third)
    ]
    assert times == [timestamp_of(NOW_S), timestamp_of(NOW_S), timestamp_of(NOW_S + 20)]


def test_the_last_error_stays_until_the_model_is_ready() -> None:
    failed = status_of(FIRST, held("w-0", "failed", error="no file"))
    assert failed.last_error is not None
    assert (failed.last_error.code, failed.last_error.worker) == ("model_load_failed", "w-0")
    assert (failed.last_error.message, failed.last_error.at) == ("no file", timestamp_of(NOW_S))
    again = status_of(FIRST, held("w-0", "failed", error="no file"), previous=failed, now_s=NOW_S + 60)
    assert again.last_error == failed.last_error
    trying = status_of(FIRST, held("w-0", "fetching"), previous=again, now_s=NOW_S + 61)
    assert trying.last_error == failed.last_error
    assert status_of(DONE, READY, previous=trying).last_error is None


def test_a_refusal_is_an_error_until_it_is_mended() -> None:
    refused = status_of(REFUSED)
    assert refused.last_error is not None
    assert (refused.last_error.code, refused.last_error.message) == ("NoPool", "add labels")
    assert status_of(FIRST, previous=refused).last_error is None


def test_files_stay_cached_when_the_model_leaves_memory_but_not_for_another_revision() -> None:
    first = status_of(DONE, READY)
    assert conditions(status_of(DONE, previous=first, num_known=1))["WeightsCached"] == ("True", "Cached")
    assert conditions(status_of(ROLLING, READY, previous=first))["WeightsCached"] == ("False", "NotFetched")


def test_what_is_known_of_the_served_revision_is_kept_while_it_serves() -> None:
    first = status_of(DONE, held("w-0", "ready", weight_bytes=7), resolved_revision="c0ffee")
    kept = status_of(DONE, held("w-0", "loading"), previous=first)
    assert (kept.resolved_revision, kept.weight_bytes) == ("c0ffee", 7)
    moved = dataclasses.replace(DONE, current="bbb", update="bbb")
    assert status_of(moved, held("w-0", "ready", "bbb"), previous=first).resolved_revision is None


# --- facts ------------------------------------------------------------------------------------------------------------


def worker(worker_id: str, models: dict[str, str], known: tuple[str, ...] = (), **fields: Any) -> ClusterWorker:
    record = WorkerRecord(
        worker_id, "x:1", "e", {name: ResidentRecord(state, 1) for name, state in models.items()}, pool="p", **fields
    )
    observed = {name: ObservedModel(state, 1) for name, state in models.items()}
    return ClusterWorker(record, observed | {name: ObservedModel(EVICTED, 1) for name in known})


def test_facts_are_of_the_revisions_that_serve_and_are_wanted_alone() -> None:
    workers = {
        "w-1": worker("w-1", {"m@aaa": "ready", "m@old": "ready", "n@aaa": "ready"}),
        "w-0": worker("w-0", {"m@bbb": "loading"}),
        "w-2": worker("w-2", {}, ("m@bbb",)),
        "w-3": worker("w-3", {"m@aaa": "ready"}, ("m@bbb",), draining=True),
    }
    late, early = Eviction("w-9", "Idle", None, 5.0), Eviction("w-9", "Pressure", "n", 4.0)
    facts = model_facts(ROLLING, workers, {"m@bbb": "refused"}, {"m@aaa": early, "m@bbb": late, "m@old": late})
    assert [(each.worker_id, each.digest, each.takes_requests) for each in facts.copies] == [
        ("w-0", "bbb", False),
        ("w-1", "aaa", True),
        ("w-3", "aaa", False),
    ]
    assert (facts.num_known, facts.failed, facts.eviction) == (1, "refused", late)


@pytest.mark.parametrize(
    ("old", "new", "reason", "told"),
    [
        ("ready", "draining", "evicted for 'n@bbb': 5 MB are missing", ("Pressure", "n")),
        ("active", "host", 'evicted for "n": 5 MB are missing', ("Pressure", "n")),
        ("ready", "draining", "9 MB of 10 MB were in use, above the high watermark; idle for 3 s", ("Pressure", None)),
        ("ready", "draining", "no request came for 600 s, its idle limit", ("Idle", None)),
        ("ready", "cold", "generation 4 released it", ("Requested", None)),
        ("draining", "host", "evicted for 'n': 5 MB are missing", None),
        ("ready", "active", "a request came", None),
        ("ready", "draining", "it was stopped", None),
    ],
)
def test_evictions_are_read_from_events(old: str, new: str, reason: str, told: tuple[str, str | None] | None) -> None:
    found = read_eviction("w-0", old, new, reason, 7.5)
    assert found == (None if told is None else Eviction("w-0", told[0], told[1], 7.5))  # type: ignore[arg-type]


def test_the_last_eviction_is_told_and_an_older_one_does_not_come_back() -> None:
    status = status_of(DONE, READY, eviction=Eviction("w-0", "Pressure", "n", NOW_S + 0.5))
    assert status.last_eviction is not None
    assert (status.last_eviction.worker, status.last_eviction.reason, status.last_eviction.by) == (
        "w-0",
        "Pressure",
        "n",
    )
    older = status_of(DONE, READY, previous=status, eviction=Eviction("w-1", "Idle", None, NOW_S - 50))
    assert older.last_eviction == status.last_eviction == status_of(DONE, READY, previous=status).last_eviction


# --- what is new ------------------------------------------------------------------------------------------------------

LOADING = held("w-0", "loading", bytes_done=10, bytes_total=100, eta_s=9.0)


@pytest.mark.parametrize(
    ("before", "after", "is_it"),
    [
        ((FIRST, LOADING), (FIRST, LOADING), False),
        ((FIRST, LOADING), (FIRST, held("w-0", "loading", bytes_done=20, bytes_total=100, eta_s=8.0)), True),
        ((DONE, READY), (DONE, held("w-0", "ready", num_in_flight=3, kv_bytes=9, last_used_s=NOW_S)), True),
        ((FIRST, LOADING), (DONE, READY), False),
        ((DONE, READY), (DONE, held("w-1", "ready")), False),
        ((FIRST, LOADING), (FIRST, held("w-1", "loading", bytes_done=10, bytes_total=100)), False),
    ],
    ids=["nothing", "bytes", "use", "ready", "another worker", "a load elsewhere"],
)
def test_progress_alone_can_wait(
    before: tuple[Verdict, CopyFact], after: tuple[Verdict, CopyFact], is_it: bool
) -> None:
    first = status_of(*before)
    assert is_progress_only(first, status_of(*after, previous=first)) is is_it


def events(before: ModelDeploymentStatus, after: ModelDeploymentStatus) -> list[tuple[str, bool]]:
    found = model_events(KEY, before, after)
    assert all((each.kind, each.key) == ("ModelDeployment", KEY) and each.message for each in found)
    return [(each.reason, each.is_warning) for each in found]


def test_a_models_way_told_as_events() -> None:
    placed = status_of(FIRST)
    assert events(NOTHING, placed) == [("Accepted", False)]
    failed = status_of(FIRST, held("w-0", "failed", error="no file"), previous=placed)
    assert events(placed, failed) == [("LoadFailed", True)]
    serving = status_of(DONE, READY, previous=failed)
    assert events(failed, serving) == [("Loaded", False)]
    rolling = status_of(ROLLING, READY, previous=serving)
    assert events(serving, rolling) == [("RolloutStarted", False)]
    stopped = status_of(STOPPED, READY, held("w-1", "failed", "bbb", error="no file"), previous=rolling)
    assert events(rolling, stopped) == [("RolloutFailed", True), ("LoadFailed", True)]
    assert events(stopped, stopped) == []
    moved = dataclasses.replace(DONE, current="bbb", update="bbb")
    done = status_of(moved, held("w-1", "ready", "bbb"), previous=stopped)
    assert events(stopped, done) == [("RolloutComplete", False), ("Loaded", False)]
    evicted = status_of(moved, previous=done, num_known=1, eviction=Eviction("w-1", "Pressure", "n", NOW_S))
    assert events(done, evicted) == [("Evicted", False)]
    refused = status_of(dataclasses.replace(REFUSED, current="bbb"), previous=evicted)
    assert events(evicted, refused) == [("NoPool", True)]
    assert events(refused, refused) == []


def test_a_rollout_that_is_called_off_tells_nothing_of_completion() -> None:
    rolling = status_of(ROLLING, READY)
    assert events(rolling, status_of(DONE, READY, previous=rolling)) == [("Loaded", False)]


def test_a_whole_way_through_plan_and_status_comes_to_rest() -> None:
    world = World(raw_pool("p"), p_0="p")
    world.apply(raw_model("m"))
    seen: list[str] = []
    for _ in range(5):
        before = world.statuses.get(KEY, NOTHING)
        world.turn()
        seen += [each.reason for each in model_events(KEY, before, world.statuses[KEY])]
        world.advance()
    assert seen == ["Accepted", "Loaded"]
    assert world.statuses[KEY].phase == "Ready"
