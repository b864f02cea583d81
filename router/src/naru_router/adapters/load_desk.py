"""Has a model that nobody holds brought up once, however many requests wait for it in however many routers.

Asked by the dispatcher where no worker has a model ready or on its way. The first router takes the model's load lease
in Redis, with the worker that placement names, and tells that worker under the lease's fencing token; the others read
there which worker it is, and all send their requests to it. The lease is kept while the load lasts, whoever still waits
for it, and a little longer: a router whose map is late must find it. Where the worker dies or refuses, a new lease with
a newer token names another one.

It sends no requests, and chooses no worker. Redis away or slow: it says so at once, and requests are placed by the
model's name, which is the same in all routers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from naru_proto import names
from naru_proto.errors import InternalError, ModelNotFound, NaruError, StaleCommand, Unavailable
from naru_proto.registry import LeaseRecord
from naru_proto.v1 import worker_pb2
from naru_router.adapters.load_site import Choose, LoadLeases, LoadWorkers, Site

logger = logging.getLogger(__name__)

LEASE_TTL_S = 5.0
"""Of a router that dies while a model comes up; the others follow its lease for so long."""
EXCHANGE_TIMEOUT_S = 0.5
"""Requests wait no longer than this for Redis."""
AWAY_S = 1.0
"""A Redis that did not answer is asked by nobody for so long, and then by one who does not wait."""
LINGER_S = 2.0
"""After a load: twice the time in which every router has read the route map again."""
MOVE_TIMEOUT_S = 2.0
"""A worker says at once that it sets out."""
SILENCE_S = 30.0
"""A worker whose lease shows nothing of the load for so long has given it up, or waits for room in vain."""
UNSHOWN_S = 1.0
"""A worker that has set out says so in its lease well within this."""
_LOOK_AGAIN_S = 0.5
"""At another router's lease whose worker cannot be reached."""
_PAUSE_S = 0.02
_PROBE_KEY = names.key_load_lease("")
"""Of no model."""
_PROBE_TTL_S = 0.001
PATIENCE_S = 2 * LEASE_TTL_S
"""A lease that names a worker that cannot be reached is waited for so long: its holder ends it, or it ends itself."""
_MAX_STALE = 3
"""Newer tokens than ours that we go on after, before another worker is asked."""


@dataclass(slots=True, eq=False)
class _Case:
    """One model that is to come up. Mutable."""

    model: str
    choose: Choose
    avoid: set[str]
    """Workers that refused, or failed somebody."""
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    site: Site | None = None
    num_waiters: int = 0
    num_stale: int = 0
    has_had_waiters: bool = False
    task: asyncio.Task[None] | None = None

    @property
    def is_forsaken(self) -> bool:
        """Nobody waits any more, and nothing was begun."""
        return self.has_had_waiters and not self.num_waiters

    @property
    def key(self) -> str:
        """Of its lease."""
        return names.key_load_lease(self.model)


