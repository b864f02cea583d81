"""Quotas of all tenants on this router: gives out what it holds of each, and keeps holding enough.

A task of its own tells Redis what was used and takes shares ahead of use; no request reads Redis. One that finds its
share empty waits for one such exchange at most. While Redis does not answer, each router gives out an equal part.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import redis.asyncio
from redis.exceptions import NoScriptError, RedisError

from naru_proto import names
from naru_proto.errors import QuotaExceeded
from naru_proto.tenants import Quotas
from naru_router.adapters.metrics import Metrics
from naru_router.adapters.tenancy.quota_script import EXCHANGE, arguments, read_answer
from naru_router.core.tenancy.quota import NEVER_S, WINDOW_S, Ask, Share

logger = logging.getLogger(__name__)

EXCHANGE_TIMEOUT_S = 0.15
"""A Redis that does not answer an exchange for so long is slow."""
APART_AFTER_S = 2.0
"""One that has been slow for so long is away. Until then others may still be given shares by it: a router goes on with
a small part of the quota alone.
"""
EARLY_PARTS = 4
"""That small part, as a divisor of an equal one."""
WAIT_S = 0.2
"""Longest wait of a request for a share."""
TICK_S = 0.25
PAUSE_S = 1.0
"""Between two exchanges while Redis is away."""
BATCH = 128
REQUESTS, TOKENS, IN_FLIGHT = "requests", "tokens", "in_flight"
_WORDS = {REQUESTS: "requests per minute", TOKENS: "tokens per minute", IN_FLIGHT: "requests at once"}


@dataclass(slots=True)
class _Waiter:
    amount: int
    future: asyncio.Future[bool]


@dataclass(slots=True, eq=False)
class _Account:
    """One quota of one tenant."""

    tenant: str
    what: str
    share_id: str
    share: Share
    waiters: list[_Waiter] = field(default_factory=list)


class QuotaTicket:
    """What an admitted request has been given. `settle` it once, however the request ends."""

    def __init__(self, settle: Callable[[list[tuple[Share, int]], int], None], given: list[tuple[Share, int]]) -> None:
        self._settle = settle
        self._given = given

    def settle(self, num_tokens: int) -> None:
        """Ends it: so many tokens were computed, of prompt and answer. A second call does nothing."""
        given, self._given = self._given, []
        self._settle(given, num_tokens)


class QuotaKeeper:
    """Admits requests of tenants with quotas while `run` runs. The client stays the caller's to close."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        router_id: str,
        num_routers: Callable[[], int],
        metrics: Metrics,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._router_id = router_id
        self._num_routers = num_routers
        self._metrics = metrics
        self._clock = clock
        self._accounts: dict[tuple[str, str], _Account] = {}
        self._active: dict[tuple[str, str], _Account] = {}
        """Those that may have something to tell or to ask for."""
        self._cleaned_s = clock()
        self._sequence = itertools.count(1)
        self._ids = itertools.count(1)
        self._wake = asyncio.Event()
        self._sha = ""
        self.problem = ""
        self._failing_since_s = math.inf
        """Why Redis cannot be asked; empty: it can."""

    async def admit(self, tenant: str, quotas: Quotas, num_tokens: int) -> QuotaTicket:
        """Gives a request what it needs of each quota, or nothing of any.

        Args:
            tenant: whose quotas they are.
            quotas: as they are now.
            num_tokens: of prompt and answer, as expected; more than the whole limit counts as that.

        Raises:
            QuotaExceeded: saying which limit, and when it may be worth to ask again.
        """
        given: list[tuple[Share, int]] = []
        try:
            for what, limit, amount in (
                (IN_FLIGHT, quotas.max_in_flight, 1),
                (REQUESTS, quotas.requests_per_minute, 1),
                (TOKENS, quotas.tokens_per_minute, min(max(1, num_tokens), quotas.tokens_per_minute)),
            ):
                if limit:
                    account = self._account(tenant, what, limit)
                    await self._acquire(account, amount)
                    given.append((account.share, amount))
        except BaseException:
            now_s = self._clock()
            for share, amount in given:
                share.settle(amount, 0, now_s)
            raise
        return self._ticket(tenant, given)

    def shares(self, tenant: str, quotas: Quotas) -> list[tuple[str, int, Share]]:
        """(what, limit, books) of a tenant's quotas over time, for reply headers."""
        limits = ((REQUESTS, quotas.requests_per_minute), (TOKENS, quotas.tokens_per_minute))
        return [
            (what, limit, account.share if (account := self._accounts.get((tenant, what))) else Share(limit))
            for what, limit in limits
            if limit
        ]

    def now_s(self) -> float:
        """On the clock that shares go by."""
        return self._clock()

    async def run(self) -> None:
        """Exchanges with Redis until cancelled, then gives back what is held."""
        try:
            while True:
                self._wake.clear()
                await self._round()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._pause_s()):
                        await self._wake.wait()
        finally:
            held = [account for account in self._active.values() if not account.share.is_spent()]
            for account in held:
                account.share.touched_s, account.share.waiting = NEVER_S, 0
            with contextlib.suppress(RedisError, OSError, TimeoutError, ValueError):
                async with asyncio.timeout(2 * EXCHANGE_TIMEOUT_S):
                    for start in range(0, len(held), BATCH):
                        await self._send(held[start : start + BATCH])

    def _pause_s(self) -> float:
        """To the next round, where nothing wakes it: with no quota in use there is nothing to tell or to ask for."""
        return PAUSE_S if self.problem else TICK_S if self._active else WINDOW_S

    def _ticket(self, tenant: str, given: list[tuple[Share, int]]) -> QuotaTicket:
        requests = self._accounts.get((tenant, REQUESTS))
        kept = []
        for share, amount in given:
            if requests is not None and share is requests.share:
                share.settle(amount, amount, self._clock())
            else:
                kept.append((share, amount))
        return QuotaTicket(self._settle, kept)

    def _settle(self, given: list[tuple[Share, int]], num_tokens: int) -> None:
        now_s = self._clock()
        for share, amount in given:
            share.settle(amount, max(0, num_tokens), now_s)

    def _account(self, tenant: str, what: str, limit: int) -> _Account:
        account = self._accounts.get((tenant, what))
        if account is None:
            share_id = f"{self._router_id}.{next(self._ids)}"
            account = _Account(tenant, what, share_id, Share(limit, is_level=what == IN_FLIGHT))
            self._accounts[tenant, what] = account
        account.share.limit = limit
        if not self._active:
            self._wake.set()
        self._active[tenant, what] = account
        return account

    async def _acquire(self, account: _Account, amount: int) -> None:
        share, now_s = account.share, self._clock()
        if not account.waiters and share.take(amount, now_s):
            return
        if self.problem:
            is_given = self._take_apart(account, amount, now_s)
        elif now_s < share.exhausted_until_s:
            is_given = False
        else:
            is_given = await self._wait(account, amount)
        if not is_given:
            raise self._exceeded(account, amount)

    async def _wait(self, account: _Account, amount: int) -> bool:
        """Waits for one exchange."""
        waiter = _Waiter(amount, asyncio.get_running_loop().create_future())
        account.waiters.append(waiter)
        self._wake.set()
        is_given = False
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WAIT_S):
                    is_given = await waiter.future
        except BaseException:
            if _result(waiter.future):
                account.share.settle(amount, 0, self._clock())
            raise
        if is_given or _result(waiter.future):
            return True
        if waiter.future.done() and not waiter.future.cancelled():
            return False
        # Time is over: what stands in the queue still must not be given anything.
        waiter.future.cancel()
        return self._take_apart(account, amount, self._clock())

    def _take_apart(self, account: _Account, amount: int, now_s: float) -> bool:
        """Takes from an equal part of the quota, where Redis is away."""
        is_early = now_s - self._failing_since_s < APART_AFTER_S
        return account.share.take_apart(amount, now_s, self._num_routers() * (EARLY_PARTS if is_early else 1))

    def _exceeded(self, account: _Account, amount: int) -> QuotaExceeded:
        share = account.share
        self._metrics.quota_refusals.labels(account.tenant, account.what).inc()
        retry_s = 1.0 if account.what == IN_FLIGHT else share.retry_s(self._clock())
        needs = f"; this request may take {amount}" if account.what == TOKENS else ""
        error = QuotaExceeded(
            f"the tenant {account.tenant!r} may use {share.limit} {_WORDS[account.what]} and has used them{needs}; "
            f"send it again in {max(1, round(retry_s))} s"
        )
        error.retry_after_s = retry_s
        return error

    async def _round(self) -> None:
        now_s, routers = self._clock(), self._num_routers()
        self._clean_up(now_s)
        due = []
        for key, account in list(self._active.items()):
            share = account.share
            account.waiters = [waiter for waiter in account.waiters if not waiter.future.done()]
            share.waiting = min(share.limit, sum(waiter.amount for waiter in account.waiters))
            share.need = min((waiter.amount for waiter in account.waiters), default=1)
            if share.is_due(now_s, routers):
                due.append(account)
            elif share.is_spent():
                del self._active[key]
        if self.problem and not due:
            await self._exchange([])
        for start in range(0, len(due), BATCH):
            await self._exchange(due[start : start + BATCH])

    def _clean_up(self, now_s: float) -> None:
        """Forgets quotas that nobody has asked for in a while."""
        if now_s - self._cleaned_s < WINDOW_S:
            return
        self._cleaned_s = now_s
        for key, account in list(self._accounts.items()):
            if key not in self._active and now_s - account.share.touched_s > 2 * WINDOW_S:
                del self._accounts[key]

    async def _exchange(self, due: list[_Account]) -> None:
        waiting = {account.share_id: account.waiters for account in due}
        for account in due:
            account.waiters = []
        try:
            async with asyncio.timeout(EXCHANGE_TIMEOUT_S):
                await (self._send(due) if due else self._probe())
        except (RedisError, OSError, TimeoutError, ValueError) as exc:
            self._failed(exc)
        else:
            if self.problem:
                logger.info("quotas are shared out over all routers again")
            self.problem = ""
            self._failing_since_s = math.inf
            self._metrics.quota_up.set(1)
        finally:
            now_s = self._clock()
            for account in due:
                self._serve(account, waiting[account.share_id], now_s)

    def _serve(self, account: _Account, waiters: Sequence[_Waiter], now_s: float) -> None:
        """Gives to those who waited, in their order."""
        share = account.share
        for waiter in waiters:
            if waiter.future.done():
                continue
            if self.problem:
                is_given = self._take_apart(account, waiter.amount, now_s)
            else:
                is_given = share.take(waiter.amount, now_s)
            waiter.future.set_result(is_given)
        share.waiting = sum(waiter.amount for waiter in account.waiters)

    async def _send(self, due: list[_Account]) -> None:
        """One exchange for each account, in one round trip.

        Raises:
            RedisError, OSError, ValueError: for those whose answer is missing; the others have theirs.
        """
        asked_s, routers = self._clock(), self._num_routers()
        asks = [(account, account.share.ask(asked_s, routers, next(self._sequence))) for account in due]
        if not self._sha:
            self._sha = str(await self._client.script_load(EXCHANGE))
        replies = await self._execute(asks)
        if any(isinstance(reply, NoScriptError) for reply in replies):
            # It was emptied or restarted: none of them ran.
            await self._client.script_load(EXCHANGE)
            replies = await self._execute(asks)
        error: Exception | None = None
        for (account, ask), reply in zip(asks, replies, strict=True):
            if isinstance(reply, Exception):
                error = reply
                continue
            answer = read_answer(reply)
            if answer is not None:
                account.share.answered(ask, answer, asked_s, self._clock())
        if error is not None:
            raise error

    async def _probe(self) -> None:
        """Asks Redis for what an exchange would: that it takes a key."""
        key = names.key_quota(self._router_id, "probe")
        await self._client.set(key, b"", px=round(PAUSE_S * 1000))

    async def _execute(self, asks: list[tuple[_Account, Ask]]) -> list[object]:
        async with self._client.pipeline(transaction=False) as pipe:
            for account, ask in asks:
                key = names.key_quota(account.tenant, account.what)
                share = account.share
                pipe.evalsha(self._sha, 1, key, *arguments(account.share_id, share.is_level, share.limit, ask))
            return list(await pipe.execute(raise_on_error=False))

    def _failed(self, exc: Exception) -> None:
        if not self.problem:
            logger.warning("quotas are shared out by the number of routers, Redis does not answer: %s", exc)
            self._failing_since_s = self._clock()
        if not isinstance(exc, TimeoutError):
            self._failing_since_s = -math.inf  # it says itself that it cannot be asked
        self.problem = f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
        self._metrics.quota_up.set(0)


def _result(future: asyncio.Future[bool]) -> bool:
    return future.done() and not future.cancelled() and future.result()
