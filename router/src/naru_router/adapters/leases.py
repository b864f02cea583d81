"""Leases in Redis with fencing tokens: who of many routers may act, for a while. Used by the keeper and by load leases.

A lease ends by Redis's clock alone. A holder counts from before its question was sent, on its own monotonic clock, and
stops acting a margin before, so that clocks of routers need not agree. Whoever acts names the token; workers refuse an
older one than they have seen, which catches a holder that was stopped while it believed in its lease.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from naru_proto import names
from naru_proto.errors import InternalError, Unavailable
from naru_proto.registry import LeaseRecord

COMMAND_TIMEOUT_S = 1.0
"""A Redis that does not answer for this long is away; well below the shortest lease."""
MIN_MARGIN_S = 0.3
MARGIN = 0.15
"""Share of a lease before its end in which the holder acts no more: clocks differ in speed, loops are late."""

# A counter that is new, or that a Redis without memory has lost, starts at the Unix time in microseconds of Redis:
# all that was given out before is smaller. What is not a number is replaced likewise.
_NEXT = """
local function next_token(fence)
  if redis.call('TYPE', fence).ok ~= 'string' then redis.call('DEL', fence) end
  local last = redis.call('GET', fence) or ''
  if #last > 16 or not string.match(last, '^%d+$') then
    local now = redis.call('TIME')
    redis.call('SET', fence, string.format('%.0f', now[1] * 1000000 + now[2]))
  end
  return redis.call('INCR', fence)
end
"""
# A key without an end is no lease: somebody else's damage must not stop everybody for ever.
_TAKE = (
    _NEXT
    + """