class LoadDesk:
    """All models that come up for requests of this router. One event loop."""

    def __init__(
        self,
        leases: LoadLeases,
        workers: LoadWorkers,
        *,
        router_id: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`router_id`: what `leases` are taken under."""
        self._router_id = router_id
        self._leases = leases
        self._workers = workers
        self._clock = clock
        self._cases: dict[str, _Case] = {}
        self._ended: set[asyncio.Task[None]] = set()
        """Tasks of cases that were given up, and still give their leases back."""
        self._is_away = False
        self._probe: asyncio.Task[None] | None = None

    @property
    def is_away(self) -> bool:
        """Whether Redis is known not to answer."""
        return self._is_away

    def site(self, model: str) -> Site | None:
        """Where a model comes up, where this router has asked; takes nothing."""
        case = self._cases.get(model)
        return None if case is None else case.site

    def coming(self) -> dict[str, str]:
        """Models that come up where this router has asked, and their workers."""
        return {model: case.site.worker_id for model, case in self._cases.items() if case.site is not None}

    async def where(self, model: str, choose: Choose, avoid: frozenset[str] = frozenset()) -> Site | None:
        """Where a model that nobody has ready or on its way comes up; cancelling it stops no load.

        None: look again who has it by now, and place it by its name where that is nobody.

        Args:
            model: as workers know it.
            choose: asked where this router is to have it loaded.
            avoid: workers that have failed the request that asks.
        """
        case = self._cases.get(model)
        if case is not None and case.site is not None and not self._is_good(case, case.site.worker_id, avoid):
            self._give_up(case)
            case = None
        if case is None:
            if self._is_away:
                return None
            case = self._open(model, choose)
        case.avoid |= avoid
        case.num_waiters += 1
        case.has_had_waiters = True
        try:
            await case.decided.wait()
        finally:
            case.num_waiters -= 1
        return case.site

    async def close(self) -> None:
        """Ends all, and gives the leases back; loads go on."""
        tasks = [case.task for case in self._cases.values() if case.task is not None]
        if self._probe is not None:
            tasks.append(self._probe)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._ended, return_exceptions=True)

    # --- cases ------------------------------------------------------------------------------------------------------

    def _open(self, model: str, choose: Choose) -> _Case:
        case = self._cases[model] = _Case(model, choose, set())
        case.task = asyncio.create_task(self._run(case), name=f"load of {model}")
        return case

    def _give_up(self, case: _Case) -> None:
        del self._cases[case.model]
        task = case.task
        assert task is not None, "it was opened with one"
        task.cancel()
        self._ended.add(task)
        task.add_done_callback(self._ended.discard)

    def _is_good(self, case: _Case, worker_id: str, avoid: frozenset[str] | set[str]) -> bool:
        return worker_id not in avoid and self._workers.can_load(worker_id, case.model)

    def _is_shown(self, case: _Case, worker_id: str) -> bool:
        """Whether the worker's lease says that the load is under way."""
        return self._workers.state(worker_id, case.model) in ("loading", "fetching")

    async def _run(self, case: _Case) -> None:
        try:
            lease = await self._decide(case)
            case.decided.set()
            if lease is not None:
                await self._keep(case, lease)
            elif case.site is not None:
                await self._follow(case, case.site)
        except Exception:
            # The top of a task: those who wait place the model by its name, and the next one asks anew.
            logger.exception("having the model %s loaded failed", case.model)
        finally:
            if self._cases.get(case.model) is case:
                del self._cases[case.model]
            case.decided.set()

    async def _decide(self, case: _Case) -> LeaseRecord | None:
        """Sets the site, if there is one; gives the lease where it is ours."""
        until_s = self._clock() + PATIENCE_S
        while self._clock() < until_s and not (case.is_forsaken or self._workers.is_served(case.model)):
            worker_id = case.choose(frozenset(case.avoid))
            if worker_id is None:
                return None
            try:
                async with asyncio.timeout(EXCHANGE_TIMEOUT_S):
                    lease = await self._leases.take(case.key, LEASE_TTL_S, worker_id)
                    lease = lease or await self._leases.read(case.key)
            except (Unavailable, TimeoutError) as exc:
                self._note_away(exc)
                return None
            if lease is None:
                await asyncio.sleep(_PAUSE_S)  # it ended between the two, or cannot be read
                continue
            is_good = self._is_good(case, lease.worker_id, case.avoid)
            if lease.holder == self._router_id:
                # Perhaps from a question whose answer was lost, or of a case that was just given up.
                if is_good and await self._begin(case, lease):
                    return lease
                await self._give_back(case, lease)
            elif is_good:
                why = "another router has it loaded there"
                case.site = Site(lease.worker_id, why, self._clock())
                return None
            else:
                await self._workers.changed(_LOOK_AGAIN_S)
        return None

    async def _begin(self, case: _Case, lease: LeaseRecord) -> bool:
        """Tells the worker; False: it refuses."""
        worker_id = lease.worker_id
        request = worker_pb2.MoveRequest(
            model=case.model, tier=worker_pb2.TIER_ACTIVE, fencing_token=lease.token, for_request=True
        )
        eta_s = 0.0
        try:
            reply = await self._tell(case, lease, request)
            if reply.state == worker_pb2.MODEL_STATE_FAILED:
                raise Unavailable(f"the model {case.model!r} has failed to load there")
            eta_s = reply.eta_s
        except InternalError:
            pass  # of an older version, perhaps: the requests themselves bring it up
        except StaleCommand as exc:
            # Somebody has acted under a newer lease: with one newer than that, we may.
            case.num_stale += 1
            if case.num_stale >= _MAX_STALE:
                case.avoid.add(worker_id)
            logger.info("worker %s refuses to load %s: %s", worker_id, case.model, exc.message)
            return False
        except NaruError as exc:
            if isinstance(exc, ModelNotFound):
                self._workers.mark_unknown(worker_id, case.model)
            case.avoid.add(worker_id)
            logger.info("worker %s does not load %s: %s", worker_id, case.model, exc.message)
            return False
        case.site = Site(worker_id, "this router has it loaded there", self._clock(), eta_s)
        return True

    async def _tell(self, case: _Case, lease: LeaseRecord, request: worker_pb2.MoveRequest) -> worker_pb2.MoveReply:
        try:
            return await self._workers.move(lease.worker_id, request, MOVE_TIMEOUT_S)
        except asyncio.CancelledError:
            await self._give_back(case, lease)
            raise

    async def _keep(self, case: _Case, lease: LeaseRecord) -> None:
        """Holds the lease while the load lasts."""
        try:
            await self._watch(case, lease)
        finally:
            await self._give_back(case, lease)

    async def _watch(self, case: _Case, lease: LeaseRecord) -> None:
        worker_id = lease.worker_id
        began_s = renewed_s = seen_s = self._clock()
        while True:
            if self._workers.is_served(case.model):
                await asyncio.sleep(LINGER_S)
                return
            now_s = self._clock()
            if self._is_shown(case, worker_id):
                seen_s = now_s
            # A failure from before, in a lease that is behind, says nothing of this load.
            is_news = seen_s > began_s or now_s - began_s > UNSHOWN_S
            has_failed = is_news and self._workers.state(worker_id, case.model) == "failed"
            if has_failed or now_s - seen_s > SILENCE_S or not self._workers.can_load(worker_id, case.model):
                return
            if now_s - renewed_s >= LEASE_TTL_S / 3:
                if not await self._renew(case, lease):
                    return
                renewed_s = now_s
            await self._workers.changed(LEASE_TTL_S / 3)

    async def _follow(self, case: _Case, site: Site) -> None:
        """Remembers another router's lease while it is sure to last, so that the next requests need not ask.

        Not for long while the worker shows nothing of the load: it may have refused, and the lease name another by now.
        """
        began_s = self._clock()
        while self._is_good(case, site.worker_id, case.avoid):
            limit_s = LEASE_TTL_S if self._is_shown(case, site.worker_id) else UNSHOWN_S
            rest_s = began_s + limit_s - self._clock()
            if rest_s <= 0:
                return
            await self._workers.changed(rest_s)

    # --- Redis ------------------------------------------------------------------------------------------------------

    async def _renew(self, case: _Case, lease: LeaseRecord) -> bool:
        try:
            async with asyncio.timeout(EXCHANGE_TIMEOUT_S):
                return await self._leases.renew(case.key, lease, LEASE_TTL_S)
        except (Unavailable, TimeoutError) as exc:
            self._note_away(exc)
            return True  # nobody else can have taken it meanwhile, or the next renewal says so

    async def _give_back(self, case: _Case, lease: LeaseRecord) -> None:
        try:
            async with asyncio.timeout(EXCHANGE_TIMEOUT_S):
                await self._leases.release(case.key, lease)
        except (Unavailable, TimeoutError) as exc:
            self._note_away(exc)  # it ends by itself

    def _note_away(self, exc: Exception) -> None:
        if not self._is_away:
            logger.warning("no load leases, models are placed by their names: %s: %s", type(exc).__name__, exc)
            self._is_away = True
            self._probe = asyncio.create_task(self._look_for_redis(), name="probe of the load leases")

    async def _look_for_redis(self) -> None:
        """Asks until a lease can be had, not only read; requests are placed meanwhile."""
        while self._is_away:
            await asyncio.sleep(AWAY_S)
            try:
                async with asyncio.timeout(EXCHANGE_TIMEOUT_S):
                    await self._leases.take(_PROBE_KEY, _PROBE_TTL_S)
            except (Unavailable, TimeoutError):
                continue
            self._is_away = False
            logger.info("load leases can be had again")
