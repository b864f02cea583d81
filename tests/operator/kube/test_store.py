"""The store: sights of objects in any order lead to the cluster's state."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from naru_operator.adapters.kube.client import Listing
from naru_operator.adapters.kube.kinds import CONTROLLER_REVISION, POD
from naru_operator.adapters.kube.store import ObjectStore
from naru_operator.core.kube import Object, ObjectKey


def pod(name: str, version: int, namespace: str = "a", **fields: object) -> Object:
    return {
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "resourceVersion": str(version)},
        **fields,
    }


def key(name: str, namespace: str = "a") -> ObjectKey:
    return ObjectKey(namespace, name)


def store_of(*namespaces: str, clock: list[float] | None = None) -> ObjectStore:
    times = clock or [0.0]
    return ObjectStore(namespaces or None, (POD, CONTROLLER_REVISION), lambda: times[0])


def versions(store: ObjectStore) -> dict[str, int]:
    return {each.name: int(obj["metadata"]["resourceVersion"]) for each, obj in store.objects("Pod").items()}


def test_it_is_synced_once_every_kind_was_listed_in_every_namespace() -> None:
    store = store_of("a", "b")
    nothing = Listing((), "1")
    for kind, namespace in (("Pod", "a"), ("Pod", "b"), ("ControllerRevision", "a")):
        store.replace(kind, namespace, nothing)
        assert not store.is_synced
    store.replace("ControllerRevision", "b", nothing)
    assert store.is_synced


def test_events_alone_never_make_it_synced() -> None:
    store = store_of()
    store.take("Pod", pod("x", 1))
    assert not store.is_synced


def test_an_empty_first_list_wakes_whoever_waits_for_it() -> None:
    store = store_of()
    store.replace("Pod", None, Listing((), "1"))
    assert store.changed.is_set()
    store.changed.clear()
    store.replace("Pod", None, Listing((), "2"))
    assert not store.changed.is_set()


def test_an_older_sight_changes_nothing() -> None:
    store = store_of()
    assert store.take("Pod", pod("x", 5))
    store.changed.clear()
    assert not store.take("Pod", pod("x", 4))
    assert not store.take("Pod", pod("x", 5))
    assert versions(store) == {"x": 5} and not store.changed.is_set()


def test_versions_are_compared_as_numbers() -> None:
    store = store_of()
    store.take("Pod", pod("x", 9))
    store.take("Pod", pod("x", 10))
    assert versions(store) == {"x": 10}


def test_a_deleted_object_is_not_brought_back_by_a_list_begun_before() -> None:
    store = store_of()
    store.take("Pod", pod("x", 5))
    store.take("Pod", pod("x", 7), is_deleted=True)
    store.replace("Pod", None, Listing((pod("x", 5),), "6"))
    assert versions(store) == {}


def test_what_a_newer_list_did_not_have_is_not_brought_back_by_an_older_sight() -> None:
    store = store_of()
    store.replace("Pod", None, Listing((), "8"))
    assert not store.take("Pod", pod("x", 5))
    assert store.take("Pod", pod("x", 9))
    store.replace("Pod", None, Listing((pod("y", 4),), "7"))
    assert versions(store) == {"x": 9}


def test_the_end_of_an_earlier_object_does_not_end_its_successor() -> None:
    store = store_of()
    store.take("Pod", pod("x", 8))
    store.take("Pod", pod("x", 7), is_deleted=True)
    assert versions(store) == {"x": 8}


def test_a_list_removes_what_a_watch_missed_but_not_what_came_after_it() -> None:
    store = store_of()
    store.take("Pod", pod("missed", 5))
    store.take("Pod", pod("newer", 9))
    assert store.replace("Pod", None, Listing((pod("there", 6),), "8")) == 2
    assert versions(store) == {"newer": 9, "there": 6}


def test_a_list_of_one_namespace_leaves_the_others_alone() -> None:
    store = store_of("a", "b")
    store.take("Pod", pod("x", 5, "b"))
    store.replace("Pod", "a", Listing((), "8"))
    assert list(store.objects("Pod")) == [key("x", "b")]


def test_managed_fields_are_dropped_and_the_given_object_stays_as_it_was() -> None:
    store = store_of()
    given = pod("x", 1)
    given["metadata"]["managedFields"] = [{"manager": "kubectl"}]
    store.take("Pod", given)
    assert "managedFields" not in store.objects("Pod")[key("x")]["metadata"]
    assert "managedFields" in given["metadata"]


def test_objects_without_a_name_are_passed_over() -> None:
    store = store_of()
    broken: Object
    for broken in ({}, {"metadata": None}, {"metadata": {}}, {"metadata": {"name": 3}}):
        assert not store.take("Pod", broken)
    assert store.replace("Pod", None, Listing(({"metadata": {}}, pod("x", 1)), "3")) == 1


def test_the_silence_counts_from_the_last_event_or_list() -> None:
    clock = [100.0]
    store = store_of(clock=clock)
    clock[0] = 130.0
    assert store.silent_s("Pod") == 30
    store.take("Pod", pod("x", 1))
    clock[0] = 140.0
    store.replace("ControllerRevision", None, Listing((), "1"))
    assert (store.silent_s("Pod"), store.silent_s("ControllerRevision")) == (10, 0)


@dataclass
class Cluster:
    """A tiny API server: a history of objects, from which sights and lists are taken."""

    version: int = 1
    objects: dict[str, Object] = field(default_factory=dict)
    sights: list[tuple[Object, bool]] = field(default_factory=list)

    def write(self, name: str) -> None:
        self.version += 1
        self.objects[name] = pod(name, self.version)
        self.sights.append((self.objects[name], False))

    def delete(self, name: str) -> None:
        if name in self.objects:
            self.version += 1
            del self.objects[name]
            self.sights.append((pod(name, self.version), True))

    def listing(self) -> Listing:
        return Listing(tuple(self.objects.values()), str(self.version))


STEPS = st.lists(st.tuples(st.sampled_from("wwdl"), st.sampled_from("xyz")), max_size=25)


@given(STEPS, st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_any_order_of_all_sights_and_lists_leads_to_the_truth(steps: list[tuple[str, str]], random: object) -> None:
    cluster, store, lists = Cluster(), store_of(), []
    for step, name in steps:
        if step == "w":
            cluster.write(name)
        elif step == "d":
            cluster.delete(name)
        else:
            lists.append(cluster.listing())
    inputs: list[tuple[Object, bool]] = list(cluster.sights)
    random.shuffle(inputs)  # type: ignore[attr-defined]
    for number, (obj, is_deleted) in enumerate(inputs):
        store.take("Pod", obj, is_deleted=is_deleted)
        if lists and number % 3 == 0:
            store.replace("Pod", None, lists.pop(0))
    for listing in lists:
        store.replace("Pod", None, listing)
    store.replace("Pod", None, cluster.listing())
    assert versions(store) == {name: int(obj["metadata"]["resourceVersion"]) for name, obj in cluster.objects.items()}


@given(STEPS, st.data())
@settings(max_examples=150, deadline=None)
def test_a_list_heals_any_missed_sights(steps: list[tuple[str, str]], data: st.DataObject) -> None:
    cluster, store = Cluster(), store_of()
    for step, name in steps:
        if step == "d":
            cluster.delete(name)
        else:
            cluster.write(name)
    for obj, is_deleted in cluster.sights:
        if data.draw(st.booleans()):
            store.take("Pod", obj, is_deleted=is_deleted)
    store.replace("Pod", None, cluster.listing())
    assert versions(store) == {name: int(obj["metadata"]["resourceVersion"]) for name, obj in cluster.objects.items()}


def test_tombstones_do_not_pile_up() -> None:
    store = store_of()
    for number in range(100):
        store.take("Pod", pod(f"p{number}", 2 * number + 1))
        store.take("Pod", pod(f"p{number}", 2 * number + 2), is_deleted=True)
    store.replace("Pod", None, Listing((), "500"))
    assert not store._shelves["Pod"].deleted