if redis.call('PTTL', KEYS[1]) >= 0 then return 0 end
local token = next_token(KEYS[2])
redis.call('SET', KEYS[1], ARGV[1] .. string.format('%.0f', token) .. ARGV[2], 'PX', ARGV[3])
return token
"""
)
_IS_MINE = "if redis.call('TYPE', KEYS[1]).ok ~= 'string' or redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end\n"
_RENEW = _IS_MINE + "return redis.call('PEXPIRE', KEYS[1], ARGV[2])"
_RELEASE = _IS_MINE + "return redis.call('DEL', KEYS[1])"
_FENCE = _NEXT + _IS_MINE + "return next_token(KEYS[2])"


def connect(url: str) -> redis.asyncio.Redis:
    """A client for leases and presence; connects at its first command.

    Raises:
        ValueError: the URL is none of Redis.
    """
    # No second try: a script whose reply was lost may have taken the lease. The next round is the retry.
    return redis.asyncio.Redis.from_url(
        url,
        socket_timeout=None,  # bounded around each command, see COMMAND_TIMEOUT_S
        socket_connect_timeout=COMMAND_TIMEOUT_S,
        protocol=2,
        retry=Retry(NoBackoff(), 0),
    )


class Leases:
    """Takes, renews and gives back leases for one holder. All raise Unavailable when Redis does not answer."""

    def __init__(self, client: redis.asyncio.Redis, holder: str) -> None:
        """`holder`: the router's id. The client stays the caller's to close."""
        self._client = client
        self._holder = holder
        self._take, self._renew, self._release, self._fence = (
            client.register_script(text) for text in (_TAKE, _RENEW, _RELEASE, _FENCE)
        )

    async def take(self, key: str, ttl_s: float, worker_id: str = "") -> LeaseRecord | None:
        """Takes a lease that nobody holds, under the next fencing token; None: somebody holds it, maybe ourselves.

        Raises:
            Unavailable: Redis does not answer; the lease may have been taken, and then ends by itself.
        """
        head, _, tail = LeaseRecord(self._holder, 0, worker_id).to_json().partition('"token":0')
        token = await self._run(self._take, [key, names.KEY_FENCE], [f'{head}"token":', tail, _ms(ttl_s)])
        return LeaseRecord(self._holder, token, worker_id) if token else None

    async def renew(self, key: str, record: LeaseRecord, ttl_s: float) -> bool:
        """Lets a lease last `ttl_s` from now; False: it is not ours any more.

        Raises:
            Unavailable: Redis does not answer; the lease may have been renewed.
        """
        return bool(await self._run(self._renew, [key], [record.to_json(), _ms(ttl_s)]))

    async def release(self, key: str, record: LeaseRecord) -> bool:
        """Ends a lease before its time; False: it was not ours any more.

        Raises:
            Unavailable: Redis does not answer; the lease ends by itself.
        """
        return bool(await self._run(self._release, [key], [record.to_json()]))

    async def fence(self, key: str, record: LeaseRecord) -> int:
        """A fencing token newer than all given out, for one act of the holder of a lease; 0: it is not ours any more.

        A lease that is held for long has an old token; where others have acted meanwhile on the same model, theirs is
        newer.

        Raises:
            Unavailable: Redis does not answer.
        """
        return int(await self._run(self._fence, [key, names.KEY_FENCE], [record.to_json()]))

    async def read(self, key: str) -> LeaseRecord | None:
        """Who holds a lease; None: nobody, or what stands there cannot be read.

        Raises:
            Unavailable: Redis does not answer.
        """
        try:
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                text = await self._client.get(key)
            return None if text is None else _sane(LeaseRecord.from_json(text))
        except InternalError:
            return None
        except (RedisError, OSError, TimeoutError) as exc:
            raise _away(exc) from exc

    async def _run(self, script: Any, keys: list[str], args: list[Any]) -> int:
        try:
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                return int(await script(keys=keys, args=args))
        except (RedisError, OSError, TimeoutError) as exc:
            raise _away(exc) from exc


class Tenure:
    """One lease that is kept for as long as may be. Mutable; `keep` is called several times in each `ttl_s`."""

    def __init__(self, leases: Leases, key: str, ttl_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._leases = leases
        self._key = key
        self._ttl_s = ttl_s
        self._clock = clock
        self._record: LeaseRecord | None = None
        self._asked_s = 0.0
        self._until_s = 0.0

    @property
    def is_held(self) -> bool:
        """Whether its holder may act now."""
        return self._record is not None and self._clock() < self._until_s

    @property
    def is_fresh(self) -> bool:
        """Whether it is held and was asked for less than a third of its time ago: there is no need to renew it yet."""
        return self.is_held and self._clock() - self._asked_s < self._ttl_s / 3

    async def keep(self) -> bool:
        """Renews or takes the lease; whether it is held.

        Raises:
            Unavailable: Redis does not answer; what is held stays so until its time is over.
        """
        asked_s = self._clock()
        if self._record is not None and not await self._leases.renew(self._key, self._record, self._ttl_s):
            self._record = None
        if self._record is None:
            asked_s = self._clock()
            self._record = await self._leases.take(self._key, self._ttl_s)
        if self._record is not None:
            self._asked_s = asked_s
            self._until_s = asked_s + self._ttl_s - max(MIN_MARGIN_S, MARGIN * self._ttl_s)
        return self.is_held

    async def fence(self) -> int:
        """A token for one act; 0: the lease is not held.

        Raises:
            Unavailable: Redis does not answer.
        """
        if self._record is None or not self.is_held:
            return 0
        return await self._leases.fence(self._key, self._record)

    async def give_up(self) -> None:
        """Lets the next one take it at once.

        Raises:
            Unavailable: Redis does not answer; the lease ends by itself.
        """
        record, self._record = self._record, None
        if record is not None:
            await self._leases.release(self._key, record)


def _ms(ttl_s: float) -> int:
    return max(1, round(ttl_s * 1000))


def _sane(record: LeaseRecord) -> LeaseRecord | None:
    is_sane = isinstance(record.holder, str) and isinstance(record.worker_id, str)
    return record if is_sane and isinstance(record.token, int) and not isinstance(record.token, bool) else None


def _away(exc: BaseException) -> Unavailable:
    return Unavailable(f"the leases in Redis cannot be had: {type(exc).__name__}: {exc}")
