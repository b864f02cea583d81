"""What goes wrong among ranks."""

from __future__ import annotations

from naru_worker.adapters.ops.protocol import DeviceFault


class CollectiveFailed(RuntimeError):
    """An exchange among ranks did not end: some rank is gone, or did not come in time. It does not say which."""


class RankLost(DeviceFault):
    """A rank has died, hangs or has failed in a step. The group is over, and with it this process's work."""

    def __init__(self, rank: int, size: int, reason: str) -> None:
        super().__init__(f"rank {rank} of {size} is lost: {reason}")
        self.rank = rank
        self.reason = reason
