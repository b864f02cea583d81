"""This router's own lease, renewed each second, and how many routers live. Started by the app; others read the count.

Quotas that cannot ask Redis, and whoever shares something out among routers, go by `num_routers`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable
from typing import cast

import redis.asyncio
from redis.exceptions import RedisError

from naru_proto import names
from naru_proto.beats import until_beat_s
from naru_proto.registry import RouterRecord
from naru_router.adapters.leases import COMMAND_TIMEOUT_S

logger = logging.getLogger(__name__)

RENEW_INTERVAL_S = 1.0
MAX_ROUTERS = 4096
"""A set that was filled by somebody else costs no more than this many look-ups."""


class Presence:
    """Keeps a router's lease while `run` runs. The client stays the caller's to close."""

    def __init__(
        self, client: redis.asyncio.Redis, record: RouterRecord, *, interval_s: float = RENEW_INTERVAL_S
    ) -> None:
        self._client = client
        self._record = record
        self._text = record.to_json()
        self._interval_s = interval_s
        self.problem = ""
        """Why Redis does not take this router's lease; empty: it does."""
        self.num_routers = 1
        """Living routers as last seen, this one included; at least 1. Stays as it was while Redis is away."""
        self.router_ids: tuple[str, ...] = (record.router_id,)
        """Sorted."""

    async def run(self) -> None:
        """Renews until cancelled, then gives the lease back."""
        try:
            while True:
                await self.renew()
                await asyncio.sleep(until_beat_s(asyncio.get_running_loop().time(), self._interval_s))
        finally:
            with contextlib.suppress(RedisError, OSError, TimeoutError):  # it ends by itself soon
                async with asyncio.timeout(COMMAND_TIMEOUT_S):
                    await self._client.delete(names.key_router(self._record.router_id))

    async def renew(self) -> None:
        """One round: says that this router lives, and counts the others."""
        try:
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                await self._renew()
        except (RedisError, OSError, TimeoutError) as exc:
            if not self.problem:
                logger.warning("this router cannot say that it lives, Redis does not answer: %s", exc)
            self.problem = f"{type(exc).__name__}: {exc}"
            return
        if self.problem:
            logger.info("this router can say again that it lives")
        self.problem = ""

    async def _renew(self) -> None:
        record = self._record
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.set(names.key_router(record.router_id), self._text, px=round(names.ROUTER_LEASE_TTL_S * 1000))
            pipe.sadd(names.KEY_ROUTERS, record.router_id)
            pipe.srandmember(names.KEY_ROUTERS, MAX_ROUTERS)
            # Who was there the last time is asked for along with it: mostly nobody has come or gone.
            pipe.mget([names.key_router(i) for i in self.router_ids])
            _, _, raw_ids, leases = await pipe.execute()
        ids = sorted({raw.decode("utf-8", "replace") for raw in raw_ids} | {record.router_id})
        if ids != list(self.router_ids):
            leases = await cast(Awaitable[list[bytes | None]], self._client.mget([names.key_router(i) for i in ids]))
        living = [i for i, lease in zip(ids, leases, strict=True) if lease is not None or i == record.router_id]
        # One that only lost its lease for a moment adds itself again with its next renewal.
        gone = sorted(set(ids) - set(living))
        if gone:
            await self._client.srem(names.KEY_ROUTERS, *gone)
        self.router_ids = tuple(living)
        self.num_routers = len(living)
