"""The route map in Redis, as the control plane sees it: writes the registry, reads leases, hears of changes.

Called by the controller and the commands that show what is. The registry's only writer on one machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import redis.asyncio
import redis.exceptions

from naru_operator.adapters.placement_board import PlacementBoard
from naru_proto import names
from naru_proto.errors import NaruError, Unavailable
from naru_proto.registry import ModelRecord, WorkerRecord

_R = TypeVar("_R", ModelRecord, WorkerRecord)

_TIMEOUT_S = 5.0
_BLOCK_MS = 5000
_MAX_MS_DIGITS = 14
"""More than these is no date: the year would have five digits."""


@dataclass(frozen=True, slots=True)
class Board:
    """What stood in Redis at one moment."""

    models: dict[str, ModelRecord]
    workers: dict[str, WorkerRecord]
    """Living leases, by worker id."""


@dataclass(frozen=True, slots=True)
class ModelEvent:
    """A model's change of state on a worker; fields that cannot be read are empty."""

    entry_id: str
    """Its place in the stream."""
    at_s: float
    """Unix seconds."""
    worker_id: str
    model: str
    old: str
    """Lower-case ModelState."""
    new: str
    reason: str


class RouteMap:
    """A connection to Redis. Made by `open_route_map`."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self._texts: dict[str, bytes | str] = {}
        """Leases as they were last read."""
        self._worker_ids: list[str] = []
        """As they were last read."""
        self._last: tuple[object, Board] | None = None
        """What `read` has read last, and what it says."""
        self.placement = PlacementBoard(client)

    async def ping(self) -> None:
        """Returns if Redis answers.

        Raises:
            Unavailable: it does not.
        """
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._client.ping()
        except (redis.exceptions.RedisError, OSError, TimeoutError) as exc:
            raise _away(exc) from exc

    async def read(self) -> Board:
        """The registry and all living leases; an entry that cannot be read counts as absent.

        The board of the last reading, where nothing has changed since.

        Raises:
            Unavailable: Redis does not answer.
        """
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                stored, leases = await self._registry_and_leases()
        except (redis.exceptions.RedisError, OSError, TimeoutError) as exc:
            raise _away(exc) from exc
        if self._last is not None and self._last[0] == (stored, leases):
            self._texts = leases
            return self._last[1]
        models = {}
        for key, text in stored.items():
            record = _read_record(ModelRecord, text)
            if record is not None:
                models[_text(key)] = record
        board = Board(models, self._read_leases(leases, {}))
        self._last = (stored, leases), board
        return board

    async def read_workers(self, before: Mapping[str, WorkerRecord]) -> dict[str, WorkerRecord]:
        """All living leases; one whose text has not changed is the record of ``before``, which costs nothing.

        Raises:
            Unavailable: Redis does not answer.
        """
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                leases = await self._leases()
        except (redis.exceptions.RedisError, OSError, TimeoutError) as exc:
            raise _away(exc) from exc
        return self._read_leases(leases, before)

    async def num_models(self) -> int:
        """Entries of the registry, unreadable ones included.

        Raises:
            Unavailable: Redis does not answer.
        """
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return int(await self._client.hlen(names.KEY_MODELS))
        except (redis.exceptions.RedisError, OSError, TimeoutError) as exc:
            raise _away(exc) from exc

    async def _registry_and_leases(self) -> tuple[dict[bytes | str, bytes | str], dict[str, bytes | str]]:
        """In one exchange, where no worker has come or gone since the last."""
        asked = self._worker_ids
        async with self._client.pipeline(transaction=False) as batch:
            batch.hgetall(names.KEY_MODELS)
            batch.smembers(names.KEY_WORKERS)
            if asked:
                batch.mget([names.key_worker(worker_id) for worker_id in asked])
            stored, members, *found = await batch.execute()
        ids = self._worker_ids = sorted(_text(member) for member in members)
        return stored, _present(ids, found[0]) if found and ids == asked else await self._texts_of(ids)

    async def _leases(self) -> dict[str, bytes | str]:
        return await self._texts_of(sorted(_text(m) for m in await self._client.smembers(names.KEY_WORKERS)))

    async def _texts_of(self, ids: list[str]) -> dict[str, bytes | str]:
        return _present(ids, await self._client.mget([names.key_worker(each) for each in ids]) if ids else [])

    def _read_leases(
        self, leases: Mapping[str, bytes | str], before: Mapping[str, WorkerRecord]
    ) -> dict[str, WorkerRecord]:
        workers = {}
        for worker_id, text in leases.items():
            same = before.get(worker_id) if self._texts.get(worker_id) == text else None
            worker = same or _read_record(WorkerRecord, text)
            if worker is not None:
                workers[worker_id] = worker
        self._texts = dict(leases)
        return workers

    async def write_models(self, put: Iterable[ModelRecord], delete: Iterable[str]) -> None:
        """Changes the registry in one transaction and tells all who listen. Nothing to change: nothing is sent.

        Raises:
            Unavailable: Redis does not answer; nothing or all was written.
        """
        put, delete = list(put), list(delete)
        if not put and not delete:
            return
        try:
            async with asyncio.timeout(_TIMEOUT_S), self._client.pipeline(transaction=True) as batch:
                for record in put:
                    batch.hset(names.KEY_MODELS, record.name, record.to_json())
                for name in delete:
                    batch.hdel(names.KEY_MODELS, name)
                    batch.hdel(names.KEY_FOOTPRINTS, name)
                batch.publish(names.CHANNEL_CHANGES, "models")
                await batch.execute()
        except (redis.exceptions.RedisError, OSError, TimeoutError) as exc:
            raise _away(exc) from exc

    async def changes(self) -> AsyncIterator[str]:
        """One item for every change that was announced; the first comes when listening has begun.

        Raises:
            Unavailable: the connection was lost; changes meanwhile were missed, so read again.
        """
        try:
            async with self._client.pubsub() as listener:
                await listener.subscribe(names.CHANNEL_CHANGES)
                async for message in listener.listen():
                    data = message.get("data")
                    yield _text(data) if isinstance(data, bytes) else ""
        except (redis.exceptions.RedisError, OSError) as exc:
            raise _away(exc) from exc

    async def last_events(self, count: int) -> list[ModelEvent]:
        """What happened last to models on workers, at most ``count`` of it, oldest first.

        Raises:
            Unavailable: Redis does not answer.
        """
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                found: Any = await self._client.xrevrange(names.KEY_EVENTS, count=count)
        except (redis.exceptions.RedisError, OSError, TimeoutError) as exc:
            raise _away(exc) from exc
        return [_event(entry_id, fields) for entry_id, fields in reversed(found)]

    async def events_since(self, entry_id: str, count: int = 1000) -> list[ModelEvent]:
        """What has happened after an event, at most ``count`` of it, oldest first. Does not wait.

        Raises:
            Unavailable: Redis does not answer.
        """
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                found: Any = await self._client.xrange(names.KEY_EVENTS, min=f"({entry_id}", count=count)
        except (redis.exceptions.RedisError, OSError, TimeoutError) as exc:
            raise _away(exc) from exc
        return [_event(raw_id, fields) for raw_id, fields in found]

    async def events_after(self, entry_id: str) -> AsyncIterator[ModelEvent]:
        """What happens after an event (empty: after now), as it happens. Never ends by itself.

        Raises:
            Unavailable: Redis does not answer.
        """
        last = entry_id or "$"
        while True:
            try:
                found: Any = await self._client.xread({names.KEY_EVENTS: last}, block=_BLOCK_MS)
            except (redis.exceptions.RedisError, OSError) as exc:
                raise _away(exc) from exc
            for _, entries in found or ():
                for raw_id, fields in entries:
                    last = _text(raw_id)
                    yield _event(raw_id, fields)

    async def close(self) -> None:
        """Lets go of the connections."""
        await self._client.aclose()


def _present(ids: Iterable[str], texts: Iterable[bytes | str | None]) -> dict[str, bytes | str]:
    return {worker_id: text for worker_id, text in zip(ids, texts, strict=True) if text}


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _read_record(kind: type[_R], text: bytes | str) -> _R | None:
    try:
        return kind.from_json(text)
    except NaruError:
        return None


def _event(raw_id: bytes | str, raw: dict[bytes | str, bytes | str]) -> ModelEvent:
    entry_id = _text(raw_id)
    fields = {_text(key): _text(value) for key, value in (raw or {}).items()}
    at_ms = fields.get("at_ms", "")
    if not (at_ms.isascii() and at_ms.isdigit()):
        at_ms = entry_id.partition("-")[0]  # when Redis took it
    worker_id, model, reason = (fields.get(key, "") for key in ("worker", "model", "reason"))
    at_s = int(at_ms[:_MAX_MS_DIGITS]) / 1000
    return ModelEvent(entry_id, at_s, worker_id, model, fields.get("from", ""), fields.get("to", ""), reason)


def _away(exc: BaseException) -> Unavailable:
    return Unavailable(f"Redis does not answer ({type(exc).__name__}: {exc}); check that it runs and --redis-url")


def open_route_map(url: str) -> RouteMap:
    """A client for ``url``; connects on first use.

    Raises:
        Unavailable: not a Redis URL.
    """
    try:
        # No socket timeout: with one, redis-py sends by asyncio.wait_for, which before Python 3.12 loses a
        # cancellation that meets its result. The timeouts of this module are asyncio's own.
        client = redis.asyncio.Redis.from_url(url, socket_connect_timeout=_TIMEOUT_S, socket_timeout=None)
    except ValueError as exc:
        scheme = url.partition("://")[0][:16]
        raise Unavailable(
            f"--redis-url begins with {scheme!r}; write redis://host:port, rediss://host:port or unix:///path"
        ) from exc
    return RouteMap(client)
