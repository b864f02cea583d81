"""What all of the operator's decisions share about Kubernetes objects. Plain values; asks no API server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]
"""A Kubernetes object as parsed JSON. Never changed once it is handed on."""


@dataclass(frozen=True, slots=True, order=True)
class ObjectKey:
    """An object of one kind."""

    namespace: str
    name: str

    def __str__(self) -> str:
        """namespace/name."""
        return f"{self.namespace}/{self.name}"


def key_of(item: Object) -> ObjectKey:
    """The key of a namespaced object."""
    return ObjectKey(item["metadata"].get("namespace", ""), item["metadata"]["name"])


def owner_reference(owner: Object) -> Object:
    """Makes the garbage collector remove what carries this when `owner` goes."""
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": False,
    }


@dataclass(frozen=True, slots=True)
class ObjectEvent:
    """Something worth a Kubernetes event on an object."""

    kind: str
    """ModelDeployment or WorkerPool."""
    key: ObjectKey
    reason: str
    """One CamelCase word."""
    message: str
    is_warning: bool = False
