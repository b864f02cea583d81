"""Who is accepted: names have one owner over all namespaces, and a pool must be able to load the model."""

from __future__ import annotations

from typing import Any

import pytest
from model_world import START_S, World, raw_model, raw_pool

from naru_operator.core.kube import Object, ObjectKey
from naru_operator.core.models.claims import Claim, judge, pool_owners
from naru_proto.crd.v1alpha1 import ModelDeployment, WorkerPool
from naru_proto.registry import ModelRecord


def pool(name: str = "p", labels: dict[str, str] | None = None, **spec: Any) -> WorkerPool:
    return WorkerPool.model_validate(raw_pool(name, labels, **spec))


def claims(*models: Object, pools: tuple[WorkerPool, ...] = (pool(),)) -> dict[str, Claim]:
    """By namespace/name."""
    found = judge([ModelDeployment.model_validate(raw) for raw in models], {}, {}, pool_owners(pools)[0], {})
    return {str(key): claim for key, claim in found.items()}


def accepted(raw: Object, *, generation: int = 1) -> Object:
    """As an object looks whose spec of that generation was accepted."""
    told = {"type": "Accepted", "status": "True", "reason": "Accepted", "lastTransitionTime": "2025-01-01T00:00:00Z"}
    return {**raw, "status": {"observedGeneration": generation, "conditions": [told]}}


CASES: list[tuple[str, dict[str, Any], tuple[WorkerPool, ...], str, str]] = [
    ("no pool at all", {}, (), "NoPool", "there is no WorkerPool; apply one"),
    (
        "no pool with the labels",
        {"placement": {"poolSelector": {"matchLabels": {"tier": "gpu", "zone": "b"}}}},
        (pool("p", {"tier": "cpu"}), pool("q")),
        "NoPool",
        "no WorkerPool has the labels tier=gpu, zone=b of spec.placement.poolSelector (p has tier=cpu; q has none)",
    ),
    (
        "adapters",
        {"adapters": [{"name": "l", "uri": "hf://o/l"}]},
        (pool(),),
        "UnsupportedField",
        "spec.adapters: workers load no adapters yet; leave them out",
    ),
    (
        "more accelerators than any worker has",
        {"resources": {"tensorParallel": 4}},
        (pool("p", accelerator={"kind": "cuda", "count": 2}), pool("q")),
        "TooFewAccelerators",
        "spec.resources.tensorParallel is 4, and no worker of the pools 'p', 'q' has so many accelerators",
    ),
    (
        "several accelerators of workers on the CPU",
        {"resources": {"tensorParallel": 2}},
        (pool("p"),),
        "TooFewAccelerators",
        "raise accelerator.count of one of kind cuda or lower tensorParallel (workers of kind cpu cut no model)",
    ),
    (
        "a secret that no pool mounts",
        {"model": {"uri": "hf://o/m", "credentialsSecret": "token"}},
        (pool("p", credentialSecrets=["other"]), pool("q")),
        "CredentialsNotMounted",
        "none of the pools 'p', 'q' has the Secret 'token' among its credentialSecrets; add it to one of them",
    ),
    (
        "a claim that no pool mounts",
        {"model": {"uri": "pvc://weights/llama"}},
        (pool("p", claims=["other"]),),
        "ClaimNotMounted",
        "none of the pools 'p' has the PersistentVolumeClaim 'weights' among its claims",
    ),
    (
        "a folder that no pool mounts",
        {"model": {"uri": "file:///data/models2/llama"}},
        (pool("p", nodeFolders=["/data/models"]),),
        "FolderNotMounted",
        "none of the pools 'p' has a folder among its nodeFolders that holds the path of spec.model.uri",
    ),
]


@pytest.mark.parametrize(
    ("spec", "pools", "reason", "message"), [each[1:] for each in CASES], ids=[each[0] for each in CASES]
)
def test_what_cannot_be_served_is_refused_with_its_remedy(
    spec: dict[str, Any], pools: tuple[WorkerPool, ...], reason: str, message: str
) -> None:
    (found,) = claims(raw_model("m", **spec), pools=pools).values()
    assert (found.is_accepted, found.reason, found.owns_name) == (False, reason, True)
    assert message in found.message


