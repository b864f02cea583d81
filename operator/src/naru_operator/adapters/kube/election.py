"""Keeps the lease of the acting replica: reads, writes and releases it, and tells who leads. Run by the app.

What to do is decided in `core.leadership`. The client given here should be the election's own: a renewal must not wait
behind other requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

from naru_operator.adapters.kube.caller import ClientSettings
from naru_operator.adapters.kube.client import KubeClient
from naru_operator.adapters.kube.errors import AlreadyExists, ApiAway, Conflict, Forbidden, NotFound
from naru_operator.adapters.kube.kinds import LEASE
from naru_operator.core.kube import Object, ObjectKey
from naru_operator.core.leadership import Candidate, LeaseRecord, Move, Timing
from naru_proto import names
from naru_proto.errors import NaruError

logger = logging.getLogger(__name__)

_NEEDED = (("get", names.LEASE_OPERATOR), ("create", ""), ("update", names.LEASE_OPERATOR))
"""Verbs, and the name they are about: a Role may give them for that lease alone."""


def election_client_settings(timing: Timing) -> ClientSettings:
    """For the election's own client: impatient, as the next attempt comes soon anyway."""
    return ClientSettings(
        num_threads=2, connect_timeout_s=timing.renew_s, read_timeout_s=timing.renew_s, retry_pauses_s=()
    )


