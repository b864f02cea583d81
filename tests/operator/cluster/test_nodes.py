"""Labels of nodes: read where a model spreads by one, written for routers, done without where they cannot be read."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from cluster_rig import ClusterRig, model, pool

from naru_operator.adapters.kube.errors import Forbidden
from naru_operator.core.kube import Object
from naru_proto import names

ZONE = "topology.kubernetes.io/zone"
SPREAD: dict[str, Any] = {"placement": {"spreadTopologyKey": ZONE}, "replicas": {"min": 2, "max": 2}}


def node(name: str, zone: str) -> Object:
    labels = {ZONE: zone, "kubernetes.io/os": "linux"}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "namespace": "", "labels": labels}}


@pytest.fixture(autouse=True)
async def workers(rig: ClusterRig) -> None:
    """Three workers on three nodes of two zones."""
    rig.kube.put(pool(workers=3))
    await rig.converge()
    for index, zone in enumerate("xxy"):
        rig.kube.put(node(f"n{index}", zone))
        await rig.start_worker(f"default-{index}")
        rig.workers[f"default-{index}"].node = f"n{index}"
    await rig.converge()


def written(rig: ClusterRig) -> dict[str, dict[str, str]]:
    stored: Any = rig.board.hgetall(names.KEY_NODES)
    return {node.decode(): json.loads(text) for node, text in stored.items()}


def holders(rig: ClusterRig) -> set[str]:
    return {worker_id for worker_id, worker in rig.workers.items() if worker.models}


async def test_copies_spread_over_a_label_that_routers_are_told(rig: ClusterRig) -> None:
    rig.kube.put(model("one", **SPREAD))
    await rig.converge()
    assert written(rig) == {"n0": {ZONE: "x"}, "n1": {ZONE: "x"}, "n2": {ZONE: "y"}}
    assert "default-2" in holders(rig)
    assert len(holders(rig)) == 2
    asked = len(rig.kube.asked_for("get", "Node"))
    assert asked == 3
    rig.board.delete(names.KEY_NODES)
    await rig.turn(2)
    assert len(written(rig)) == 3
    assert len(rig.kube.asked_for("get", "Node")) == asked, "they are not read again soon"
    rig.kube.put(model("one", replicas={"min": 2, "max": 2}))
    await rig.converge()
    assert written(rig) == {}, "nobody spreads by a label any more"


async def test_no_node_is_read_while_copies_are_spread_by_node(rig: ClusterRig) -> None:
    rig.kube.put(model("one", replicas={"min": 2, "max": 2}))
    await rig.converge()
    assert rig.kube.asked_for("get", "Node") == []
    assert len(holders(rig)) == 2


async def test_without_the_right_on_nodes_copies_are_spread_by_node(
    rig: ClusterRig, caplog: pytest.LogCaptureFixture
) -> None:
    with rig.kube.refusing(Forbidden("nodes are forbidden"), "get", "Node"), caplog.at_level(logging.WARNING):
        rig.kube.put(model("one", **SPREAD))
        await rig.converge()
        await rig.turn(3)
    assert len(holders(rig)) == 2
    assert rig.kube.asked_for("get", "Node") == ["n0"], "it is not asked for again and again"
    assert [r.message for r in caplog.records if "nodes" in r.message] == [
        "labels of nodes cannot be read, so copies are spread by node (nodes are forbidden)"
    ]
