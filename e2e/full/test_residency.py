"""Many models in one worker pod: what must leave leaves, and the objects say so."""

from __future__ import annotations

import pytest
from installation import Installation, condition, model, pool

pytestmark = pytest.mark.timeout(600)
MODELS = ("first", "second", "third")


def test_a_third_model_evicts_the_least_recently_used(naru: Installation) -> None:
    """Equal weights are there once; a model's own is its KV cache. Two fit below the watermarks, three do not."""
    naru.apply(
        pool("small", memory={"budget": "528Mi", "host": "0"})
        | {"metadata": {"name": "small", "labels": {"size": "small"}}}
    )
    selector = {"poolSelector": {"matchLabels": {"size": "small"}}}
    on_demand = {"policy": "OnDemand", "minResidency": "1s", "idleTTL": "1h"}
    kv = {"kvCache": {"min": "100Mi", "max": "100Mi"}}
    for name in MODELS:
        naru.apply(model(name, placement=selector, residency=on_demand, resources=kv, replicas={"min": 0}))
    naru.cluster.wait_for(
        lambda: all(condition(naru.get("md", name), "Accepted").get("status") == "True" for name in MODELS),
        60,
        "accepted",
    )
    naru.cluster.wait_for(lambda: naru.get("wp", "small")["status"]["workers"]["ready"] == 1, 120, "a small worker")

    for name in MODELS[:2]:
        assert "Paris" in naru.ask(name)
        naru.wait_model(name)
    (worker,) = naru.workers("small")
    for name in MODELS[:2]:
        (resident,) = naru.get("md", name)["status"]["residents"]
        assert resident["worker"] == worker["metadata"]["name"]

    assert "Paris" in naru.ask("second")
    assert "Paris" in naru.ask("third")
    naru.wait_model("third")
    gone = naru.wait_model("first", phase="Unloaded")
    eviction = gone["status"]["lastEviction"]
    assert eviction["worker"] == worker["metadata"]["name"]
    assert eviction["reason"] == "Pressure"
    naru.wait_model("second")
    # Evicted is not lost: the next request brings it back, and another one goes.
    assert "Paris" in naru.ask("first")
    naru.wait_model("first")
    naru.kubectl("delete", "md", *MODELS)
    naru.kubectl("delete", "wp", "small")
