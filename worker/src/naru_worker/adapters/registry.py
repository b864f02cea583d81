"""This worker's lease in the route map: written on each change, renewed before it expires, deleted at the end.

What happened to its models goes into the stream of events on the way.

Lives in the asyncio thread. Redis may be away, hang, refuse or be emptied: serving does not notice, and the lease comes
back by itself. Nothing is read but whether the model infos are still there, and what others hold while this one leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import logging
from collections.abc import Callable
from typing import Any

from naru_proto import names
from naru_proto.beats import until_beat_s
from naru_proto.errors import InternalError
from naru_proto.registry import ModelInfoRecord, WorkerRecord
from naru_worker.adapters.engine.changes import ChangeLog
from naru_worker.adapters.near_writer import NearWriter
from naru_worker.settings import RegistrySettings

_log = logging.getLogger(__name__)

INFO_TTL_S = 3600
"""Model infos outlive the leases that name them, but not for ever; renewed with each lease."""
MAX_PAUSE_S = 5.0
"""Longest pause between two tries while Redis is away."""
MAX_CHANGES_AT_ONCE = 256
"""Events of one write; more go with the next."""
MIN_INTERVAL_S = 0.05
"""Changes that come faster (progress of a download) are written together."""


class LeaseKeeper:
    """Keeps one worker's entry. `record` and `infos` are asked for at each write: they are the truth."""

    def __init__(
        self,
        settings: RegistrySettings,
        record: Callable[[], WorkerRecord],
        infos: Callable[[], dict[str, ModelInfoRecord]],
        changes: ChangeLog,
        on_registered: Callable[[], None] = lambda: None,
        near: NearWriter | None = None,
    ) -> None:
        """`infos`: by digest. `changes` is emptied as they are told. `on_registered`: the first lease is written."""
        self._near = near
        self._changes = changes
        self._on_registered = on_registered
        self._is_registered = False
        self._settings = settings
        self._record = record
        self._infos = infos
        self._poked = asyncio.Event()
        self._client: Any = None
        self._failures: tuple[type[Exception], ...] = (OSError, TimeoutError)
        self._written: set[str] = set()
        """Digests of infos written on this connection and not lost since."""
        self._told: WorkerRecord | None = None
        """The entry as subscribers last heard of it, load left out."""
        self._last: tuple[WorkerRecord, str] | None = None
        """The entry that was written last, and its text."""
        self._num_failures = 0
        self._limit_s = max(0.2, min(1.0, settings.lease_ttl_s / 3))
        """Longest time for one exchange with Redis."""

    @property
    def is_failing(self) -> bool:
        """The last write did not reach Redis."""
        return self._num_failures > 0

    def poke(self) -> None:
        """Something has changed: write soon."""
        self._poked.set()

    async def run(self) -> None:
        """Keeps the lease until cancelled, and then deletes it."""
        loop = asyncio.get_running_loop()
        try:
            await self._connect()
            while True:
                self._poked.clear()
                await self._try_write()
                wrote_s = loop.time()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._pause_s(wrote_s)):
                        await self._wait()
                too_soon_s = wrote_s + MIN_INTERVAL_S - loop.time()
                if too_soon_s > 0:
                    await asyncio.sleep(too_soon_s)
        finally:
            await self._leave()

    async def _wait(self) -> None:
        """A change is no reason to try again sooner while Redis is away."""
        if self._num_failures:
            await asyncio.Event().wait()
        await self._poked.wait()

    def _pause_s(self, now_s: float) -> float:
        """Seconds to the next write: about a third of the lease, doubled with each failure after the first."""
        interval_s = self._settings.lease_ttl_s / 3
        doublings = min(max(0, self._num_failures - 1), 8)
        return min(until_beat_s(now_s, interval_s) * 2.0**doublings, max(MAX_PAUSE_S, interval_s))

    async def _connect(self) -> None:
        """Imports the client late and in a thread: it takes a third of a second, and the server is up already."""
        redis = await asyncio.to_thread(importlib.import_module, "redis.asyncio")
        retry = await asyncio.to_thread(importlib.import_module, "redis.asyncio.retry")
        backoff = importlib.import_module("redis.backoff")
        self._failures = (OSError, TimeoutError, redis.RedisError)
        self._client = redis.from_url(
            self._settings.redis_url,
            # With a socket timeout the client sends by asyncio.wait_for, which before Python 3.12 may lose a
            # cancellation (https://github.com/python/cpython/issues/86296): the limit stands around whole exchanges.
            socket_timeout=None,
            socket_connect_timeout=self._limit_s,
            retry=retry.Retry(backoff.NoBackoff(), 0),
            single_connection_client=False,
        )

    async def _try_write(self) -> None:
        try:
            async with asyncio.timeout(self._limit_s):
                await self._write()
        except self._failures as exc:
            self._num_failures += 1
            self._told = None
            if self._num_failures == 1:
                # Once, not at each try: an outage of an hour is one line. The URL may hold a password.
                _log.warning("the route map cannot be written (%s); serving goes on, retrying", type(exc).__name__)
            return
        if self._num_failures:
            _log.warning("the route map is written again, after %d failed tries", self._num_failures)
            self._num_failures = 0
        if not self._is_registered:
            self._is_registered = True
            self._on_registered()

    async def _write(self) -> None:
        if not await self._write_lease(is_there=True):
            await self._write_lease(is_there=False)

    async def _write_lease(self, *, is_there: bool) -> bool:
        """Writes what is news, and the lease behind it. False: what should have been there is lost."""
        near = self._near
        is_there = is_there and self._last is not None and not (near is not None and near.has_news)
        is_there = is_there and self._infos().keys() <= self._written
        if near is not None and not is_there:
            await near.write(self._client)
        # Of one moment: models come up meanwhile, and a lease names no info that is not there.
        record, infos = self._record(), self._infos()
        missing = {digest: info for digest, info in infos.items() if digest not in self._written}
        text = self._last[1] if self._last is not None and record == self._last[0] else record.to_json()
        news = _news(record)
        await self._write_infos(missing)
        pipe = self._client.pipeline(transaction=False)
        ttl_ms = int(self._settings.lease_ttl_s * 1000)
        # One exchange where nothing has to stand before the lease, as long as the last one stands.
        pipe.set(names.key_worker(record.worker_id), text, px=ttl_ms, xx=is_there)
        pipe.sadd(names.KEY_WORKERS, record.worker_id)
        for digest in infos:
            pipe.expire(names.key_model_info(digest), INFO_TTL_S)
        num_before = 2 + len(infos)
        num_kept = num_before + (near.renew(pipe) if near is not None else 0)
        if news != self._told:
            pipe.publish(names.CHANNEL_CHANGES, f"worker:{record.worker_id}")
        told_number = self._add_changes(pipe, record)
        replies = await pipe.execute()
        self._changes.told(told_number)
        self._written = {d for d, renewed in zip(infos, replies[2:num_before], strict=True) if renewed}
        if not replies[0] or not all(replies[num_before:num_kept]):
            self._last = self._told = None
            if near is not None:
                near.forget()
            return False
        self._last, self._told = (record, text), news
        await self._write_infos({d: i for d, i in infos.items() if d not in self._written})
        return True

    def _add_changes(self, pipe: Any, record: WorkerRecord) -> int:
        """Puts the oldest changes into the pipeline; returns the number of the last one."""
        batch = self._changes.oldest(MAX_CHANGES_AT_ONCE)
        for change in batch:
            fields = {
                "worker": record.worker_id,
                "epoch": record.epoch,
                "model": change.model,
                "from": change.old.value,
                "to": change.new.value,
                "reason": change.reason,
                "at_ms": int(change.at_s * 1000),
            }
            pipe.xadd(names.KEY_EVENTS, fields, maxlen=names.MAX_EVENTS, approximate=True)
        if len(self._changes) > len(batch):
            self.poke()
        return batch[-1].number if batch else 0

    async def _write_infos(self, infos: dict[str, ModelInfoRecord]) -> None:
        """Before the lease that names them; again where the board was emptied."""
        if not infos:
            return
        pipe = self._client.pipeline(transaction=False)
        for digest, info in infos.items():
            pipe.set(names.key_model_info(digest), info.to_json(), ex=INFO_TTL_S)
        await pipe.execute()
        self._written |= infos.keys()

    async def others(self) -> list[WorkerRecord] | None:
        """Leases of the other living workers; None: the route map cannot be read now."""
        if self._client is None:
            return None
        try:
            async with asyncio.timeout(self._limit_s):
                return await self._read_others()
        except self._failures:
            return None

    async def _read_others(self) -> list[WorkerRecord]:
        mine = self._record().worker_id
        ids = sorted(_text(raw) for raw in await self._client.smembers(names.KEY_WORKERS))
        keys = [names.key_worker(worker_id) for worker_id in ids if worker_id != mine]
        found = []
        for data in await self._client.mget(keys) if keys else ():
            # A lease that cannot be read is no place to move to.
            with contextlib.suppress(InternalError):
                if data is not None:
                    found.append(WorkerRecord.from_json(data))
        return found

    async def _leave(self) -> None:
        """Takes the entry away; where Redis is away too, it expires."""
        if self._client is None:
            return
        worker_id = self._record().worker_id
        with contextlib.suppress(*self._failures):
            async with asyncio.timeout(self._limit_s):
                await self._erase(worker_id)
        with contextlib.suppress(*self._failures):
            await self._client.aclose()

    async def _erase(self, worker_id: str) -> None:
        pipe = self._client.pipeline(transaction=False)
        pipe.delete(names.key_worker(worker_id))
        pipe.srem(names.KEY_WORKERS, worker_id)
        if self._near is not None:
            self._near.erase(pipe)
        pipe.publish(names.CHANNEL_CHANGES, f"worker:{worker_id}")
        await pipe.execute()


def _news(record: WorkerRecord) -> WorkerRecord:
    """The part of an entry whose change is told to subscribers: load, bytes and use are read with the next renewal."""
    models = {
        name: dataclasses.replace(resident, weight_bytes=0, kv_bytes=0, num_in_flight=0, since_s=0, last_used_s=0)
        for name, resident in record.models.items()
    }
    return dataclasses.replace(
        record,
        models=models,
        num_running=0,
        num_waiting=0,
        num_known=0,
        budget_bytes=0,
        used_bytes=0,
        host_used_bytes=0,
    )


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
