"""The control loop of a cluster: look, plan, carry out, tell, wait for a change. One task, wired by `app`.

Acts only while this replica leads; what it then knows is a `Term`. Decisions are in `core.pools` and `core.models`. A
look that finds nothing changed costs two short exchanges with Redis, and writes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from naru_operator.adapters.cluster.term import Surroundings, Term, Turns
from naru_operator.adapters.kube.errors import NotLeader
from naru_proto.errors import NaruError, Unavailable

_log = logging.getLogger(__name__)

_LOOK_S = 2.0
"""Between two looks at the leases: one that expires announces nothing."""
_LEAST_S = 0.1
"""Between two turns: changes that come together are carried out together."""
_RELISTEN_S = 0.5
"""Before listening again after Redis went away."""
_MAX_LOOK_S = 60.0
"""A look that takes longer is given up, and what it has done is seen by the next one: an API server that accepts
requests and answers none would hold the loop for minutes."""


class ClusterController:
    """Brings the cluster to what its objects ask, and keeps it there."""

    def __init__(self, parts: Surroundings) -> None:
        self._parts = parts
        self._wake = asyncio.Event()
        self._term: Term | None = None
        """Since this replica leads; None while it does not."""
        self._is_deposed = False
        """The lead was lost since the last look, though it may have been won again."""
        self._store_version = 0
        """Counts changes of the store."""
        self.turns = Turns()

    def stalled_s(self) -> float:
        """Seconds since the loop last looked; 0 before it began."""
        return time.monotonic() - self.turns.last_look_s if self.turns.last_look_s else 0.0

    def wake(self) -> None:
        """Something may have changed: look now."""
        self._wake.set()

    def lead_changed(self, is_leader: bool) -> None:
        """The lead was won or lost. What waits for its turn is given up at once when it was lost."""
        if not is_leader and self._term is not None:
            self._is_deposed = True
            self._term.stop()
        self._wake.set()

    async def run(self) -> None:
        """The loop. Ends by cancellation only, which leaves everything as it is."""
        helpers = [
            asyncio.create_task(self._listen(), name="changes in the route map"),
            asyncio.create_task(self._follow_store(), name="changes of objects"),
        ]
        try:
            while True:
                self._wake.clear()
                started_s = time.monotonic()
                await self._look()
                spent_s = time.monotonic() - started_s
                await asyncio.sleep(max(_LEAST_S, min(spent_s, 1.0)))
                # asyncio.timeout, not wait_for: that one loses a cancellation that meets the event (before 3.12).
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await self._wake.wait()
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
            await self._end_term()

    async def _look(self) -> None:
        self.turns.last_look_s = time.monotonic()
        is_leader = self._parts.may_act()
        if self._is_deposed or not is_leader:
            await self._end_term()
        if not is_leader or not self._parts.store.is_synced:
            return
        if self._term is None:
            self._term = Term(self._parts, self.turns, self.wake)
        term = self._term
        try:
            async with asyncio.timeout(_MAX_LOOK_S):
                await term.look(self._store_version)
        except NotLeader:
            await self._end_term()
        except NaruError as exc:
            term.fail(exc.message)
        except TimeoutError:
            term.fail(f"a turn of the control loop took more than {_MAX_LOOK_S:.0f} s")
        except Exception as exc:
            # The top of the loop: a fault in one turn must not end the control of everything.
            if term.fail(f"a turn of the control loop failed ({type(exc).__name__}: {exc})"):
                _log.exception("where it failed")

    async def _end_term(self) -> None:
        self._is_deposed = False
        if self._term is not None:
            term, self._term = self._term, None
            await term.close()

    async def _listen(self) -> None:
        while True:
            try:
                async for _ in self._parts.route_map.changes():
                    self._wake.set()
            except Unavailable:
                pass  # each look tells it
            except Exception:
                # The top of a loop: without it changes would be seen at the next look only, once a second.
                _log.exception("listening for changes in the route map failed")
            await asyncio.sleep(_RELISTEN_S)

    async def _follow_store(self) -> None:
        changed = self._parts.store.changed
        while True:
            await changed.wait()
            changed.clear()
            self._store_version += 1
            self._wake.set()
