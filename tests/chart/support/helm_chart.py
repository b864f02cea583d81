"""Renders the chart with Helm, for tests: values in, objects out. Asks no cluster."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
CHART = ROOT / "charts" / "naru"
ALL_VALUES = CHART / "ci" / "all-values.yaml"
KUBE_VERSION = "1.34.0"
TIMEOUT_S = 60.0

WORKLOADS = ("operator", "router", "redis")
CLUSTER_SCOPED = ("ClusterRole", "ClusterRoleBinding")

Object = dict[str, Any]

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Ten times as fast where libyaml is there."""


class RenderError(Exception):
    """Helm refused; the text is what it said."""


@functools.cache
def find_helm() -> str | None:
    """Helm's path: on PATH, or where the cluster tests keep their binaries."""
    if found := shutil.which("helm"):
        return found
    cache = Path(os.environ.get("NARU_CLUSTER_CACHE", Path.home() / ".cache" / "naru" / "cluster"))
    # The cache holds whole file systems of images beside: no deep search.
    found_there = sorted(
        path for pattern in ("helm", "bin/helm", "*/helm", "*/bin/helm") for path in cache.glob(pattern)
    )
    return next((str(path) for path in found_there if os.access(path, os.X_OK)), None)


def run_helm(arguments: Iterable[str], *, stdin: str = "") -> str:
    """Standard output of one call.

    Raises:
        RenderError: Helm failed.
    """
    helm = find_helm()
    assert helm is not None, "ask for the fixture `helm` first: it skips where there is none"
    done = subprocess.run(
        [helm, *arguments], input=stdin, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        raise RenderError(done.stderr)
    return done.stdout


@functools.cache
def _rendered(release: str, namespace: str, values: str, extra: tuple[str, ...]) -> str:
    arguments = ["template", release, str(CHART), "-n", namespace, "--kube-version", KUBE_VERSION, "-f", "-", *extra]
    return run_helm(arguments, stdin=values)


def render_text(
    values: Mapping[str, Any] | None = None, *extra: str, release: str = "naru", namespace: str = "ns-a"
) -> str:
    """What `helm template` prints; the same call is made once."""
    return _rendered(release, namespace, json.dumps(values or {}), extra)


def render(
    values: Mapping[str, Any] | None = None, *extra: str, release: str = "naru", namespace: str = "ns-a"
) -> list[Object]:
    """The objects, fresh ones at each call."""
    text = render_text(values, *extra, release=release, namespace=namespace)
    return [document for document in yaml.load_all(text, _LOADER) if document]


def all_values() -> Object:
    """Values that switch everything on."""
    values: Object = yaml.safe_load(ALL_VALUES.read_text(encoding="utf-8"))
    return values


def find(objects: Iterable[Object], kind: str, name: str) -> Object:
    """The one object of that kind and name."""
    (found,) = (item for item in objects if item["kind"] == kind and item["metadata"]["name"] == name)
    return found


def workload(objects: Iterable[Object], component: str) -> Object:
    """Deployment or StatefulSet of a component."""
    kinds = ("Deployment", "StatefulSet")
    labels = (("app.kubernetes.io/component", component),)
    (found,) = (item for item in objects if item["kind"] in kinds and has_labels(item, labels))
    return found


def has_labels(item: Object, labels: Iterable[tuple[str, str]]) -> bool:
    """Whether an object carries all of them."""
    return all(item["metadata"]["labels"].get(name) == value for name, value in labels)


def pod_specs(objects: Iterable[Object]) -> Iterator[tuple[str, Object]]:
    """Name and pod spec of everything that makes pods."""
    for item in objects:
        where = f"{item['kind']}/{item['metadata']['name']}"
        if item["kind"] == "Pod":
            yield where, item["spec"]
        elif item["kind"] in ("Deployment", "StatefulSet", "Job"):
            yield where, item["spec"]["template"]["spec"]


def identity(item: Object) -> tuple[str, str, str]:
    """Kind, namespace and name."""
    return item["kind"], item["metadata"].get("namespace", ""), item["metadata"]["name"]
