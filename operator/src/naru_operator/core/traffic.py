"""What a manifest says of requests: who may send them, where they go, what they share. Workers are not told.

Written by both plans into the registry's records, for routers; a change of it alone loads nothing anew.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from naru_proto.crd.model_traffic import DEFAULT_LOAD_FACTOR
from naru_proto.crd.v1alpha1 import ModelDeploymentSpec
from naru_proto.registry import ModelRecord

_NO_WAIT_S = 0.001
"""What a wait of nothing becomes: to a router 0 means its own."""
_STRATEGIES = {"PrefixAffinity": "prefix_affinity", "LeastLoaded": "least_loaded", "RoundRobin": "round_robin"}
_ISOLATIONS = {"Isolated": "isolated", "AfterSystem": "after_system", "Shared": "shared"}


@dataclass(frozen=True, slots=True)
class Traffic:
    """As in ModelRecord."""

    strategy: str = "prefix_affinity"
    load_factor: float = 0.0
    max_retries: int = 1
    allow: tuple[str, ...] = ()
    cache_isolation: str = "isolated"
    fallbacks: tuple[str, ...] = ()
    split: tuple[tuple[str, int], ...] = ()
    max_wait_s: float = 0.0
    max_depth: int = 0


def traffic_of(spec: ModelDeploymentSpec) -> Traffic:
    """What a manifest says."""
    routing, tenancy, queue = spec.routing, spec.tenancy, spec.queue
    return Traffic(
        strategy=_STRATEGIES[routing.strategy],
        load_factor=0.0 if routing.load_factor == DEFAULT_LOAD_FACTOR else routing.load_factor,
        max_retries=routing.max_retries,
        allow=tenancy.allow,
        cache_isolation=_ISOLATIONS[tenancy.cache_isolation],
        fallbacks=routing.fallbacks,
        max_wait_s=max(queue.max_wait_s, _NO_WAIT_S),
        max_depth=max(queue.max_depth, 1),
        split=tuple((share.model, share.weight) for share in routing.split),
    )


def traffic_in(record: ModelRecord) -> Traffic:
    """What a record says."""
    return Traffic(**{field.name: getattr(record, field.name) for field in dataclasses.fields(Traffic)})
