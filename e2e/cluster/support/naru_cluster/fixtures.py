"""Fixtures and hooks of the tests on clusters; `e2e/conftest.py` takes them over by name.

Which cluster: NARU_CLUSTER names one that `python -m naru_cluster up` keeps running; else the first test that asks
starts one, and it ends with the test process, however that ends. An existing cluster that KUBECONFIG names is used
only where NARU_E2E is set, as `make e2e` and `make e2e-controlplane` do: a plain `pytest` touches nobody's cluster.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from naru_cluster import artifacts
from naru_cluster.api import KubeCluster, NotOurs
from naru_cluster.cluster import Cluster
from naru_cluster.errors import Unavailable
from naru_cluster.existing import ExistingCluster
from naru_cluster.left_over import remove_left_over
from naru_cluster.machine import must_not_skip
from naru_cluster.parts import find_parts

_CRDS = Path(__file__).resolve().parents[4] / "crds"


@pytest.fixture(scope="session")
def control_plane() -> Iterator[KubeCluster]:
    """A cluster without a node: for definitions, rules, the operator's decisions, scheduling on fake nodes."""
    yield from _provide(full_node=False)


@pytest.fixture(scope="session")
def cluster() -> Iterator[KubeCluster]:
    """A cluster with a real node: for pods, probes, Services, DNS, Helm."""
    yield from _provide(full_node=True)


@pytest.fixture(scope="session")
def crds(control_plane: KubeCluster) -> KubeCluster:
    """`control_plane` with the definitions of `crds/` applied and served."""
    return apply_crds(control_plane)


@pytest.fixture
def namespace(control_plane: KubeCluster) -> Iterator[str]:
    """A namespace of `control_plane` for one test; it is deleted afterwards."""
    yield from _namespace(control_plane)


@pytest.fixture
def cluster_namespace(cluster: KubeCluster) -> Iterator[str]:
    """A namespace of `cluster` for one test; it is deleted afterwards."""
    yield from _namespace(cluster)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Skips a test that asks an existing cluster for what only our own can do."""
    try:
        return (yield)
    except NotOurs as exc:
        pytest.skip(str(exc))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Collects what a failed test leaves, and says where."""
    report = yield
    if report.failed and call.when in ("setup", "call") and (used := _used(item)):
        folder = artifacts.collect(used, item.name)
        report.sections.append(("cluster", f"pods, events and logs are in {folder}"))
    return report


def apply_crds(cluster: KubeCluster) -> KubeCluster:
    """Applies the definitions of `crds/` and waits until they are served."""
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "--filename", str(_CRDS))
    cluster.wait_established(*(f"{path.stem}.serving.naru.dev" for path in sorted(_CRDS.glob("*.yaml"))))
    return cluster


def _used(item: pytest.Item) -> KubeCluster | None:
    """The cluster a test uses, under whatever fixture's name."""
    values = getattr(item, "funcargs", {}).values()
    return next((value for value in values if isinstance(value, KubeCluster)), None)


def _provide(*, full_node: bool) -> Iterator[KubeCluster]:
    asked = bool(os.environ.get("NARU_E2E"))
    if asked and (kubeconfig := os.environ.get("KUBECONFIG")):
        existing = ExistingCluster(Path(kubeconfig))
        try:
            yield existing
        finally:
            existing.close()
        return
    if full_node and not asked and not os.environ.get("NARU_CLUSTER"):
        pytest.skip("stories on a full node are long: run `make e2e`, or set NARU_E2E=1")
    try:
        parts = find_parts()
        if name := os.environ.get("NARU_CLUSTER"):
            running = Cluster.running(name, parts)
            if full_node and not running.full_node:
                pytest.skip(f"the cluster {name!r} has no node: start one with `python -m naru_cluster up`")
            yield running
            running.close()
            return
        remove_left_over(parts)
        own = Cluster(f"{'node' if full_node else 'cp'}-{os.getpid()}", parts)
        own.up(full_node=full_node, end_with_caller=True)
    except Unavailable as exc:
        if must_not_skip():
            raise
        pytest.skip(str(exc))
    try:
        yield own
    finally:
        own.down()


def _namespace(cluster: KubeCluster) -> Iterator[str]:
    answer = cluster.api.post("/api/v1/namespaces", json={"metadata": {"generateName": "test-"}}).raise_for_status()
    name = str(answer.json()["metadata"]["name"])
    account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
    cluster.wait_for(lambda: cluster.api.get(account).is_success, 30.0, f"the service account of {name}")
    yield name
    answer = cluster.api.delete(f"/api/v1/namespaces/{name}")
    if answer.status_code != 404:  # a test may have deleted it
        answer.raise_for_status()