@pytest.mark.parametrize(
    ("spec", "pools", "eligible"),
    [
        ({}, (pool("p"), pool("q")), ("p", "q")),
        (
            {"placement": {"poolSelector": {"matchLabels": {"a": "1"}}}},
            (pool("p", {"a": "1", "b": "2"}), pool("q")),
            ("p",),
        ),
        (
            {"model": {"uri": "hf://o/m", "credentialsSecret": "t"}},
            (pool("p"), pool("q", credentialSecrets=["s", "t"])),
            ("q",),
        ),
        (
            {"resources": {"tensorParallel": 2}},
            (pool("p"), pool("q", accelerator={"kind": "cuda", "count": 4}), pool("r", accelerator={"kind": "cuda"})),
            ("q",),
        ),
        ({"model": {"uri": "pvc://w/llama"}}, (pool("p"), pool("q", claims=["w"])), ("q",)),
        ({"model": {"uri": "file:///data/models/a"}}, (pool("p", nodeFolders=["/data/models/"]), pool("q")), ("p",)),
        ({"model": {"uri": "file:///data//models/a"}}, (pool("p", nodeFolders=["/data/models"]), pool("q")), ("p",)),
    ],
    ids=["any", "labels", "secret", "accelerators", "claim", "folder", "folder with an empty part"],
)  # fmt: skip
def test_only_pools_that_can_load_it_may_hold_it(
    spec: dict[str, Any], pools: tuple[WorkerPool, ...], eligible: tuple[str, ...]
) -> None:
    (found,) = claims(raw_model("m", **spec), pools=pools).values()
    assert (found.is_accepted, found.pools) == (True, eligible)


@pytest.mark.parametrize(
    ("models", "winners"),
    [
        ([raw_model("m", "x", 5), raw_model("m", "y", 4)], {"y/m"}),
        ([raw_model("m", "x", 5), raw_model("m", "y", 5)], {"x/m"}),
        ([raw_model("m", "x", 5, alias="n"), raw_model("n", "y", 6)], {"x/m"}),
        ([raw_model("m", "x", 7, alias="n"), raw_model("n", "y", 6)], {"y/n"}),
        # Who loses its own name takes no other one.
        (
            [raw_model("m", "x", 1), raw_model("m", "y", 2, alias="z"), raw_model("c", "y", 3, alias="z")],
            {"x/m", "y/c"},
        ),
        # An edit of an older object takes no name from one that is served…
        ([raw_model("m", "x", 1, alias="n"), accepted(raw_model("n", "y", 9))], {"y/n"}),
        ([accepted(raw_model("m", "x", 1, alias="n"), generation=0), accepted(raw_model("n", "y", 9), generation=0)],
         {"y/n"}),
        # …and no newcomer takes an alias that is served.
        ([accepted(raw_model("m", "x", 9, alias="n")), raw_model("n", "y", 1)], {"x/m"}),
    ],
    ids=[
        "the older one",
        "by key",
        "an older alias",
        "an older name",
        "a loser's alias",
        "an edited alias",
        "an edited alias, both edited",
        "a served alias",
    ],
)  # fmt: skip
def test_a_name_has_one_owner_over_all_namespaces(models: list[Object], winners: set[str]) -> None:
    for order in (models, models[::-1]):
        found = claims(*order)
        assert {key for key, claim in found.items() if claim.is_accepted} == winners
        losers = {claim.reason for claim in found.values() if not claim.is_accepted}
        assert losers <= {"NameConflict"}


def test_a_name_conflict_names_the_field_and_the_owner() -> None:
    found = claims(raw_model("m", "x", 5), raw_model("m", "y", 6), raw_model("n", "x", 7, alias="m"))
    assert "metadata.name 'm' is already a name of ModelDeployment x/m" in found["y/m"].message
    assert "spec.alias 'm' is already a name of ModelDeployment x/m" in found["x/n"].message
    assert (found["y/m"].owns_name, found["x/n"].owns_name) == (False, True)


