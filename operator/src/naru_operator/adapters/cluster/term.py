"""What one replica knows and has under way while it leads: from the look at the leases to the statuses. Made by the
controller, one for each time the lead is won: what an earlier term knew is not believed, all is read anew.

Order of a turn: observe, then pools and models side by side, so that an API server that hangs over a pod does not keep
models from moving to workers that live.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from naru_operator.adapters.cluster.event_sender import EventSender
from naru_operator.adapters.cluster.leases import DOUBT_S, Change, Leases
from naru_operator.adapters.cluster.models import ModelControl
from naru_operator.adapters.cluster.pools import PoolControl
from naru_operator.adapters.cluster.side_by_side import take_all
from naru_operator.adapters.cluster.status_writer import StatusWriter
from naru_operator.adapters.cluster.tellings import ModelTellings
from naru_operator.adapters.kube.client import KubeClient
from naru_operator.adapters.kube.store import ObjectStore
from naru_operator.adapters.route_map import RouteMap
from naru_operator.core.backoff import restart_delay_s
from naru_operator.core.pools.model import PodSettings
from naru_proto.errors import Unavailable

_log = logging.getLogger(__name__)

_SOON_S = 2.0
"""To the next full turn while something is under way."""
_LATER_S = 30.0
"""To the next full turn while nothing is."""
_SHARE_SOON, _SHARE_USE, _SHARE_LATER = 8, 20, 100
"""To the next full turn it is so many times as long as the last one took, at least: thousands of objects that nothing
happens to must not keep a core busy. Whatever happens is seen at once all the same.
"""
_MAX_SOON_S = 15.0
_MAX_RETRY_S = 5.0
"""To the next full turn after a failed one, at most; it comes sooner when anything changes."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a term works with."""

    store: ObjectStore
    client: KubeClient
    route_map: RouteMap
    may_act: Callable[[], bool]
    """Whether this replica leads right now."""
    pod_settings: PodSettings
    status_interval_s: float
    """Least time between two writes of a status that tell progress alone."""
    resync_s: float
    """Between two looks at what nobody announces, such as a disruption budget that somebody deleted."""


@dataclass(slots=True)
class Turns:
    """What the loop has done, for metrics and health."""

    num_turns: int = 0
    num_failures: int = 0
    last_s: float = 0.0
    """Seconds the last full turn took."""
    last_look_s: float = 0.0
    """Monotonic time of the last look."""


@dataclass(slots=True)
class _Due:
    """When the next full turn comes."""

    is_dirty: bool = True
    """At the next look."""
    seen_version: int = -1
    """Of the store, at the last full turn."""
    next_s: float = 0.0
    """Monotonic time, whatever happens."""
    checked_s: float = field(default_factory=time.monotonic)
    """When what others may have changed was last looked at."""
    turned_s: float = 0.0
    """When the last full turn ended."""


