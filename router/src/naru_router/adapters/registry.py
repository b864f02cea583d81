"""Reads the route map from Redis: at every hint on the channel, and each second in case a hint was lost.

Hands each new map to one listener. When Redis is away the last map stays in use; `status` says so. When it comes back
without what it had, that is kept for a while (see core.bridge). Writes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from naru_proto import names
from naru_proto.beats import until_beat_s
from naru_proto.errors import InternalError
from naru_proto.registry import ModelInfoRecord, ModelRecord, WorkerRecord
from naru_router.adapters.metrics import Metrics
from naru_router.adapters.side_tables import SideTables
from naru_router.core.bridge import Board, bridged
from naru_router.core.record_checks import has_digest, is_info, is_model, is_worker
from naru_router.core.route_map import RememberedInfo, RouteMap, remember

_Record = TypeVar("_Record", ModelRecord, WorkerRecord, ModelInfoRecord)

logger = logging.getLogger(__name__)

MAX_SEED_BYTES = 64
MAX_NAME_SHOWN = 200
READ_TIMEOUT_S = 2.0
"""A Redis that does not answer for this long is away; well below the time a dead worker may stay in the map.

Around a whole reading, not as the client's socket timeout: that one goes through asyncio.wait_for, which may lose a
cancellation before Python 3.12 (https://github.com/python/cpython/issues/86296).
"""


@dataclass(frozen=True, slots=True)
class RegistryStatus:
    """How fresh the map is."""

    is_up: bool
    """Whether the last reading worked."""
    has_map: bool
    """Whether any reading ever worked."""
    age_s: float
    """Since the last reading that worked, or the start."""
    problem: str = ""


class RegistryReader:
    """Keeps a route map up to date while `run` runs."""

    def __init__(
        self, url: str, *, poll_interval_s: float, listener: Callable[[RouteMap], None], metrics: Metrics
    ) -> None:
        self._redis = redis.asyncio.Redis.from_url(
            url,
            socket_timeout=None,  # see READ_TIMEOUT_S
            socket_connect_timeout=READ_TIMEOUT_S,
            protocol=2,
            retry=Retry(NoBackoff(), 1),  # a connection that went stale; the poll is the real retry
        )
        self._poll_interval_s = poll_interval_s
        self._listener = listener
        self._metrics = metrics
        self.has_tried = asyncio.Event()
        """Set once the first reading has worked or failed."""
        self._hint = asyncio.Event()
        self._infos: dict[str, ModelInfoRecord] = {}
        self._has_all_infos = False
        self._remembered: dict[str, RememberedInfo] = {}
        self._decoded: dict[str, dict[str, tuple[bytes, object]]] = {}
        """Kind of record to name to the bytes last read and what they say."""
        self._tables = SideTables()
        self._worker_ids: list[str] = []
        """As the last reading found them."""
        self._last: tuple[object, RouteMap] | None = None
        """The bytes of the last reading, and all that they say; None: something has to be found out again."""
        self.seed = b""
        """Of hash rings; the same in all routers of an installation."""
        self._board = Board()
        """What the last map was made of."""
        self._run_id = ""
        """Of the Redis that was read last; another one has been restarted."""
        self._board_id = b""
        """See names.KEY_BOARD; another one: it was emptied."""
        self._lost: tuple[Board, float] | None = None
        """What a Redis had before it was restarted, and when that was seen."""
        self._began_s = time.monotonic()
        self._read_at_s: float | None = None
        metrics.registry_age.set_function(lambda: self.status.age_s)
        self._problem = "not read yet"
        self._warned: set[tuple[str, str]] = set()

    @property
    def status(self) -> RegistryStatus:
        """How fresh the map is."""
        age_s = time.monotonic() - (self._began_s if self._read_at_s is None else self._read_at_s)
        return RegistryStatus(not self._problem, self._read_at_s is not None, age_s, self._problem)

    def refresh(self) -> None:
        """Asks for a reading soon."""
        self._hint.set()

    async def run(self) -> None:
        """Reads until cancelled."""
        subscriber = asyncio.create_task(self._subscribe())
        try:
            while True:
                self._hint.clear()
                await self._read_once()
                self.has_tried.set()
                with contextlib.suppress(TimeoutError):  # the poll
                    async with asyncio.timeout(until_beat_s(asyncio.get_running_loop().time(), self._poll_interval_s)):
                        await self._hint.wait()
        finally:
            subscriber.cancel()
            await asyncio.gather(subscriber, return_exceptions=True)
            await self._redis.aclose()

    async def _read_once(self) -> None:
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                route_map = await self._read()
        except (RedisError, OSError, TimeoutError) as exc:
            self._metrics.registry_up.set(0)
            self._metrics.registry_failures.inc()
            if not self._problem or self._read_at_s is None:
                logger.warning("the route map cannot be read, the last one stays in use: %s", exc)
            self._problem = f"{type(exc).__name__}: {exc}"
            return
        if self._problem and self._read_at_s is not None:
            logger.info("the route map can be read again")
        self._problem = ""
        self._read_at_s = time.monotonic()
        self._metrics.registry_up.set(1)
        self._listener(route_map)

    async def _read(self) -> RouteMap:
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hgetall(names.KEY_MODELS)
            pipe.smembers(names.KEY_WORKERS)
            # Of a key that holds something else MGET gives nothing, where GET fails.
            pipe.mget([names.KEY_SEED, names.KEY_BOARD])
            if asked := self._worker_ids:  # mostly nobody has come or gone: one exchange is enough
                pipe.mget([names.key_worker(worker_id) for worker_id in asked])
            raw_models, raw_ids, [raw_seed, raw_board], *found = await pipe.execute()
        worker_ids = self._worker_ids = sorted(_text(raw) for raw in raw_ids)
        # A lease that has expired is absent: its worker is gone, whatever the set says.
        if found and worker_ids == asked:
            leases = _present(worker_ids, found[0])
        else:
            leases = await self._get_many(worker_ids, names.key_worker)
        raw = (raw_models, leases, raw_seed, raw_board)
        if self._last is not None and self._last[0] == raw:
            if not await self._tables.refresh(self._redis, self._last[1].workers):
                return self._last[1]
        route_map = await self._make(*raw)
        is_whole = bool(raw_seed and raw_board) and self._lost is None and self._has_all_infos
        self._last = (raw, route_map) if is_whole else None
        return route_map

    async def _make(
        self, raw_models: dict[bytes, bytes], leases: dict[str, bytes], raw_seed: bytes | None, raw_board: bytes | None
    ) -> RouteMap:
        """The map that what was read stands for; asks for what is missing, or has been lost."""
        models = self._decode({_text(k): v for k, v in raw_models.items()}, ModelRecord, is_model)
        workers = self._decode(leases, WorkerRecord, is_worker)
        board = self._board = await self._bridge(Board(models, workers), raw_board or await self._agree_on_board())
        digests = {r.info_digest for w in board.workers.values() for r in w.models.values()} - {""}
        await self._read_infos(digests)
        self._remembered = remember(self._remembered, board.models, board.workers, self._infos)
        await self._tables.refresh(self._redis, workers)
        self.seed = raw_seed[:MAX_SEED_BYTES] if raw_seed else await self._agree_on_seed()
        return RouteMap(
            board.models,
            board.workers,
            dict(self._infos),
            self._remembered,
            self._tables.known,
            self._tables.footprints,
            self._tables.nodes,
        )

    async def _agree_on_seed(self) -> bytes:
        """The seed that the first router of the installation has written. A Redis that has lost it gets it back.

        What is no seed is replaced; of two routers that do so at once the later one wins, at the next reading in both.
        """
        own = self.seed or secrets.token_hex(16).encode()
        with contextlib.suppress(ResponseError):  # it can be read and not written; the next reading tries again
            if not await self._redis.set(names.KEY_SEED, own, nx=True):
                found = (await cast(Awaitable[list[bytes | None]], self._redis.mget([names.KEY_SEED])))[0]
                if found:
                    return found[:MAX_SEED_BYTES]
                await self._redis.set(names.KEY_SEED, own)
        return own

    async def _agree_on_board(self) -> bytes:
        """What tells this Redis from an emptied one, for all routers; empty: it can be read and not written."""
        try:
            await self._redis.set(names.KEY_BOARD, secrets.token_hex(16), nx=True)
        except ResponseError:
            return b""
        return (await cast(Awaitable[list[bytes | None]], self._redis.mget([names.KEY_BOARD])))[0] or b""

    async def _bridge(self, now: Board, board_id: bytes) -> Board:
        """What was read, and what a Redis that was restarted or emptied has lost."""
        if await self._has_lost(now, board_id):
            logger.warning("the Redis of the route map has lost data; what is missing stays in use for a while")
            self._lost = self._board, time.monotonic()
        if self._lost is not None:
            before, seen_s = self._lost
            board = bridged(before, now, time.monotonic() - seen_s)
            if board is not None:
                return board
            self._lost = None
        return now

    async def _has_lost(self, now: Board, board_id: bytes) -> bool:
        """Whether something is missing, and Redis not the one of the last reading, or emptied since."""
        before_id, self._board_id = self._board_id, board_id
        if self._run_id and now.has_all_of(self._board):
            return False
        before_run, self._run_id = self._run_id, await self._ask_run_id() or self._run_id
        return bool(before_run) and (self._run_id != before_run or (bool(before_id) and board_id != before_id))

    async def _ask_run_id(self) -> str:
        try:
            server = await cast(Awaitable[dict[str, object]], self._redis.info("server"))
        except ResponseError:
            return ""  # not allowed to ask: what is read is taken for the truth
        return str(server.get("run_id", ""))

    async def _read_infos(self, digests: set[str]) -> None:
        """Content never changes under a digest: each is read once and kept while somebody refers to it."""
        found = await self._get_many(sorted(digests - self._infos.keys()), names.key_model_info)

        def is_sound(digest: str, record: ModelInfoRecord) -> bool:
            return is_info(record) and has_digest(found[digest], digest)

        self._infos.update(self._decode(found, ModelInfoRecord, is_sound))
        for digest in self._infos.keys() - digests:
            del self._infos[digest]
        self._has_all_infos = digests == self._infos.keys()

    async def _get_many(self, ids: list[str], key: Callable[[str], str]) -> dict[str, bytes]:
        if not ids:
            return {}
        return _present(ids, await cast(Awaitable[list[bytes | None]], self._redis.mget([key(i) for i in ids])))

    def _decode(
        self, raw: Mapping[str, bytes], record: type[_Record], is_sane: Callable[[str, _Record], bool]
    ) -> dict[str, _Record]:
        """The records that can be read; a bad one is left out and warned of once.

        Most are as they were at the last reading: with thousands of models only what changed is worth parsing.
        """
        records = {}
        before = self._decoded.get(record.__name__, {})
        self._decoded[record.__name__] = after = {}
        for name, data in raw.items():
            known = before.get(name)
            if known is not None and known[0] == data:
                after[name] = known
                records[name] = cast(_Record, known[1])
                continue
            try:
                value = record.from_json(data)
                why = "" if is_sane(name, value) else "a field of it cannot be what it says"
            except InternalError as exc:
                why = f"it cannot be read ({type(exc.__cause__).__name__})"
            if why:
                if (record.__name__, name) not in self._warned:
                    self._warned.add((record.__name__, name))
                    # Whatever stands there may be a secret that somebody has put into the wrong place.
                    kind, size = record.__name__, len(data)
                    logger.warning("the %s of %r, %d bytes, is left out: %s", kind, name[:MAX_NAME_SHOWN], size, why)
                continue
            self._warned.discard((record.__name__, name))
            after[name] = (data, value)
            records[name] = value
        self._warned -= {pair for pair in self._warned if pair[0] == record.__name__ and pair[1] not in raw}
        return records

    async def _subscribe(self) -> None:
        while True:
            try:
                async with self._redis.pubsub() as pubsub:
                    await pubsub.subscribe(names.CHANNEL_CHANGES)
                    async for _ in pubsub.listen():
                        self._hint.set()
            except (RedisError, OSError, TimeoutError):
                await asyncio.sleep(self._poll_interval_s)  # the poll goes on meanwhile, and reports it


def _present(ids: list[str], values: list[bytes | None]) -> dict[str, bytes]:
    return {i: value for i, value in zip(ids, values, strict=True) if value is not None}


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
