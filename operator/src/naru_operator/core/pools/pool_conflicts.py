"""Pools of the same name in several namespaces: workers and routers know pools by name alone, so one of them must wait.

Called by the controller before it plans: a pool named here gets `refused_plan` in place of a plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from naru_operator.core.kube import ObjectKey
from naru_operator.core.pools.model import PoolPlan
from naru_proto.crd.v1alpha1 import WorkerPool


def find_pool_conflicts(pools: Iterable[WorkerPool]) -> Mapping[ObjectKey, str]:
    """The pools that came second under their name, and why; the first created wins, then the first in name order."""
    first: dict[str, ObjectKey] = {}
    conflicts: dict[ObjectKey, str] = {}
    for pool in sorted(pools, key=_age):
        key = ObjectKey(pool.metadata.namespace, pool.metadata.name)
        owner = first.setdefault(key.name, key)
        if owner != key:
            conflicts[key] = (
                f"namespace {owner.namespace!r} has an older pool {key.name!r}; rename or delete one of them"
            )
    return conflicts


def refused_plan(reason: str, problem: str) -> PoolPlan:
    """Does nothing for a pool that cannot be accepted; pods it may have stay."""
    return PoolPlan(problem_reason=reason, problem=problem, is_accepted=False, reasons=(f"nothing: {problem}",))


def _age(pool: WorkerPool) -> tuple[bool, float, str]:
    created = pool.metadata.creation_timestamp
    return created is None, created.timestamp() if created else 0.0, pool.metadata.namespace