class Term:
    """Everything that is known while this replica leads. asyncio thread only."""

    def __init__(self, parts: Surroundings, turns: Turns, wake: Callable[[], None]) -> None:
        """``wake`` asks the loop to look again soon."""
        self._parts, self._turns, self._wake = parts, turns, wake
        self._is_over = False
        self._due = _Due()
        self._trouble = ""
        self._num_failures = 0
        """In a row."""
        self._was_away = False
        """Redis did not answer at the last look."""
        self._has_begun = False
        """A turn was taken that knew the leases."""
        self._leases = Leases(parts.route_map, self._worker_gone)
        self._statuses = StatusWriter(parts.client, parts.status_interval_s, _log.warning)
        self._events = EventSender(parts.client)
        self._pools = PoolControl(parts.store, parts.client, self._statuses, self._events, parts.pod_settings)
        self._models = ModelControl(
            parts.store, parts.client, self._statuses, self._leases, self._may_act, self._command_ended
        )
        self._tellings = ModelTellings(self._events, self._statuses, parts.route_map)

    async def look(self, store_version: int) -> None:
        """One look, and a full turn if it found anything. ``store_version`` counts changes of the store.

        Raises:
            NotLeader: this replica may not act any more.
            NaruError: something could not be read or written; it is tried again.
        """
        redis_trouble = await self._refresh()
        began_s = time.monotonic()
        due = self._due
        if began_s - due.checked_s > self._parts.resync_s:
            due.checked_s, due.is_dirty = began_s, True
            self._pools.forget()
            self._statuses.forget()
        if not (due.is_dirty or store_version != due.seen_version or began_s >= due.next_s):
            return
        await self._pools.observe()
        await self._models.observe()
        if self._must_wait():
            return
        due.is_dirty, due.seen_version = False, store_version
        await self._turn(redis_trouble)
        self._turns.num_turns += 1
        due.turned_s = time.monotonic()
        self._turns.last_s = due.turned_s - began_s
        is_moving = self._pools.is_moving or self._models.is_moving or self._tellings.is_moving
        due.next_s = due.turned_s + self._pause_s(is_moving=is_moving or not self._leases.is_certain)
        if redis_trouble is not None:
            raise redis_trouble
        self._recover()

    def fail(self, message: str) -> bool:
        """A turn failed: another one comes, the later the more failed in a row. Returns whether the words are new."""
        self._turns.num_failures += 1
        self._num_failures += 1
        self._due.next_s = time.monotonic() + min(_MAX_RETRY_S, restart_delay_s(self._num_failures))
        if message == self._trouble:
            return False
        self._trouble = message
        _log.warning("%s; trying again", message)
        return True

    def stop(self) -> None:
        """The lead is lost: nothing that waits for its turn is begun any more."""
        self._is_over = True
        self._models.give_up()

    async def close(self) -> None:
        """Gives up what is under way; nothing is undone."""
        self.stop()
        await self._models.close()
        await self._statuses.close()
        await self._events.close()

    async def _refresh(self) -> Unavailable | None:
        try:
            change = await self._leases.refresh()
        except Unavailable as exc:
            self._was_away = True
            return exc
        if change is Change.NEWS or self._was_away:
            self._due.is_dirty = True
        elif change is Change.USE:
            pause_s = max(self._parts.status_interval_s, _SHARE_USE * self._turns.last_s)
            self._due.next_s = min(self._due.next_s, self._due.turned_s + pause_s)
        self._was_away = False
        return None

    def _pause_s(self, *, is_moving: bool) -> float:
        last_s = self._turns.last_s
        if is_moving:
            return min(max(_SOON_S, _SHARE_SOON * last_s), _MAX_SOON_S)
        return max(_LATER_S, _SHARE_LATER * last_s)

    def _must_wait(self) -> bool:
        """Whether leases that should be there are missing in a map that is read for the first time.

        It may have been emptied before: then workers seem lost that serve, and their statuses would say so.
        """
        leases = self._leases
        if self._has_begun or not leases.is_known:
            return False
        self._has_begun = leases.known_s >= DOUBT_S or not self._pools.has_silent_pod(leases.board.workers)
        return not self._has_begun

    async def _turn(self, redis_trouble: Unavailable | None) -> None:
        leases = self._leases
        steps = [
            self._pools.turn(
                leases.board.workers,
                now_s=time.time(),
                may_delete=redis_trouble is None and leases.is_certain,
                may_tell=leases.is_known,
            )
        ]
        if redis_trouble is None:  # without leases nobody knows where a model is
            steps.append(self._turn_models())
        failures = await take_all(steps, len(steps))
        if failures:
            raise failures[0]

    async def _turn_models(self) -> None:
        models = self._models
        plan = await models.turn(self._pools.pools, now_s=int(time.time()))
        await self._tellings.turn(models.models, plan, models.workers, models.failed, now_s=int(time.time()))

    def _may_act(self) -> bool:
        return not self._is_over and self._parts.may_act()

    def _recover(self) -> None:
        self._num_failures = 0
        if self._trouble:
            self._trouble = ""
            _log.info("the control loop works again")

    def _worker_gone(self, worker_id: str) -> None:
        self._models.worker_gone(worker_id)

    def _command_ended(self) -> None:
        self._due.is_dirty = True
        self._wake()
