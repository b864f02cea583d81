"""Writes statuses: only what differs, one write for an object at a time, progress alone not too often.

Called by the controls, which do not wait: a slow API server delays the telling, never the doing. A write that fails is
tried again here, later and later, with what is then to be told; meanwhile it counts as told.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from naru_operator.adapters.cluster.objects import status_object
from naru_operator.adapters.kube.errors import ApiAway, Conflict, NotFound, NotLeader
from naru_operator.core.kube import Object, ObjectKey
from naru_proto.crd.base import CrdModel
from naru_proto.errors import NaruError

MAX_WRITES = 12
"""Under way at once."""
_RETRY_S = 2.0
"""After the first failure; doubled with each further one."""
_MAX_AWAY_S = 8.0
_MAX_REFUSED_S = 64.0
"""Longest pauses: after no answer, and after an answer that will hardly be another one next time."""

Slot = tuple[str, ObjectKey]
"""Kind and key."""


class StatusClient(Protocol):
    """What writes."""

    async def apply_status(self, item: Object) -> object:
        """Server-side apply on the status subresource."""


@dataclass(slots=True)
class _Told:
    uid: str
    status: CrdModel
    """As it was last written, or is being written."""
    at_s: float


class StatusWriter:
    """What is told about every object. asyncio thread only."""

    def __init__(self, client: StatusClient, interval_s: float, on_trouble: Callable[[str], None]) -> None:
        """``interval_s``: least time between two writes of an object that tell progress alone. ``on_trouble`` hears of
        writes that fail, in words that it has not heard before.
        """
        self._client = client
        self._interval_s = interval_s
        self._on_trouble = on_trouble
        self._told: dict[Slot, _Told] = {}
        self._next: dict[Slot, tuple[Object, CrdModel]] = {}
        """What is still to be written."""
        self._tasks: dict[Slot, asyncio.Task[None]] = {}
        self._gate = asyncio.Semaphore(MAX_WRITES)
        self._said: dict[Slot | None, str] = {}
        """Troubles that were told; under None that of the API server itself."""
        self.num_writes = 0
        """Since the start."""

    def last(self, kind: str, key: ObjectKey, uid: str, stored: CrdModel) -> CrdModel:
        """What was last told about an object: by us, or before us (``stored``)."""
        told = self._told.get((kind, key))
        return told.status if told is not None and told.uid == uid else stored

    def tell(self, kind: str, key: ObjectKey, raw: Object, status: CrdModel, *, is_progress_only: bool) -> bool:
        """Takes a status that differs from `last`; returns whether it will be written, or must be offered again."""
        slot, now_s = (kind, key), time.monotonic()
        told = self._told.get(slot)
        if is_progress_only and told is not None and now_s - told.at_s < self._interval_s:
            return False
        uid = str(raw["metadata"].get("uid", ""))
        if told is not None and told.uid != uid:
            self._stop(slot)  # what is under way is about an object that is gone
        self._told[slot] = _Told(uid, status, now_s)
        self._next[slot] = (raw, status)
        if slot not in self._tasks:
            self._tasks[slot] = asyncio.create_task(self._write(slot), name=f"status of {kind} {key}")
        return True

    def forget(self) -> None:
        """Believes what the API server shows from now on: another hand may have changed it."""
        self._told = {slot: told for slot, told in self._told.items() if slot in self._tasks}

    def keep_only(self, kind: str, keys: set[ObjectKey]) -> None:
        """Forgets objects that are gone, and what was still to be written of them."""
        for slot in [slot for slot in self._told if slot[0] == kind and slot[1] not in keys]:
            del self._told[slot]
            self._said.pop(slot, None)
            self._stop(slot)

    async def close(self) -> None:
        """Gives up what is under way."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _stop(self, slot: Slot) -> None:
        self._next.pop(slot, None)
        task = self._tasks.pop(slot, None)
        if task is not None:
            task.cancel()

    async def _write(self, slot: Slot) -> None:
        """Until nothing is left to be told of this object."""
        num_failures = 0
        try:
            while slot in self._next:
                try:
                    async with self._gate:
                        # Taken here: what is told while others write takes the place of what it overtakes.
                        due = self._next.pop(slot)
                        self.num_writes += 1
                        await self._client.apply_status(status_object(*due))
                except (NotFound, Conflict, NotLeader):
                    continue  # it is gone, another one has its name, or another replica tells: the watch will show
                except NaruError as exc:
                    num_failures += 1
                    self._complain(slot, exc)
                    self._next.setdefault(slot, due)
                    await asyncio.sleep(_pause_s(num_failures, exc))
                else:
                    num_failures = 0
                    self._said.pop(slot, None)
                    self._said.pop(None, None)
        finally:
            # Not in a callback of the task: a status that is told before that runs would never be written.
            if self._tasks.get(slot) is asyncio.current_task():
                del self._tasks[slot]

    def _complain(self, slot: Slot, exc: NaruError) -> None:
        """Once for each object, but once for all when the API server is away."""
        is_away = isinstance(exc, ApiAway)
        about, words = (None, "away") if is_away else (slot, exc.message)
        if self._said.get(about) != words:
            self._said[about] = words
            self._on_trouble(f"the status of {slot[0]} {slot[1]} was not written, trying again: {exc.message}")


def _pause_s(num_failures: int, exc: NaruError) -> float:
    longest_s = _MAX_AWAY_S if isinstance(exc, ApiAway) else _MAX_REFUSED_S
    return min(longest_s, _RETRY_S * 2.0 ** min(num_failures - 1, 16))
