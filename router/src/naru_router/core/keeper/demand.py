"""How many copies a model's load asks for: averaged upwards, and the most of a long time downwards. Pure.

Every router meters, so that the one that becomes keeper knows the past. Nothing is known at first, and that counts as
no load upwards and as all load downwards: a router that has just started neither adds nor removes.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from naru_proto.registry import ModelRecord

_EPSILON = 1e-6
"""Sixteen requests on average are one copy of sixteen, whatever the sums round to."""
_NO_LOAD = 0.05
"""Requests in flight on average below which a model counts as unused: an average never gets to zero."""
_CARRIED_DELAYS = 3.0
"""What was learned of a copy's strength is forgotten after so many scale-down delays."""


@dataclass(slots=True)
class Demand:
    """Of one model. Mutable; `observe` is called about once a second."""

    first_s: float
    """When it was seen first."""
    seen_s: float
    in_flight: float = 0.0
    """Requests over all copies, averaged."""
    queue_s: float = 0.0
    """Of the copy with the shortest queue, averaged since the number of copies changed last."""
    active_s: float = -math.inf
    """When it had requests last."""
    num_up: int = 0
    carried: float = math.inf
    """Requests a copy had when queues were too long: it can carry less. Infinite: not seen."""
    carried_s: float = -math.inf
    """When that was."""
    _kept: deque[tuple[float, int]] = field(default_factory=deque)
    """Copies that were needed, from the most to the least, with the last time of each."""

    def observe(
        self, record: ModelRecord, num_in_flight: int, queue_s: float, num_up: int, headroom: float, now_s: float
    ) -> None:
        """Takes what the model has to do now."""
        # A mean over a window reaches half of a step after half of the window; so does this.
        time_s = max(record.scale_window_s, 1.0) / (2 * math.log(2))
        part = 1.0 - math.exp(-max(0.0, now_s - self.seen_s) / time_s)
        self.seen_s = now_s
        self.in_flight += (num_in_flight - self.in_flight) * part
        if num_up != self.num_up:
            self.num_up = num_up
            self.queue_s = 0.0  # what queued before says nothing of what the copies carry now
        self.queue_s += (queue_s - self.queue_s) * part
        if num_in_flight:
            self.active_s = now_s
        self._learn(record, now_s)
        self._keep(record, headroom, now_s)

    def num_wanted(self, record: ModelRecord) -> int:
        """Copies that the averaged load asks for; 0: none."""
        wanted = self._copies(max(1, record.target_in_flight))
        if self._is_short(record):
            wanted = max(wanted, self.num_up + 1)
        return wanted

    def num_kept(self, record: ModelRecord, now_s: float) -> int | None:
        """Most copies that were needed within the delay; None: it has not been watched for so long."""
        if now_s - self.first_s < record.scale_down_delay_s:
            return None
        return self._kept[0][1] if self._kept else 0

    def is_recent(self, now_s: float, recent_s: float) -> bool:
        """Whether it had requests lately."""
        return now_s - self.active_s <= recent_s

    def _copies(self, per_copy: float) -> int:
        return 0 if self.in_flight < _NO_LOAD else math.ceil(self.in_flight / per_copy - _EPSILON)

    def _is_short(self, record: ModelRecord) -> bool:
        return self.num_up > 0 and self.queue_s > record.target_queue_s

    def _learn(self, record: ModelRecord, now_s: float) -> None:
        """Long prompts queue at few requests: a copy less would bring that queue back."""
        if self._is_short(record):
            carried = max(_NO_LOAD, self.in_flight / self.num_up)
            self.carried, self.carried_s = min(self.carried, carried), now_s
        elif now_s - self.carried_s > _CARRIED_DELAYS * record.scale_down_delay_s:
            self.carried = math.inf

    def _keep(self, record: ModelRecord, headroom: float, now_s: float) -> None:
        kept = self._copies(min(max(1, record.target_in_flight), self.carried) * headroom)
        if self.queue_s > record.target_queue_s / 2:
            kept = max(kept, self.num_up)
        while self._kept and self._kept[-1][1] <= kept:
            self._kept.pop()
        self._kept.append((now_s, kept))
        while self._kept[0][0] < now_s - record.scale_down_delay_s:
            self._kept.popleft()