class Election:
    """`async with Election(...)`: takes part from entry; releases the lease on exit.

    Whoever acts on `is_leader` must have stopped before the exit.
    """

    def __init__(
        self,
        client: KubeClient,
        namespace: str,
        identity: str,
        *,
        timing: Timing | None = None,
        on_change: Callable[[bool], None] = lambda is_leader: None,
    ) -> None:
        """``identity`` must be no other replica's. ``on_change`` is called in the loop when the lead is won or lost."""
        self._client = client
        self._key = ObjectKey(namespace, names.LEASE_OPERATOR)
        self._timing = timing or Timing()
        self._candidate = Candidate(identity, self._timing)
        self._on_change = on_change
        self._leading = asyncio.Event()
        self._has_told = False
        """Whether the last thing `on_change` heard is that this replica leads."""
        self._task: asyncio.Task[None] | None = None
        self._told = ""

    @property
    def is_leader(self) -> bool:
        """Whether this replica may act right now. Safe in any thread."""
        return self._candidate.is_leader(time.monotonic())

    @property
    def holder(self) -> str:
        """Who held the lease when it was last seen; empty: nobody, or it was never seen."""
        return self._candidate.record.holder if self._candidate.record is not None else ""

    async def wait_leading(self) -> None:
        """Returns once this replica leads."""
        while not self.is_leader:
            self._leading.clear()
            await self._leading.wait()  # set by each successful write

    async def check_access(self) -> None:
        """Fails where the lease could never be kept.

        Raises:
            Forbidden: the operator's Role lacks a permission on leases.
        """
        missing = []
        for verb, name in _NEEDED:
            with contextlib.suppress(ApiAway):  # it may come back; who leads is decided then
                if await self._client.is_allowed(verb, LEASE, self._key.namespace, name=name) is False:
                    missing.append(verb)
        if missing:
            raise Forbidden(
                f"no replica can lead: the permission to {', '.join(missing)} {LEASE.resource} in namespace "
                f"{self._key.namespace!r} is missing; add it to the operator's Role, or turn leader election off"
            )

    async def __aenter__(self) -> Self:
        """Checks permissions and begins.

        Raises:
            Forbidden: as `check_access`.
        """
        await self.check_access()
        self._task = asyncio.create_task(self._run(), name="election")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the election and lets another replica take over at once."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        was_leader = self.is_leader
        self._step_down("this replica ends")
        if was_leader:
            await self._release()

    async def _run(self) -> None:
        while True:
            try:
                pause_s = await self._turn()
            except Exception:
                # The top of the loop: a fault here must not end the election; the deadline still holds.
                logger.exception("a turn of the election failed")
                pause_s = self._timing.renew_s
            await asyncio.sleep(pause_s)

    async def _turn(self) -> float:
        """One look and one move; returns the seconds until the next. Takes no longer than this replica may act."""
        held_until_s = self._candidate.held_until_s
        left_s = None if held_until_s is None else max(held_until_s - time.monotonic(), 0.0)
        try:
            async with asyncio.timeout(left_s):
                await self._look_and_move()
        except TimeoutError:
            pass  # the deadline came while a request hangs
        except NaruError as exc:
            self._tell(f"the lease {self._key} cannot be kept: {exc.message}")
        decision = self._candidate.decide(time.monotonic())
        if decision.move is Move.STEP_DOWN:
            self._step_down(decision.reason)
            return 0.0
        pause_s = self._timing.renew_s * random.uniform(0.9, 1.0)
        until_s = self._candidate.held_until_s
        return pause_s if until_s is None else max(min(pause_s, until_s - time.monotonic()), 0.0)

    async def _look_and_move(self) -> None:
        if self._candidate.decide(time.monotonic()).move is not Move.RENEW:
            await self._look()
        for _ in range(2):
            decision = self._candidate.decide(time.monotonic())
            if decision.move not in (Move.ACQUIRE, Move.RENEW):
                return
            try:
                await self._write(decision.reason)
                return
            except (Conflict, AlreadyExists, NotFound):
                await self._look()  # somebody wrote in between: see who

    async def _look(self) -> None:
        try:
            lease = await self._client.get(LEASE.name, self._key)
        except NotFound:
            self._candidate.saw(None, time.monotonic())
        else:
            self._candidate.saw(_record(lease), time.monotonic())

    async def _write(self, reason: str) -> None:
        before = self._candidate.record
        identity = self._candidate.identity
        is_mine = before is not None and before.holder == identity
        sent_s = time.monotonic()
        lease = self._lease(identity, before, is_mine=is_mine)
        lease = await (self._client.create(lease) if before is None else self._client.replace(lease))
        self._candidate.wrote(_record(lease), sent_s, time.monotonic())
        self._told = ""
        self._leading.set()
        if not self._has_told:
            self._has_told = True
            logger.info("this replica (%s) leads: %s", identity, reason)
            self._on_change(True)

    def _step_down(self, reason: str) -> None:
        self._candidate.step_down()
        if self._has_told:
            self._has_told = False
            logger.warning("this replica (%s) leads no more: %s", self._candidate.identity, reason)
            self._on_change(False)

    async def _release(self) -> None:
        lease = self._lease("", self._candidate.record, is_mine=True)
        try:
            await self._client.replace(lease)
        except NaruError as exc:
            logger.info("the lease was not released, others wait for its end: %s", exc.message)

    def _lease(self, holder: str, before: LeaseRecord | None, *, is_mine: bool) -> Object:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        metadata: dict[str, Any] = {"namespace": self._key.namespace, "name": self._key.name}
        spec = {
            "holderIdentity": holder,
            "leaseDurationSeconds": math.ceil(self._timing.lease_s) if holder else 1,
            "acquireTime": now,
            "renewTime": now,
            "leaseTransitions": 0,
        }
        if before is not None:
            metadata["resourceVersion"] = before.version
            spec["leaseTransitions"] = before.num_transitions + (0 if is_mine else 1)
            if is_mine and before.acquired_at:
                spec["acquireTime"] = before.acquired_at
        return {"apiVersion": LEASE.api_version, "kind": LEASE.name, "metadata": metadata, "spec": spec}

    def _tell(self, trouble: str) -> None:
        """Once for each trouble, not at each attempt."""
        if trouble != self._told:
            self._told = trouble
            logger.warning("%s", trouble)


def _record(lease: Object) -> LeaseRecord:
    """Reads a lease; what is missing or of a wrong type counts as absent."""
    spec = lease.get("spec") or {}
    duration, transitions = spec.get("leaseDurationSeconds"), spec.get("leaseTransitions")
    return LeaseRecord(
        holder=str(spec.get("holderIdentity") or ""),
        duration_s=float(duration) if isinstance(duration, int) else 0.0,
        acquired_at=str(spec.get("acquireTime") or ""),
        renewed_at=str(spec.get("renewTime") or ""),
        version=str(lease["metadata"].get("resourceVersion") or ""),
        num_transitions=transitions if isinstance(transitions, int) else 0,
    )
