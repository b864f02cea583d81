"""What a manifest says of the number of copies and their places. Workers are not told.

Written by both plans into the registry's records, for the routers' keeper; read by placement. A change of it alone
loads nothing anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from naru_proto.crd.model_residency import ResourcesSpec
from naru_proto.crd.v1alpha1 import ModelDeploymentSpec

_POLICIES = {"Pinned": "pinned", "Preferred": "preferred", "OnDemand": "on_demand"}


@dataclass(frozen=True, slots=True)
class Scaling:
    """As in ModelRecord."""

    max_replicas: int = 0
    policy: str = "preferred"
    priority: int = 100
    target_in_flight: int = 16
    target_queue_s: float = 1.0
    scale_window_s: float = 30.0
    scale_down_delay_s: float = 300.0
    num_accelerators: int = 1
    spread_key: str = ""


def scaling_of(spec: ModelDeploymentSpec, resources: ResourcesSpec) -> Scaling:
    """What a manifest says. ``resources``: of the revision that is placed, which need not be the spec's own."""
    scaling = spec.scaling
    return Scaling(
        max_replicas=spec.replicas.max or 0,
        policy=_POLICIES[spec.residency.policy],
        priority=spec.residency.priority,
        target_in_flight=scaling.target_in_flight,
        target_queue_s=scaling.target_queue_time_s,
        scale_window_s=scaling.window_s,
        scale_down_delay_s=scaling.scale_down_delay_s,
        num_accelerators=resources.tensor_parallel,
        spread_key=spec.placement.spread_topology_key,
    )
