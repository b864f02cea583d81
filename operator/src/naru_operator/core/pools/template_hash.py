"""The hash that decides which pods are outdated. Called by the pod's manifest and the plan.

It is taken of what a pod is made from, not of the manifest: another version of the operator, which writes pods a little
differently or knows more fields, must not roll every worker. So fields at their defaults do not count.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from naru_operator.core.pools.model import PodSettings
from naru_proto.crd.v1alpha1 import WorkerPool

_EDITION = 1
"""Counted up only when pods of an older operator must not stay as they are."""
_SPEC_FIELDS = {
    "accelerator", "memory", "threads", "cache", "drain_timeout_s", "move_timeout_s", "topology", "template",
}  # fmt: skip
"""What reaches the pod as it stands; the rest is below, or concerns the pool alone."""
_SETTINGS_OF_POOL = ("image", "service_account")
"""Used where a pool names none."""
_NOT_IN_PODS = ("cluster_domain",)


def template_hash(pool: WorkerPool, settings: PodSettings) -> str:
    """16 hex digits: equal as long as no change asks for new pods."""
    spec = pool.spec
    parts = spec.model_dump(mode="json", by_alias=True, include=_SPEC_FIELDS, exclude_defaults=True)
    if spec.accelerator.kind == "cuda":
        parts["accelerator"]["count"] = spec.accelerator.num_accelerators
    else:
        # A cpu pool's resource name reaches no pod.
        parts.pop("accelerator", None)
    parts.get("template", {}).pop("serviceAccountName", None)
    parts["image"] = spec.image or settings.image
    parts["serviceAccount"] = spec.template.service_account_name or settings.service_account
    sets = {"secrets": spec.credential_secrets, "claims": spec.claims, "folders": spec.node_folders}
    parts |= {name: sorted(values) for name, values in sets.items()}
    parts["settings"] = _changed_settings(settings)
    text = json.dumps([_EDITION, _without_empty(parts)], sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _changed_settings(settings: PodSettings) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        factory = field.default_factory
        default = factory() if factory is not dataclasses.MISSING else field.default
        if value != default and field.name not in (*_SETTINGS_OF_POOL, *_NOT_IN_PODS):
            changed[field.name] = value
    if not changed.get("template", {}).get("terminationGracePeriodSeconds"):
        changed["template"] = {k: v for k, v in settings.template.items() if k != "terminationGracePeriodSeconds"}
    return changed


def _without_empty(values: Mapping[str, Any]) -> dict[str, Any]:
    """Absent and empty fields say the same; 0 and false say something."""
    cleaned = {name: _without_empty(value) if isinstance(value, Mapping) else value for name, value in values.items()}
    return {name: value for name, value in cleaned.items() if value not in (None, "", [], (), {})}
