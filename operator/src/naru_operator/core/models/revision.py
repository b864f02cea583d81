"""Revisions of a ModelDeployment: the part of its spec that a worker loads, and the objects that keep it. Pure.

Two specs of one digest load the same model in the same way, so a change of anything else is no rollout. Called by the
plan; the `naru rollout` commands read the same objects.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import Field, ValidationError

from naru_operator.core.kube import Object, ObjectKey, owner_reference
from naru_proto import names
from naru_proto.crd.base import CrdModel, Items
from naru_proto.crd.model_deployment import Adapter, ModelSource
from naru_proto.crd.model_residency import BatchingSpec, EngineSpec, ResourcesSpec
from naru_proto.crd.v1alpha1 import ModelDeploymentSpec

DIGEST_LENGTH = 10
API_VERSION, KIND = "apps/v1", "ControllerRevision"
_MAX_NAME_LENGTH = 253
_MAX_LABEL_LENGTH = 63


class RevisionSpec(CrdModel):
    """The part of a spec whose change is a rollout."""

    model: ModelSource
    adapters: Items[Adapter] = ()
    engine: EngineSpec = Field(default_factory=EngineSpec)
    resources: ResourcesSpec = Field(default_factory=ResourcesSpec)
    batching: BatchingSpec = Field(default_factory=BatchingSpec)

    @property
    def digest(self) -> str:
        """Hex identity of the content."""
        return _digest(self)

    def to_data(self) -> dict[str, Any]:
        """What is kept of it: no defaults, so that a field that a later version adds changes no digest."""
        data = _pruned(self.model_dump(mode="json", by_alias=True, exclude_defaults=True))
        if "adapters" in data:
            data["adapters"] = sorted(data["adapters"], key=lambda adapter: str(adapter["name"]))
        return dict(data)


@dataclass(frozen=True, slots=True)
class Revision:
    """A ControllerRevision of ours, as far as its metadata say; its data is read when it is needed."""

    key: ObjectKey
    owner_uid: str
    digest: str
    number: int
    """Counts up from 1 for each ModelDeployment."""
    raw: Object

    def spec(self) -> RevisionSpec | None:
        """What it keeps; None where that cannot be read, or is not what its digest says."""
        try:
            found = RevisionSpec.model_validate(self.raw.get("data"))
        except ValidationError:
            return None
        return found if found.digest == self.digest else None


def revision_spec(spec: ModelDeploymentSpec) -> RevisionSpec:
    """The revision that a spec asks for."""
    return RevisionSpec.model_construct(
        model=spec.model,
        adapters=spec.adapters,
        engine=spec.engine,
        resources=spec.resources,
        batching=spec.batching,
    )


def label_value(name: str) -> str:
    """A name as the value of a label: cut with a digest of the whole where it is too long."""
    return _cut(name, _MAX_LABEL_LENGTH)


def object_name(model: str, digest: str) -> str:
    """The name of a revision's object: the same for the same model and digest, and no other's."""
    return f"{_cut(model, _MAX_NAME_LENGTH - DIGEST_LENGTH - 1)}-{digest}"


def build_revision(owner: Object, spec: RevisionSpec, number: int) -> Object:
    """The object that keeps a revision; the garbage collector removes it with its owner."""
    metadata = owner["metadata"]
    digest = spec.digest
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {
            "name": object_name(metadata["name"], digest),
            "namespace": metadata["namespace"],
            "labels": {
                names.LABEL_MODEL: label_value(metadata["name"]),
                names.LABEL_MANAGED_BY: names.MANAGED_BY,
            },
            "annotations": {
                names.ANNOTATION_REVISION_DIGEST: digest,
                names.ANNOTATION_MODEL_NAME: metadata["name"],
            },
            "ownerReferences": [owner_reference(owner)],
        },
        "revision": number,
        "data": spec.to_data(),
    }


def read_revision(raw: Object) -> Revision | None:
    """A ControllerRevision that a ModelDeployment controls; None for any other and for one that cannot be read."""
    metadata = raw.get("metadata")
    if not isinstance(metadata, dict):
        return None
    annotations = metadata.get("annotations")
    digest = annotations.get(names.ANNOTATION_REVISION_DIGEST) if isinstance(annotations, dict) else None
    name, namespace, number = metadata.get("name"), metadata.get("namespace"), raw.get("revision")
    owner_uid = _owner_uid(metadata.get("ownerReferences"))
    if not (isinstance(digest, str) and isinstance(name, str) and isinstance(namespace, str) and owner_uid):
        return None
    if not isinstance(number, int) or isinstance(number, bool):
        return None
    return Revision(ObjectKey(namespace, name), owner_uid, digest, number, raw)


def surplus_revisions(revisions: Iterable[Revision], kept: Collection[str], limit: int) -> tuple[ObjectKey, ...]:
    """Those of one ModelDeployment that its history has no room for, oldest first.

    Those of the digests in `kept` do not count and never go, nor does one that cannot be read.
    """
    earlier = sorted((each for each in revisions if each.digest not in kept), key=lambda each: (each.number, each.key))
    surplus = earlier[: max(0, len(earlier) - limit)]
    return tuple(each.key for each in surplus if each.spec() is not None)


def _owner_uid(references: object) -> str:
    for reference in references if isinstance(references, list) else ():
        if not isinstance(reference, dict) or reference.get("controller") is not True:
            continue
        group = str(reference.get("apiVersion", "")).partition("/")[0]
        uid = reference.get("uid")
        if group == names.API_GROUP and reference.get("kind") == "ModelDeployment" and isinstance(uid, str):
            return uid
    return ""


def _digest(spec: RevisionSpec) -> str:
    return _digest_of(spec.model, spec.adapters, spec.engine, spec.resources, spec.batching)


@functools.lru_cache(maxsize=1 << 14)
def _digest_of(
    model: ModelSource,
    adapters: tuple[Adapter, ...],
    engine: EngineSpec,
    resources: ResourcesSpec,
    batching: BatchingSpec,
) -> str:
    spec = RevisionSpec.model_construct(
        model=model, adapters=adapters, engine=engine, resources=resources, batching=batching
    )
    text = json.dumps(spec.to_data(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_LENGTH // 2).hexdigest()


def _pruned(value: Any) -> Any:
    """Without what is null or empty, at any depth."""
    if isinstance(value, dict):
        items = {name: _pruned(item) for name, item in value.items()}
        return {name: item for name, item in items.items() if item not in (None, {}, [])}
    if isinstance(value, list):
        return [_pruned(item) for item in value]
    return value


def _cut(text: str, max_length: int) -> str:
    if len(text) <= max_length:
        return text
    digest = hashlib.blake2b(text.encode(), digest_size=DIGEST_LENGTH // 2).hexdigest()
    return f"{text[: max_length - DIGEST_LENGTH - 1].rstrip('-._')}-{digest}"