def test_the_loser_of_a_name_touches_nothing_of_the_winners() -> None:
    world = World(p_0="p")
    world.apply(raw_model("m", "x", 5))
    world.settle()
    before = dict(world.records)
    world.apply(raw_model("m", "y", 6, model={"uri": "pypi://other"}))
    plan = world.turn()
    assert plan.is_empty and world.records == before
    assert plan.verdicts[ObjectKey("y", "m")].reason == "NameConflict"
    world.delete(ObjectKey("x", "m"))
    world.settle()
    assert world.plan().verdicts[ObjectKey("y", "m")].is_accepted
    assert world.records[world.target("m")].uri == "pypi://other"


def test_an_object_that_cannot_be_read_keeps_its_name() -> None:
    raw = raw_model("m", "x", 1)
    key = ObjectKey("x", "m")
    younger = ModelDeployment.model_validate(raw_model("m", "y", 2))
    found = judge([younger], {key: "spec.model.uri: bad"}, {key: raw}, {"p": pool()}, {})
    assert (found[key].reason, found[key].owns_name) == ("InvalidSpec", True)
    assert found[ObjectKey("y", "m")].reason == "NameConflict"
    # Not even its metadata can be read.
    found = judge(
        [younger], {key: "bad"}, {key: {"metadata": {"creationTimestamp": 7}, "status": []}}, {"p": pool()}, {}
    )
    assert found[ObjectKey("y", "m")].is_accepted


def test_every_field_about_requests_and_copies_is_acted_on() -> None:
    (found,) = claims(
        raw_model(
            "m",
            tenancy={"allow": ["t"], "cacheIsolation": "Shared"},
            replicas={"min": 1, "max": 2},
            scaling={"targetInFlight": 2},
            routing={"strategy": "RoundRobin", "split": [{"model": "m", "weight": 1}], "fallbacks": ["n"]},
        )
    ).values()
    assert (found.is_accepted, found.message) == (True, "its names are its own and pools can load it")


def test_an_alias_that_another_one_has_is_waited_for() -> None:
    models = [raw_model("a", "x", 5, alias="z"), raw_model("b", "y", 6, alias="z")]
    for order in (models, models[::-1]):
        first, second = claims(*order).values()
        assert (first.is_accepted, first.reason, first.owns_alias) == (True, "Accepted", True)
        assert (second.is_accepted, second.reason, second.owns_alias) == (True, "AliasWaits", False)
        assert "the alias 'z' is ModelDeployment x/a's; take it out there" in second.message


@pytest.mark.parametrize("is_told", [False, True], ids=["by its registry entry", "by its status"])
def test_who_answers_to_an_alias_keeps_it_when_something_else_of_it_is_edited(is_told: bool) -> None:
    younger, older = raw_model("new", "x", 9, alias="z"), raw_model("old", "y", 1, alias="z")
    if is_told:
        waiting = accepted(older)
        waiting["status"]["conditions"][0]["reason"] = "AliasWaits"
        found = claims(accepted(younger), waiting)
    else:
        deployments = [ModelDeployment.model_validate(raw) for raw in (accepted(younger, generation=0), older)]
        records = {"new": ModelRecord("new", "pypi://new", 1, aliases=("z",), target="new@a")}
        found = {str(key): each for key, each in judge(deployments, {}, {}, {"p": pool()}, records).items()}
    assert [(key, claim.owns_alias) for key, claim in found.items()] == [("x/new", True), ("y/old", False)]


def test_pool_names_belong_to_the_oldest_and_deleted_ones_to_nobody() -> None:
    def placed(namespace: str, created_s: int, **metadata: Any) -> WorkerPool:
        raw = raw_pool("p", created_s=created_s)
        return WorkerPool.model_validate({**raw, "metadata": {**raw["metadata"], "namespace": namespace, **metadata}})

    old, new = placed("x", START_S), placed("w", START_S + 1)
    owners, conflicts = pool_owners([new, old])
    assert owners == {"p": old}
    assert list(conflicts) == [ObjectKey("w", "p")]
    assert "belongs to the WorkerPool in namespace 'x'" in conflicts[ObjectKey("w", "p")]
    going = placed("x", START_S, deletionTimestamp="2025-01-01T00:00:00Z")
    assert pool_owners([new, going]) == ({"p": new}, {})
