"""kill -9 of one part after another under load: what could be served is served, and all comes back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from installation import SMOLLM2, Installation, model, pool
from stream_load import StreamLoad, reference_text

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def served(naru: Installation) -> Iterator[Installation]:
    """SmolLM2 on two workers, so that each can be lost."""
    naru.apply(pool(workers={"min": 2}), model(SMOLLM2, replicas={"min": 2}))
    naru.cluster.wait_for(
        lambda: naru.get("md", SMOLLM2).get("status", {}).get("replicas", {}).get("ready") == 2, 180, "two copies"
    )
    yield naru
    naru.apply(pool(), model(SMOLLM2))


def kill_container(naru: Installation, pod: dict[str, object]) -> None:
    """SIGKILL to the first process of a pod's container, from the node."""
    metadata = pod["metadata"]
    assert isinstance(metadata, dict)
    naru.cluster.kill_pod(naru.namespace, str(metadata["name"]))


def restarts(naru: Installation, component: str) -> int:
    """Container restarts of a part's pods."""
    pods = naru.workers() if component == "worker" else naru.component(component)
    return sum(status["restartCount"] for pod in pods for status in pod["status"].get("containerStatuses") or ())


@pytest.mark.parametrize("component", ["operator", "worker", "redis"])
def test_a_killed_part_costs_no_stream_and_comes_back(served: Installation, component: str) -> None:
    expected = reference_text(served.url, SMOLLM2)
    pods = served.workers() if component == "worker" else served.component(component)
    before = restarts(served, component)
    with StreamLoad(served.url, SMOLLM2, num_clients=8).running() as load:
        load.wait_for(8)
        kill_container(served, pods[0])
        served.cluster.wait_for(lambda: restarts(served, component) > before, 120, f"the {component} runs again")
        load.wait_for(24)
    assert load.failures(expected) == []
    served.cluster.wait_for(
        lambda: served.get("md", SMOLLM2)["status"]["replicas"]["ready"] == 2, 120, "two copies again"
    )
    assert served.wait_model(SMOLLM2)


def test_a_killed_router_costs_its_own_streams_and_no_later_request(served: Installation) -> None:
    """A connection to a killed process is lost with it; every other one, and every later one, is served."""
    expected = reference_text(served.url, SMOLLM2)
    routers = served.component("router")
    assert len(routers) == 2
    before = restarts(served, "router")
    with StreamLoad(served.url, SMOLLM2, num_clients=8).running() as load:
        load.wait_for(8)
        kill_container(served, routers[0])
        served.cluster.wait_for(lambda: restarts(served, "router") > before, 120, "the router runs again")
        served.cluster.wait_for(
            lambda: all(s["ready"] for p in served.component("router") for s in p["status"]["containerStatuses"]),
            60,
            "both routers are ready",
        )
        num_before = len(load.outcomes)
        load.wait_for(24)
    failures = load.failures(expected)
    assert len(failures) <= 8 * 3, "no more than the streams that went through it, and tries until it left the Service"
    assert [o for o in load.outcomes[num_before + 8 :] if o in failures] == []


def test_a_killed_api_server_is_not_noticed_by_those_who_ask(served: Installation) -> None:
    expected = reference_text(served.url, SMOLLM2)
    with StreamLoad(served.url, SMOLLM2, num_clients=8).running() as load:
        load.wait_for(8)
        served.cluster.kill("kube-apiserver")
        load.wait_for(16)
        served.cluster.start("kube-apiserver")
        load.wait_for(8)
    assert load.failures(expected) == []
    # The operator watches again: a change is carried out.
    served.apply(model(SMOLLM2, replicas={"min": 1, "max": 1}))
    served.cluster.wait_for(
        lambda: served.get("md", SMOLLM2)["status"]["replicas"]["ready"] == 1, 120, "one copy, as asked since"
    )
