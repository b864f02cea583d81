"""What a board holds while a Redis that was restarted, maybe empty, is filled again by those who wrote it before.

Without it, every model would be unknown until the control plane has written it again, and every worker gone. Pure; used
by the registry reader.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from naru_proto.registry import ModelRecord, WorkerRecord

MODELS_GRACE_S = 30.0
"""For the control plane to write its models again; what is not there then was deleted."""
WORKERS_GRACE_S = 10.0
"""For workers to write their leases again: longer than the longest pause between two tries. A worker that died has no
stream, and is asked nothing meanwhile."""


@dataclass(frozen=True, slots=True)
class Board:
    """What one reading found."""

    models: Mapping[str, ModelRecord] = field(default_factory=dict)
    workers: Mapping[str, WorkerRecord] = field(default_factory=dict)

    def has_all_of(self, before: Board) -> bool:
        """Whether nothing that was there before is missing."""
        return before.models.keys() <= self.models.keys() and before.workers.keys() <= self.workers.keys()


def bridged(before: Board, now: Board, age_s: float) -> Board | None:
    """What to go by so long after a restart: what is there, and what was and may come back. None: what is there alone.

    Args:
        before: as it was last read before the restart.
        now: as it was just read.
        age_s: since the restart was seen.
    """
    if age_s >= MODELS_GRACE_S or now.has_all_of(before):
        return None
    workers = {**before.workers, **now.workers} if age_s < WORKERS_GRACE_S else now.workers
    return Board({**before.models, **now.models}, workers)
