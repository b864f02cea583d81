"""Desired state of one machine from manifests."""

from __future__ import annotations

from typing import Any

import pytest

from naru_operator.core.desired import DesiredPool, DesiredState, EngineLimits, Residency, Tier, desired_state
from naru_proto.crd.v1alpha1 import ModelDeployment, WorkerPool
from naru_proto.errors import InvalidRequest

API = "serving.naru.dev/v1alpha1"


def model(name: str, *, namespace: str = "default", **spec: Any) -> ModelDeployment:
    body = {"model": {"uri": f"pypi://{name}"}, **spec}
    metadata = {"name": name, "namespace": namespace}
    return ModelDeployment.model_validate(
        {"apiVersion": API, "kind": "ModelDeployment", "metadata": metadata, "spec": body}
    )


def pool(name: str, labels: dict[str, str] | None = None, **spec: Any) -> WorkerPool:
    metadata = {"name": name, "labels": labels or {}}
    return WorkerPool.model_validate({"apiVersion": API, "kind": "WorkerPool", "metadata": metadata, "spec": spec})


def state(*manifests: ModelDeployment | WorkerPool, num_workers: int | None = None) -> DesiredState:
    return desired_state(manifests, num_cores=8, num_workers=num_workers)


def test_without_a_pool_there_is_one_of_one_worker() -> None:
    (only,) = state(model("a")).pools
    assert (only.name, only.num_workers, only.num_threads) == ("default", 1, None)
    assert state(model("a"), num_workers=3).pools[0].worker_ids() == ("default-0", "default-1", "default-2")


def test_a_model_keeps_what_its_manifest_says() -> None:
    (found,) = state(
        model(
            "a",
            model={"uri": "hf://o/n", "revision": "v1"},
            alias="other",
            replicas={"min": 2},
            engine={
                "maxModelLen": 512,
                "enablePrefixCaching": False,
                "speculation": "Never",
                "maxDraftTokens": 5,
                "kvCacheDtype": "int8",
            },
            resources={"kvCache": {"min": "64Mi", "max": "1Gi"}, "tensorParallel": 4},
            batching={"maxBatchSize": 8, "maxDelay": "5ms"},
        )
    ).models
    assert (found.uri, found.revision, found.aliases, found.min_replicas) == ("hf://o/n", "v1", ("other",), 2)
    assert found.limits == EngineLimits(
        max_model_len=512,
        kv_cache_bytes=1 << 30,
        kv_cache_min_bytes=64 << 20,
        enable_prefix_caching=False,
        kv_cache_dtype="int8",
        max_batch_size=8,
        max_batch_delay_s=0.005,
        speculation="off",
        max_draft_tokens=5,
        tensor_parallel_size=4,
    )


@pytest.mark.parametrize(
    ("residency", "replicas", "wanted"),
    [
        ({}, 1, Residency(min_residency_s=30.0, keep_last_copy=True)),
        ({"policy": "Preferred", "idleTTL": "99s"}, 0, Residency(min_residency_s=30.0)),
        (
            {"policy": "Pinned", "priority": 200, "minResidency": "5s"},
            2,
            Residency(pinned=True, priority=200, min_residency_s=5.0, keep_last_copy=True),
        ),
        ({"policy": "OnDemand"}, 1, Residency(Tier.COLD, min_residency_s=30.0, idle_ttl_s=600.0)),
        ({"policy": "OnDemand", "idleTTL": "0s", "minResidency": "0s"}, 1, Residency(Tier.COLD, idle_ttl_s=0.001)),
    ],
    ids=["default", "preferred", "pinned", "on demand", "on demand that leaves at once"],
)
def test_the_residency_policy_decides_tier_and_eviction(
    residency: dict[str, Any], replicas: int, wanted: Residency
) -> None:
    (found,) = state(model("a", residency=residency, replicas={"min": replicas})).models
    assert found.residency == wanted
    assert found.is_on_demand is (wanted.tier is Tier.COLD)


def test_models_and_pools_stand_in_name_order() -> None:
    found = state(model("b"), pool("y"), model("a"), pool("x"))
    assert [m.name for m in found.models] == ["a", "b"]
    assert [p.name for p in found.pools] == ["x", "y"]


def test_a_pool_keeps_workers_threads_memory_and_drain_time() -> None:
    found = state(
        model("a"),
        pool(
            "p",
            workers={"min": 2},
            threads=3,
            memory={"budget": "2Gi", "host": "1Gi", "highWatermark": 0.9, "lowWatermark": 0.5},
            drainTimeout="5s",
        ),
    ).pools
    assert found == (DesiredPool("p", 2, 3, 2 << 30, 5.0, 1 << 30, (0.5, 0.9)),)


def test_several_workers_share_the_cores() -> None:
    found = state(model("a"), pool("p", workers={"min": 2}), pool("q", threads=7)).pools
    assert [p.num_threads for p in found] == [2, 7]
    assert state(model("a"), num_workers=99).pools[0].num_threads == 1


def test_a_pool_of_no_worker_has_one_here() -> None:
    assert state(model("a"), pool("p", workers={"min": 0})).pools[0].num_workers == 1


def test_a_selector_picks_pools_by_labels() -> None:
    pools = [pool("x", {"tier": "a", "zone": "1"}), pool("y", {"tier": "a"}), pool("z")]
    picky = model("m", placement={"poolSelector": {"matchLabels": {"tier": "a"}}})
    assert state(picky, *pools).models[0].pools == ("x", "y")
    assert state(model("m"), *pools).models[0].pools == ("x", "y", "z")


@pytest.mark.parametrize(
    ("manifests", "message"),
    [
        ([pool("p")], "hold no ModelDeployment"),
        ([model("a"), model("a", namespace="other")], "ModelDeployment name 'a' stands in two namespaces"),
        ([model("a"), model("b", namespace="other", alias="a")], "ModelDeployment name 'a' stands in two namespaces"),
        ([model("a"), pool("p", accelerator={"kind": "cuda"})], "asks for 'cuda' workers"),
        ([model("a", placement={"poolSelector": {"matchLabels": {"x": "y"}}})], "no WorkerPool has the labels"),
    ],
)
def test_what_one_machine_cannot_do_is_a_sentence(manifests: list[Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        state(*manifests)
