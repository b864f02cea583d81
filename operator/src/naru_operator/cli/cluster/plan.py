"""`naru cluster plan`: what applying manifests would do, before anybody applies them.

The API server checks each object as it would at an apply, and stores nothing. What follows from the change is said by
the operator's own decisions: which change is a rollout, which one replaces pods, which pools could hold a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from naru_operator.adapters.manifest_files import read_manifests
from naru_operator.cli.cluster.api import ClusterApi
from naru_operator.cli.text import listed
from naru_operator.core.kube import Object
from naru_operator.core.models.revision import revision_spec
from naru_operator.core.pools.model import PodSettings
from naru_operator.core.pools.template_hash import template_hash
from naru_proto.crd.manifests import Manifest, load_manifests
from naru_proto.crd.v1alpha1 import ModelDeployment, WorkerPool
from naru_proto.errors import InvalidRequest, ModelNotFound

_PLURALS = {"ModelDeployment": "modeldeployments", "WorkerPool": "workerpools"}
_ANY_SETTINGS = PodSettings(image="any", redis_secret="any")
"""An installation's settings are the same before and after: which they are makes no difference here."""
_MAX_CHANGES, _MAX_POOLS = 12, 8
_ABSENT = object()


def run_plan(api: ClusterApi, paths: Sequence[Path]) -> int:
    """Prints what would happen to each object.

    Raises:
        InvalidRequest: a file or object is not valid; the API server's words.
        NaruError: as the API server said.
    """
    pools = {item["metadata"]["name"]: item for item in api.items(api.custom("workerpools"))}
    blocks = []
    for manifest in read_manifests(paths):
        blocks.append(_plan_one(api, manifest, pools))
    if not blocks:
        raise InvalidRequest("the files hold no objects; give some that do", param="paths")
    click.echo("\n\n".join(blocks))
    return 0


def _plan_one(api: ClusterApi, manifest: Manifest, pools: dict[str, Object]) -> str:
    plural = _PLURALS[manifest.kind]
    is_named = "namespace" in manifest.metadata.model_fields_set
    namespace = manifest.metadata.namespace if is_named else api.namespace
    scoped = ClusterApi(api.http, namespace)
    path = scoped.custom(plural, manifest.metadata.name)
    body = manifest.model_dump(mode="json", by_alias=True, exclude_unset=True)
    body["metadata"]["namespace"] = namespace
    after = scoped.dry_run(body, path)
    try:
        before: Object | None = scoped.get(path)
    except ModelNotFound:
        before = None
    if isinstance(manifest, WorkerPool):
        pools[manifest.metadata.name] = after
    title = f"{manifest.kind} {namespace}/{manifest.metadata.name}"
    lines = list(_consequences(before, after, pools))
    return "\n".join((f"{title}:", *(f"  {line}" for line in lines)))


def _consequences(before: Object | None, after: Object, pools: dict[str, Object]) -> Iterator[str]:
    new = _parsed(after)
    if before is None:
        yield "is created"
        yield from _created(new, pools)
        return
    changes = list(changed_fields(before["spec"], after["spec"]))
    if not changes:
        yield "stays as it is"
        return
    for name, old_value, new_value in changes[:_MAX_CHANGES]:
        yield f"{name}: {_shown(old_value)} → {_shown(new_value)}"
    if len(changes) > _MAX_CHANGES:
        yield f"and {len(changes) - _MAX_CHANGES} more fields"
    old = _parsed(before)
    if isinstance(old, ModelDeployment) and isinstance(new, ModelDeployment):
        yield _model_change(old, new, before)
    elif isinstance(old, WorkerPool) and isinstance(new, WorkerPool):
        yield from _pool_change(old, new)


def _created(new: Manifest, pools: dict[str, Object]) -> Iterator[str]:
    if isinstance(new, WorkerPool):
        yield f"{new.spec.workers.min} workers are started"
        return
    yield f"revision {revision_spec(new.spec).digest} from {new.spec.model.uri}"
    wanted = new.spec.placement.pool_selector.match_labels
    fitting = sorted(
        name for name, item in pools.items() if wanted.items() <= (item["metadata"].get("labels") or {}).items()
    )
    if not fitting:
        yield f"no WorkerPool of this namespace has the labels {wanted!r}: it would wait for one"
        return
    if new.spec.residency.policy == "OnDemand":
        yield f"is loaded by the first request, on a worker of {listed(fitting, _MAX_POOLS)}"
    else:
        count = max(1, new.spec.replicas.min)
        copies = "1 copy is" if count == 1 else f"{count} copies are"
        yield f"{copies} loaded on workers of {listed(fitting, _MAX_POOLS)}"


def _model_change(old: ModelDeployment, new: ModelDeployment, before: Object) -> str:
    digests = revision_spec(old.spec).digest, revision_spec(new.spec).digest
    if digests[0] == digests[1]:
        return "no rollout: the loaded copies stay"
    serving = (before.get("status") or {}).get("currentRevision") or digests[0]
    if new.spec.rollout.strategy == "Recreate":
        return f"rollout to revision {digests[1]}: the copies of {serving} leave first, requests wait meanwhile"
    return f"rollout to revision {digests[1]}: {serving} serves until as many new copies are ready"


def _pool_change(old: WorkerPool, new: WorkerPool) -> Iterator[str]:
    if template_hash(old, _ANY_SETTINGS) != template_hash(new, _ANY_SETTINGS):
        surge = new.spec.rollout.max_surge
        how = f"up to {surge} more at a time" if surge else "each leaves before its successor starts"
        yield f"all workers are replaced, one after another ({how})"
    else:
        yield "the running workers stay"
    difference = new.spec.workers.min - old.spec.workers.min
    if difference:
        yield f"{abs(difference)} workers {'are started' if difference > 0 else 'leave, the idlest first'}"


def changed_fields(before: Any, after: Any, path: str = "spec") -> Iterator[tuple[str, Any, Any]]:
    """(dotted name, old, new) of each field that differs; an absent one is None."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted(before.keys() | after.keys()):
            yield from changed_fields(before.get(name, _ABSENT), after.get(name, _ABSENT), f"{path}.{name}")
    elif before != after:
        yield path, None if before is _ABSENT else before, None if after is _ABSENT else after


def _shown(value: Any) -> str:
    return "absent" if value is None else repr(value)[:80]


def _parsed(item: Object) -> Manifest:
    bare = {name: value for name, value in item.items() if name != "status"}
    return load_manifests([bare])[0]
