"""The keeper's loop: every router watches, the one that holds the lease moves copies. Started by the app.

Each move is told to one worker with a deadline and a fencing token: of the model's load lease where a copy comes up, so
that requests and keeper never load a model twice; else a fresh one of the keeper's lease. Redis away: nothing moves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from naru_proto import names
from naru_proto.beats import until_beat_s
from naru_proto.errors import NaruError, Unavailable
from naru_proto.v1 import worker_pb2
from naru_router.adapters.leases import Leases, Tenure
from naru_router.core.keeper.keeper import Keeper
from naru_router.core.keeper.model import Direction, KeeperView, Move

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
LEASE_TTL_S = 5.0
TAKEOVER_PAUSE_S = 2.0
"""After it was taken: by then the moves of the one before are seen in the workers' leases."""
MOVE_TIMEOUT_S = 2.0
"""A worker answers once a move is under way."""
LOAD_LEASE_TTL_S = 5.0
"""Of a model that comes up: by then its worker's lease says so."""
MAX_REMEMBERED = 50


class NotNow(Unavailable):
    """A move that was not asked for, though no worker refused it."""


class Views(Protocol):
    """Shows the instant; see adapters.keeper.sight."""

    def view(self) -> KeeperView:
        """What the keeper sees now."""


class Workers(Protocol):
    """Reaches workers; see adapters.fleet_workers."""

    async def move(self, worker_id: str, request: worker_pb2.MoveRequest, timeout_s: float) -> worker_pb2.MoveReply:
        """Tells a worker.

        Raises:
            NaruError: it refuses, or does not answer.
        """


class KeeperMetrics(Protocol):
    """What is counted of the keeper."""

    def set_keeper(self, is_keeper: bool) -> None:
        """Whether this router is the keeper."""

    def count_move(self, direction: str, reason: str, outcome: str) -> None:
        """`outcome`: done or refused."""


@dataclass(frozen=True, slots=True)
class MoveNote:
    """One move and what came of it, for people."""

    at_s: float
    """Unix seconds."""
    move: Move
    refusal: str = ""
    """Empty: it is under way."""


class KeeperLoop:
    """Watches while `run` runs, and acts while it holds the lease."""

    def __init__(
        self,
        keeper: Keeper,
        sight: Views,
        workers: Workers,
        leases: Leases,
        metrics: KeeperMetrics,
        *,
        interval_s: float = INTERVAL_S,
        takeover_pause_s: float = TAKEOVER_PAUSE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.keeper = keeper
        self.sight = sight
        self.recent: deque[MoveNote] = deque(maxlen=MAX_REMEMBERED)
        """The last moves of this router, oldest first."""
        self._workers = workers
        self._leases = leases
        self._tenure = Tenure(leases, names.KEY_KEEPER, LEASE_TTL_S, clock=clock)
        self._metrics = metrics
        self._interval_s = interval_s
        self._takeover_pause_s = takeover_pause_s
        self._clock = clock
        self._held_since_s: float | None = None
        self._is_redis_away = False

    @property
    def is_keeper(self) -> bool:
        """Whether this router moves copies now."""
        return self._tenure.is_held

    def now_s(self) -> float:
        """The clock of the keeper's times."""
        return self._clock()

    async def run(self) -> None:
        """Until cancelled; then the lease is given back, and another router goes on at once."""
        try:
            while True:
                await self.tick()
                await asyncio.sleep(until_beat_s(asyncio.get_running_loop().time(), self._interval_s))
        finally:
            self._metrics.set_keeper(False)
            with contextlib.suppress(Unavailable):  # it ends by itself
                await self._tenure.give_up()

    async def tick(self) -> None:
        """Looks once, and moves what is to be moved."""
        try:
            view, now_s = self.sight.view(), self._clock()
            for _ in self.keeper.observing(view, now_s):
                await asyncio.sleep(0)  # requests come first
            if await self._may_act():
                moves = self.keeper.plan(view, now_s)
                await asyncio.gather(*(self._carry_out(move) for move in moves))
        except Exception:
            # The top of the loop: one faulty look must not end the watch of all models.
            logger.exception("the keeper failed on what it saw; it looks again")

    async def _may_act(self) -> bool:
        """Keeps the lease, or tries to get it."""
        try:
            # While no model needs a move it is renewed as often as it must, before a move always.
            is_rested = self._tenure.is_fresh and not self.keeper.watch.restless
            is_held = is_rested or await self._tenure.keep()
        except Unavailable as exc:
            if not self._is_redis_away:
                logger.warning("the keeper moves nothing while Redis is away: %s", exc.message)
            self._is_redis_away = True
            self._metrics.set_keeper(self.is_keeper)
            return False
        self._is_redis_away = False
        self._metrics.set_keeper(is_held)
        if not is_held:
            self._held_since_s = None
            return False
        if self._held_since_s is None:
            logger.info("this router is the keeper now")
            self._held_since_s = self._clock()
        return self._clock() - self._held_since_s >= self._takeover_pause_s

    async def _carry_out(self, move: Move) -> None:
        try:
            await self._tell(move)
        except NotNow as exc:
            self.keeper.postponed(move, self._clock())
            logger.debug("the keeper's move of %r waits: %s", move.model, exc.message)
        except NaruError as exc:
            self.keeper.refused(move, self._clock())
            self._note(move, exc.message)
        else:
            self._note(move, "")

    async def _tell(self, move: Move) -> None:
        """Tells the worker under a token.

        Raises:
            NotNow: the lease is lost or Redis away, or the model comes up for a request already.
            NaruError: the worker refuses or does not answer.
        """
        is_up = move.direction is Direction.UP
        key = names.key_load_lease(move.model)
        try:
            lease = await self._leases.take(key, LOAD_LEASE_TTL_S, move.worker_id) if is_up else None
            token = lease.token if lease is not None else 0 if is_up else await self._tenure.fence()
        except Unavailable as exc:
            raise NotNow(exc.message) from exc
        if is_up and lease is None:
            raise NotNow("it comes up for a request already")
        try:
            if not token or not self._tenure.is_held:
                raise NotNow("another router is the keeper now")
            request = worker_pb2.MoveRequest(
                model=move.model,
                tier=worker_pb2.TIER_ACTIVE if is_up else worker_pb2.TIER_HOST,
                fencing_token=token,
                only_if_idle=not is_up,
            )
            await self._workers.move(move.worker_id, request, MOVE_TIMEOUT_S)
        except NaruError:
            if lease is not None:
                with contextlib.suppress(Unavailable):  # it ends by itself
                    await self._leases.release(key, lease)
            raise

    def _note(self, move: Move, refusal: str) -> None:
        self.recent.append(MoveNote(time.time(), move, refusal))
        self._metrics.count_move(move.direction.value, move.reason.value, "refused" if refusal else "done")
        what = f"{move.model!r} {'up on' if move.direction is Direction.UP else 'down on'} {move.worker_id!r}"
        if refusal:
            logger.info("the keeper's move of %s (%s) is refused: %s", what, move.reason.value, refusal)
        else:
            logger.info("the keeper moves %s: %s: %s", what, move.reason.value, move.why)
