"""Whether the volumes of a pool's workers are ready, and why not. Called by the plan and the status."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from naru_operator.core.pools.member_names import claim_name
from naru_operator.core.pools.members import Member
from naru_operator.core.pools.model import PoolSnapshot
from naru_proto.crd.v1alpha1 import WorkerPool

BOUND = "Bound"
_LOST = "Lost"
_PATIENCE_S = 60.0
"""In which a scheduler has said what it waits for."""
_IS_ABOUT_STORAGE = re.compile(r"volume|storageclass", re.IGNORECASE)


def slot_claims(pool: WorkerPool, members: Iterable[Member]) -> Iterator[tuple[Member, str]]:
    """The members made from the pool's present spec, with their cache claims; none where caches are no claims."""
    storage_class = pool.spec.cache.storage_class_name
    if storage_class is None:
        return
    for member in members:
        if not member.is_outdated and member.pod.slot is not None:
            yield member, claim_name(pool.metadata.name, member.pod.slot, storage_class)


def find_storage_problem(snapshot: PoolSnapshot, members: Iterable[Member], *, now_s: float) -> str:
    """What is wrong with the first volume that workers wait for, and the remedy; empty: nothing.

    A claim that is not bound is no fault by itself: many classes bind it when its pod is scheduled.
    """
    members = tuple(member for member in members if not member.is_ready)
    for name in sorted(snapshot.pool.spec.claims):
        phase = snapshot.claims.get(name)
        if phase is None:
            return f"PersistentVolumeClaim {name!r} of spec.claims does not exist; create it or drop it there"
        if phase == _LOST:
            return f"PersistentVolumeClaim {name!r} of spec.claims has lost its volume; make it anew"
        waiting = next((member for member in members if _waits_for_storage(member, now_s)), None)
        if phase != BOUND and waiting is not None:
            return f"PersistentVolumeClaim {name!r} of spec.claims is not bound: {_said(waiting)}"
    storage_class = snapshot.pool.spec.cache.storage_class_name
    for member, name in slot_claims(snapshot.pool, members):
        phase = snapshot.claims.get(name, "")
        if phase == _LOST:
            return f"PersistentVolumeClaim {name!r} has lost its volume; delete it and pod {member.name!r}"
        if phase != BOUND and _waits_for_storage(member, now_s):
            return (
                f"volume {name!r} of storage class {storage_class!r} is not bound: {_said(member)}; create the class, "
                "make room in it, or correct spec.cache.storageClassName"
            )
    return ""


def _waits_for_storage(member: Member, now_s: float) -> bool:
    pod = member.pod
    if pod.trouble:
        return pod.node is None and bool(_IS_ABOUT_STORAGE.search(pod.trouble))
    return pod.node is None and now_s - pod.created_s >= _PATIENCE_S


def _said(member: Member) -> str:
    return member.pod.trouble or f"pod {member.name!r} is not scheduled"
