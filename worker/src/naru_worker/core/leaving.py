"""When a worker that was asked to end may stop taking requests: once its models are ready elsewhere.

Called by the app while it leaves, with what the route map says of the other workers. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from naru_proto.registry import WorkerRecord

READY = "ready"


def unmoved_models(serving: Mapping[str, int], others: Iterable[WorkerRecord]) -> list[str]:
    """Models that serve here and are ready on no other worker that stays, by name.

    Args:
        serving: generation of each model that serves here.
        others: leases of living workers, this one's left out.
    """
    ready: dict[str, int] = {}
    for worker in others:
        if worker.leaving or worker.draining:
            continue
        for name, resident in worker.models.items():
            if resident.state == READY:
                ready[name] = max(ready.get(name, resident.generation), resident.generation)
    # A copy of an older generation is not the same model.
    return sorted(name for name, generation in serving.items() if ready.get(name, generation - 1) < generation)
