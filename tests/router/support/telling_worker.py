"""A stub worker that tells its load and its route keys as real ones do: a snapshot first, then what changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from router_rig import MODEL, Rig
from stub_worker import Script, StubWorker

from naru_proto.route_keys import pack_keys, unpack_keys
from naru_proto.v1 import worker_pb2 as wire

TOKEN_BYTES = 4
"""Of a prompt's text, as routers assume at first."""


class Stream(asyncio.Queue[wire.Delta]):
    """One router's stream: what is due on it. A delta without a request id only wakes it."""

    def __init__(self) -> None:
        super().__init__()
        self.updates: list[wire.RouteKeyUpdate] = []
        self.num_updates = 0
        self.request_ids: set[str] = set()
        self.last_id = ""

    def tell(self, update: wire.RouteKeyUpdate) -> None:
        """Puts an update of keys in line."""
        self.num_updates += 1
        told = wire.RouteKeyUpdate()
        told.CopyFrom(update)
        told.number = self.num_updates
        self.updates.append(told)
        self.wake()

    def wake(self) -> None:
        """Lets a frame leave."""
        if self.empty():
            self.put_nowait(wire.Delta())


class TellingWorker(StubWorker):
    """Caches every prompt at its first output, and forgets none of them."""

    def __init__(self, worker_id: str, script: Script, *, prefill_tokens_per_s: float = 0.0, epoch: str = "e1") -> None:
        super().__init__(worker_id, script)
        self.epoch = epoch
        self.prefill_tokens_per_s = prefill_tokens_per_s
        self.cache: dict[bytes, None] = {}
        self.hits: list[tuple[int, int]] = []
        """By request, in the order they came: how many of its leading keys were cached, and how many it has."""
        self._uncached: dict[str, int] = {}
        """Tokens by request without output."""
        self._streams: list[Stream] = []

    @property
    def num_streams(self) -> int:
        """Routers that listen."""
        return len(self._streams)

    async def Exchange(self, request_iterator: Any, context: Any) -> AsyncIterator[wire.WorkerFrame]:
        stream = Stream()
        stream.tell(wire.RouteKeyUpdate(model=MODEL, epoch=1, is_snapshot=True, added=pack_keys(tuple(self.cache))))
        self._streams.append(stream)
        tasks: set[asyncio.Task[None]] = set()  # of this stream: others belong to other routers
        tasks.add(asyncio.create_task(self._read(request_iterator, stream, tasks)))
        try:
            while True:
                deltas = [await stream.get()]
                while not stream.empty():
                    deltas.append(stream.get_nowait())
                updates, stream.updates = stream.updates, []
                deltas = [delta for delta in deltas if delta.request_id]
                yield wire.WorkerFrame(epoch=self.epoch, deltas=deltas, load=self._load(stream), route_keys=updates)
        finally:
            self._streams.remove(stream)
            ending = tuple(tasks)
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)
            self.changed.set()

    async def _generate(self, request: wire.GenerateRequest, out: asyncio.Queue[wire.Delta]) -> None:
        assert isinstance(out, Stream)
        request_id, keys = request.request_id, unpack_keys(request.route_keys, max_keys=None)
        num_held = next((i for i, key in enumerate(keys) if key not in self.cache), len(keys))
        self.hits.append((num_held, len(keys)))
        share = num_held / len(keys) if keys else 0.0
        self._uncached[request_id] = round(len(request.text) / TOKEN_BYTES * (1.0 - share))
        out.request_ids.add(request_id)
        out.last_id = request_id
        self._wake_all()
        try:
            async for delta in self.script(request):
                if self._uncached.pop(request_id, None) is not None:
                    self._keep(keys)
                delta.request_id = request_id
                out.put_nowait(delta)
                await asyncio.sleep(0)
        finally:
            out.request_ids.discard(request_id)
            self._uncached.pop(request_id, None)
            self._wake_all()

    def _keep(self, keys: tuple[bytes, ...]) -> None:
        added = tuple(key for key in keys if key not in self.cache)
        if added:
            self.cache.update(dict.fromkeys(added))
            for stream in self._streams:
                stream.tell(wire.RouteKeyUpdate(model=MODEL, epoch=1, added=pack_keys(added)))

    def _load(self, stream: Stream) -> wire.Load:
        alive = [i for other in self._streams for i in other.request_ids]
        num_others = len(alive) - len(stream.request_ids)
        each = wire.ModelLoad(
            model=MODEL,
            num_running=len(alive) - len(self._uncached),
            num_waiting=len(self._uncached),
            num_others=num_others,
            waiting_tokens=sum(self._uncached.values()),
            prefill_tokens_per_s=self.prefill_tokens_per_s,
        )
        return wire.Load(num_others=num_others, models=[each], last_request_id=stream.last_id)

    def _wake_all(self) -> None:
        for stream in self._streams:
            stream.wake()


async def start_telling(rig: Rig, worker_id: str, script: Script, *, rate: float = 0.0, **fields: Any) -> TellingWorker:
    """A running one with a lease. `rate`: the prefill tokens a second that it tells; 0: not measured."""
    worker = TellingWorker(worker_id, script, prefill_tokens_per_s=rate, epoch=fields.get("epoch", "e1"))
    await worker.start()
    rig.workers[worker_id] = worker
    await rig.publish_worker(worker_id, **fields)
    return worker
