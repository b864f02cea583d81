"""Objects of the store as models: parsed once for each version, with the reason where one cannot be read.

Called by the controller. An object's status is parsed apart from its spec: one that another version wrote and this
one cannot read is written anew, and stands in nobody's way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from pydantic import ValidationError

from naru_operator.core.kube import Object, ObjectKey
from naru_proto.crd.base import CrdModel
from naru_proto.crd.manifests import InvalidManifest, load_manifests
from naru_proto.crd.v1alpha1 import ModelDeployment, ModelDeploymentStatus, WorkerPool, WorkerPoolStatus

_M = TypeVar("_M", ModelDeployment, WorkerPool)
_S = TypeVar("_S", ModelDeploymentStatus, WorkerPoolStatus)

_META = ("name", "namespace", "uid", "generation", "creationTimestamp", "deletionTimestamp", "labels", "annotations")


_AT_ONCE = 32
"""Objects parsed before others may run."""


@dataclass(frozen=True, slots=True)
class Parsed(Generic[_M, _S]):
    """One object."""

    raw: Object
    version: tuple[str, str]
    """uid and resourceVersion."""
    model: _M | None
    """None: the spec cannot be read."""
    problem: str
    """Why not."""
    status: _S
    """As it was last written; blank where it cannot be read."""


class ParsedObjects(Generic[_M, _S]):
    """All objects of one kind. Mutable: `update` takes the store's."""

    def __init__(self, model: type[_M], status: type[_S]) -> None:
        self._model: type[_M] = model
        self._status: type[_S] = status
        self._parsed: dict[ObjectKey, Parsed[_M, _S]] = {}

    async def update(self, items: Mapping[ObjectKey, Object]) -> dict[ObjectKey, Parsed[_M, _S]]:
        """What the store holds now, parsed; only what has changed since the last call costs time.

        Lets others run in between: thousands of objects take seconds, and the lease must be renewed meanwhile.
        """
        parsed: dict[ObjectKey, Parsed[_M, _S]] = {}
        num_parsed = 0
        for key, raw in list(items.items()):
            meta = raw["metadata"]
            version = (str(meta.get("uid", "")), str(meta.get("resourceVersion", "")))
            before = self._parsed.get(key)
            if before is not None and before.version == version:
                parsed[key] = before
            else:
                parsed[key] = self._parse(raw, version, before)
                num_parsed += 1
                if num_parsed % _AT_ONCE == 0:
                    await asyncio.sleep(0)
        self._parsed = parsed
        return parsed

    def _parse(self, raw: Object, version: tuple[str, str], before: Parsed[_M, _S] | None) -> Parsed[_M, _S]:
        status = _status(self._status, raw)
        if before is not None and before.version[0] == version[0] and _is_same_wish(before.raw, raw):
            return Parsed(raw, version, before.model, before.problem, status)
        model, problem = _read(self._model, raw)
        return Parsed(raw, version, model, problem, status)


def _is_same_wish(before: Object, now: Object) -> bool:
    """Whether only what the API server and we write has changed."""
    if before.get("spec") != now.get("spec"):
        return False
    return all(before["metadata"].get(name) == now["metadata"].get(name) for name in _META)


def _read(model: type[_M], raw: Object) -> tuple[_M | None, str]:
    bare = {name: value for name, value in raw.items() if name != "status"}
    bare["metadata"] = {name: raw["metadata"][name] for name in _META if name in raw["metadata"]}
    try:
        read = load_manifests([bare], source="object")[0]
    except InvalidManifest as exc:
        return None, "; ".join(f"{problem.path}: {problem.message}" for problem in exc.problems)
    assert isinstance(read, model)  # the store keeps kinds apart
    return read, ""


def _status(status: type[_S], raw: Object) -> _S:
    try:
        return status.model_validate(raw.get("status") or {})
    except ValidationError:
        return status()


def readable(parsed: Iterable[Parsed[_M, _S]]) -> tuple[_M, ...]:
    """The models of all objects that could be read."""
    return tuple(it.model for it in parsed if it.model is not None)


def status_object(raw: Object, status: CrdModel) -> Object:
    """What to apply so that the status of this very object becomes this one."""
    meta = raw["metadata"]
    return {
        "apiVersion": raw["apiVersion"],
        "kind": raw["kind"],
        "metadata": {"name": meta["name"], "namespace": meta["namespace"], "uid": meta["uid"]},
        "status": status.to_wire(),
    }
