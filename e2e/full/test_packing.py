"""GPU workers on fake nodes of eight: packed, and the one that does not fit says what is short."""

from __future__ import annotations

from collections import Counter

import pytest
from installation import Installation, condition, pool

pytestmark = pytest.mark.timeout(300)


def test_gpu_workers_pack_and_a_shortage_is_named(naru: Installation) -> None:
    naru.cluster.add_fake_nodes(2, gpus=8, prefix="gpu", labels={"kind": "fake"})
    tolerations = [{"key": "naru-cluster/fake", "operator": "Exists"}]
    gpus = pool(
        "gpus",
        accelerator={"kind": "cuda", "count": 4},
        workers={"min": 2},
        template={"tolerations": tolerations, "nodeSelector": {"kind": "fake"}},
    )
    naru.apply(gpus)
    naru.cluster.wait_for(lambda: len(nodes(naru, "gpus")) == 2, 60, "two workers have a node")
    assert sorted(Counter(nodes(naru, "gpus")).values()) == [2], "both on one node, so that the other stays whole"

    naru.kubectl("scale", "wp", "gpus", "--replicas=5")
    naru.cluster.wait_for(lambda: len(nodes(naru, "gpus")) == 4, 60, "four workers have a node")

    def is_told() -> bool:
        conditions = (naru.get("wp", "gpus").get("status") or {}).get("conditions") or ()
        return any("Insufficient nvidia.com/gpu" in it.get("message", "") for it in conditions)

    naru.cluster.wait_for(is_told, 60, "the fifth is told to lack GPUs")
    code, explained = naru.naru("explain", "pool", "gpus", "-n", naru.namespace)
    assert code == 0
    assert "Insufficient nvidia.com/gpu" in explained
    assert condition(naru.get("wp", "gpus"), "Ready")["status"] == "False"
    naru.kubectl("delete", "wp", "gpus")
    naru.cluster.wait_for(lambda: not naru.workers("gpus"), 120, "the workers have left")


def nodes(naru: Installation, name: str) -> list[str]:
    """Nodes of a pool's workers that have one."""
    return [pod["spec"]["nodeName"] for pod in naru.workers(name) if "nodeName" in pod["spec"]]
