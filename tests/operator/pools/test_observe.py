"""What is read out of a pod's JSON, whatever shape that has."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pool_world import READY_STATUS, SETTINGS, START_S, make_pool, raw_pool, timestamp

from naru_operator.core.kube import Object, ObjectKey
from naru_operator.core.pools.model import ObservedPod
from naru_operator.core.pools.observe import observe_pod
from naru_operator.core.pools.pod_manifest import template_hash, worker_pod
from naru_proto import names


def pod(status: Object | None = None, **metadata: Any) -> Object:
    raw = worker_pod(make_pool(), raw_pool(), 2, SETTINGS)
    raw["metadata"] |= {"uid": "u1", "creationTimestamp": timestamp(START_S), **metadata}
    raw["status"] = copy.deepcopy(READY_STATUS) if status is None else status
    return raw


def waiting(reason: str, message: str = "", last: Object | None = None, **state: Any) -> Object:
    container = {"name": "worker", "ready": False, "restartCount": 3, "image": "naru/worker:1", **state}
    container.setdefault("state", {"waiting": {"reason": reason, "message": message}})
    if last is not None:
        container["lastState"] = {"terminated": last}
    return {"phase": "Running", "conditions": [{"type": "Ready", "status": "False"}], "containerStatuses": [container]}


def test_a_ready_pod_of_ours_is_read_back_as_it_was_made() -> None:
    raw = pod()
    raw["spec"]["nodeName"] = "n1"
    assert observe_pod(raw) == ObservedPod(
        key=ObjectKey("ns", "p-2"),
        uid="u1",
        pool="p",
        slot=2,
        template_hash=template_hash(make_pool(), SETTINGS),
        node="n1",
        owner_uid="pool-uid",
        is_ready=True,
        is_terminating=False,
        is_finished=False,
        created_s=START_S,
    )


def test_the_pools_full_name_comes_from_the_annotation_when_it_fits_the_label() -> None:
    name = "a" * 80
    raw = worker_pod(make_pool(name), raw_pool(name), 0, SETTINGS)
    assert observe_pod(raw).pool == name
    raw["metadata"]["annotations"][names.ANNOTATION_POOL_NAME] = "b" * 80
    assert observe_pod(raw).pool == raw["metadata"]["labels"][names.LABEL_POOL]


@pytest.mark.parametrize(
    ("slot", "seen"), [("0", 0), ("17", 17), ("", None), ("-1", None), ("x", None), ("1e3", None), ("٣", None)]
)
def test_a_slot_that_is_no_number_is_none(slot: str, seen: int | None) -> None:
    raw = pod()
    raw["metadata"]["labels"][names.LABEL_SLOT] = slot
    assert observe_pod(raw).slot == seen


def test_terminating_and_finished_pods_are_told() -> None:
    assert observe_pod(pod(deletionTimestamp=timestamp(START_S))).is_terminating
    assert observe_pod(pod({"phase": "Succeeded"})).is_finished
    evicted = observe_pod(
        pod({"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."})
    )
    assert (evicted.is_finished, evicted.trouble_reason) == (True, "Evicted")
    assert evicted.trouble == "The node was low on resource: memory."


def test_only_the_controlling_owner_counts() -> None:
    raw = pod()
    raw["metadata"]["ownerReferences"].insert(0, {"kind": "Other", "uid": "no", "controller": False})
    assert observe_pod(raw).owner_uid == "pool-uid"
    raw["metadata"]["ownerReferences"].pop()
    assert observe_pod(raw).owner_uid is None


def test_the_schedulers_own_words_are_kept() -> None:
    said = "0/3 nodes are available: 1 node(s) had untolerated taint(s), 2 Insufficient nvidia.com/gpu."
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": said}
    seen = observe_pod(pod({"phase": "Pending", "conditions": [condition]}))
    assert (seen.trouble_reason, seen.trouble, seen.node) == ("Unschedulable", said, None)


@pytest.mark.parametrize(
    ("status", "reason", "said"),
    [
        (waiting("ImagePullBackOff", 'Back-off pulling image "x": ErrImagePull: not found'), "ImagePullBackOff",
         "not found"),
        (waiting("ErrImagePull", "not found"), "ImagePullBackOff", "not found"),
        (waiting("ImagePullBackOff", 'Back-off pulling image "x"'), "ImagePullBackOff", "'naru/worker:1'"),
        (waiting("InvalidImageName", "couldn't parse"), "InvalidImageName", "couldn't parse"),
        (waiting("CreateContainerConfigError", 'secret "r" not found'), "CreateContainerConfigError", 'secret "r"'),
        (waiting("ContainerCreating"), "ContainerCreating", "volumes"),
        (waiting("PodInitializing"), "", ""),
        (waiting("CrashLoopBackOff", "back-off 40s restarting", {"exitCode": 137, "reason": "OOMKilled"}), "OOMKilled",
         "memory"),
        (waiting("CrashLoopBackOff", "back-off 40s restarting",
                 {"exitCode": 2, "reason": "Error", "message": "listen\nis bad"}), "CrashLoopBackOff",
         "the container ended with exit code 2: listen is bad"),
        (waiting("CrashLoopBackOff", "back-off 40s restarting"), "CrashLoopBackOff", "again and again"),
        (waiting("", state={"terminated": {"exitCode": 1, "reason": "Error"}}), "CrashLoopBackOff", "exit code 1"),
        (waiting("", state={"running": {}}, last={"exitCode": 139, "reason": "Error"}), "CrashLoopBackOff",
         "exit code 139"),
        (waiting("", state={"running": {}}), "", ""),
        ({"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "no GPU"}, "UnexpectedAdmissionError",
         "no GPU"),
    ],
)  # fmt: skip
def test_each_trouble_has_its_word_and_its_sentence(status: Object, reason: str, said: str) -> None:
    seen = observe_pod(pod(status))
    assert seen.trouble_reason == reason
    assert said in seen.trouble
    assert "40s" not in seen.trouble, "a pause that counts up would be news each time"


def test_a_ready_pod_has_no_trouble_left_from_before() -> None:
    status = copy.deepcopy(READY_STATUS)
    status["containerStatuses"][0] |= {"restartCount": 4, "lastState": {"terminated": {"exitCode": 137}}}
    seen = observe_pod(pod(status))
    assert (seen.trouble_reason, seen.num_restarts) == ("", 4)


def test_a_helper_container_in_trouble_is_told_where_the_worker_has_none() -> None:
    status = waiting("", state={"running": {}})
    broken = {"name": "proxy", "ready": False, "state": {"waiting": {"reason": "ErrImagePull", "message": "gone"}}}
    status["containerStatuses"].insert(0, broken)
    assert observe_pod(pod(status)).trouble == "gone"


def test_long_messages_are_cut_and_made_one_line() -> None:
    status = waiting("CreateContainerError", "a\n\x00b" + "c" * 5000)
    seen = observe_pod(pod(status))
    assert seen.trouble.startswith("a bccc")
    assert len(seen.trouble) == 1000
    log = waiting("CrashLoopBackOff", "", {"exitCode": 1, "message": "x" * 5000 + "the end"})
    assert observe_pod(pod(log)).trouble.endswith("the end")


_ODDITIES: tuple[Any, ...] = (
    None,
    True,
    -1,
    10**400,
    1.5,
    "",
    "x",
    "\x00",
    [],
    [None],
    ["x"],
    {},
    {"": []},
    [{"type": []}],
)


def _paths(item: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = item.items() if isinstance(item, dict) else enumerate(item) if isinstance(item, list) else ()
    return [path, *(found for key, value in inner for found in _paths(value, (*path, key)))]


_WHOLE = pod(waiting("CrashLoopBackOff", "m", {"exitCode": 1, "reason": "Error", "message": "m"}))
_WHOLE["status"] |= {"reason": "Evicted", "message": "m"}
_PLACES = [path for path in _paths(_WHOLE) if path and path[0] in ("metadata", "status", "spec")]


@given(
    places=st.lists(st.tuples(st.sampled_from(_PLACES), st.sampled_from(_ODDITIES)), min_size=1, max_size=3),
    phase=st.text(max_size=3),
)
def test_no_shape_of_json_breaks_the_reading(places: list[tuple[tuple[Any, ...], Any]], phase: str) -> None:
    raw: Any = copy.deepcopy(_WHOLE)
    raw["status"]["phase"] = phase or "Failed"
    for path, value in places:
        item = raw
        for key in path[:-1]:
            item = item.get(key) if isinstance(item, dict) else item[0] if isinstance(item, list) and item else None
        if isinstance(item, dict):
            item[path[-1]] = value
    seen = observe_pod(raw)
    assert isinstance(seen.key.name, str)
    assert len(seen.trouble) <= 1000


@pytest.mark.parametrize("value", [None, 7, "yesterday", "2025-01-01", "9999999-01-01T00:00:00Z", []])
def test_a_time_that_is_none_counts_as_long_ago(value: object) -> None:
    assert observe_pod(pod(creationTimestamp=value)).created_s == 0.0
