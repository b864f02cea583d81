"""Tells routers of load and route keys: what each stream knows, and what it is to be told next.

The servicer opens one `StreamTelling` for each exchange stream and lets it fill frames. Streams with output are told
along with it; those without are woken ten times a second, where there is news. While nothing goes on nobody looks more
than once a second: what the engines do of themselves then, as giving up cached blocks, is told so much later. Nothing
grows with a reader that is slow: the numbers are those of the moment, and keys come from one list for all, or as a
fresh snapshot. Asyncio thread only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterator

from naru_proto.beats import until_beat_s
from naru_proto.route_keys import KEY_BYTES, pack_keys
from naru_proto.v1 import worker_pb2
from naru_worker.adapters.engine.hub import ModelHub
from naru_worker.adapters.server.board import RequestBoard
from naru_worker.adapters.server.key_mirror import KeyMirror
from naru_worker.adapters.server.model_loads import ModelLoads, ModelNumbers, fill_model_load
from naru_worker.adapters.server.stream import DeltaStream

LOOK_INTERVAL_S = 0.05
"""Between two looks at the engines, however many frames leave: a look costs both ends about what a token does."""
TELL_INTERVAL_S = 0.1
"""Between two times that streams without output are told."""
REST_INTERVAL_S = 1.0
"""The same while nothing goes on."""
QUIET_LOOKS = 2
"""Looks without news after which nothing goes on, where there are no requests: engines count on behind their output."""
MAX_FRAME_KEYS = 8192
"""Of one frame, about: a few milliseconds of a router's time. The rest follows in the next one."""


class Teller:
    """What there is to tell, for all streams."""

    def __init__(
        self,
        epoch: str,
        hub: ModelHub,
        board: RequestBoard,
        streams: Collection[DeltaStream],
        clock: Callable[[], float],
        is_busy: Callable[[], bool],
    ) -> None:
        """`streams`: all that are open; kept by the servicer. `is_busy`: whether an engine has work."""
        self.epoch = epoch
        self.loads = ModelLoads(board, streams)
        self.mirrors: dict[str, KeyMirror] = {}
        self.num_looks = 0
        self._hub = hub
        self._board = board
        self._clock = clock
        self._is_busy = is_busy
        self._looked_s = float("-inf")
        self._tellings: set[StreamTelling] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._num_quiet = 0
        """Looks of the timer since something went on."""
        hub.listeners.append(self.stir)

    def open(self, stream: DeltaStream) -> StreamTelling:
        """Begins to tell a stream; to be closed."""
        telling = StreamTelling(self, stream)
        self._tellings.add(telling)
        self.stir()
        return telling

    def close(self, telling: StreamTelling) -> None:
        """Ends it; nothing ticks without streams."""
        self._tellings.discard(telling)
        if not self._tellings and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def stir(self) -> None:
        """Something goes on, or has changed: streams are told of it as soon as of anything."""
        if self._tellings and (self._timer is None or self._num_quiet >= QUIET_LOOKS):
            self._set_timer(TELL_INTERVAL_S)
        self._num_quiet = 0

    def look(self, *, is_urgent: bool = False) -> bool:
        """Sees how things are, unless it has just done so: False."""
        now_s = self._clock()
        if not is_urgent and now_s - self._looked_s < LOOK_INTERVAL_S:
            return False
        self._looked_s = now_s
        self.num_looks += 1
        residents = [resident for resident in self._hub.residents() if resident.model is not None]
        mirrors: dict[str, KeyMirror] = {}
        for resident in residents:
            assert resident.model is not None, "filtered above"
            mirror = self.mirrors.get(resident.name)
            if mirror is None or mirror.model is not resident.model:
                mirror = KeyMirror(resident.model)
            mirror.epoch = resident.epoch
            mirror.refresh()
            mirrors[resident.name] = mirror
        self.mirrors = mirrors
        self.loads.look(residents)
        return True

    def _tick(self) -> None:
        has_looked = self.look()
        if self._is_busy() or len(self._board):
            self._num_quiet = 0
        elif has_looked:
            self._num_quiet += 1
        for telling in self._tellings:
            if telling.has_news:
                self._num_quiet = 0
                telling.stream.wake()
        is_quiet = self._num_quiet >= QUIET_LOOKS
        now_s = asyncio.get_running_loop().time()
        self._set_timer(until_beat_s(now_s, REST_INTERVAL_S) if is_quiet else TELL_INTERVAL_S)

    def _set_timer(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)


class StreamTelling:
    """What one stream has been told."""

    def __init__(self, teller: Teller, stream: DeltaStream) -> None:
        self.stream = stream
        self._teller = teller
        self._num_looks = 0
        self._loads: dict[str, ModelNumbers] = {}
        self._counted_id = ""
        self._keys: dict[str, tuple[KeyMirror, int, int]] = {}
        """By model: what was told of it, under which epoch and up to which place."""
        self._updates: deque[worker_pb2.RouteKeyUpdate] = deque()
        """Due, and cut to fit into frames; none are added before these have left."""
        self._num_updates = 0

    @property
    def has_more(self) -> bool:
        """Whether keys are left that the last frame had no room for."""
        return bool(self._updates)

    @property
    def has_news(self) -> bool:
        """Whether the last look saw anything that was not told."""
        if self._updates:
            return True
        teller = self._teller
        if self._num_looks == teller.num_looks:
            return False
        if teller.loads.counted_id(self.stream) != self._counted_id:
            return True
        if teller.loads.for_stream(self.stream) != self._loads:
            return True
        return self._keys != {name: (it, it.epoch, it.place) for name, it in teller.mirrors.items()}

    def frame(self, *, is_first: bool = False) -> worker_pb2.WorkerFrame:
        """A frame without output: what was seen since the last one, if anything."""
        teller = self._teller
        teller.look(is_urgent=is_first)
        frame = worker_pb2.WorkerFrame(epoch=teller.epoch)
        if self._num_looks != teller.num_looks:
            self._num_looks = teller.num_looks
            self._tell_loads(frame.load)
            if not self._updates:
                self._updates.extend(self._due())
        num_keys = 0
        while self._updates and num_keys < MAX_FRAME_KEYS:
            update = self._updates.popleft()
            self._num_updates += 1
            update.number = self._num_updates
            num_keys += 1 + (len(update.added) + len(update.removed)) // KEY_BYTES
            frame.route_keys.append(update)
        return frame

    def _tell_loads(self, load: worker_pb2.Load) -> None:
        loads = self._teller.loads
        load.num_running = loads.num_running
        load.num_waiting = loads.num_waiting
        load.kv_usage = loads.kv_usage
        load.num_others = loads.num_others(self.stream)
        current = loads.for_stream(self.stream)
        for name, numbers in current.items():
            if self._loads.get(name) != numbers:
                fill_model_load(load.models.add(), name, numbers)
        for name in self._loads.keys() - current.keys():
            load.models.add(model=name)
        self._loads = current
        load.last_request_id = self._counted_id = loads.counted_id(self.stream)

    def _due(self) -> Iterator[worker_pb2.RouteKeyUpdate]:
        """What is to be said of keys; it counts as told."""
        mirrors = self._teller.mirrors
        for name in self._keys.keys() - mirrors.keys():
            yield worker_pb2.RouteKeyUpdate(model=name, epoch=self._keys.pop(name)[1], is_snapshot=True)
        for name, mirror in mirrors.items():
            told, epoch, place = self._keys.get(name, (None, 0, 0))
            changes = mirror.since(place) if told is mirror and epoch == mirror.epoch else None
            self._keys[name] = (mirror, mirror.epoch, mirror.place)
            if changes is None:
                yield from _updates(name, mirror.epoch, tuple(mirror.held), (), is_snapshot=True)
            elif changes.added or changes.removed:
                yield from _updates(name, mirror.epoch, changes.added, changes.removed)


def _updates(
    name: str, epoch: int, added: tuple[bytes, ...], removed: tuple[bytes, ...], *, is_snapshot: bool = False
) -> Iterator[worker_pb2.RouteKeyUpdate]:
    """Updates that say it all, each small enough for a frame: removals first."""
    for start in range(0, len(removed), MAX_FRAME_KEYS):
        part = pack_keys(removed[start : start + MAX_FRAME_KEYS])
        yield worker_pb2.RouteKeyUpdate(model=name, epoch=epoch, removed=part)
    for start in range(0, max(len(added), is_snapshot), MAX_FRAME_KEYS):
        part = pack_keys(added[start : start + MAX_FRAME_KEYS])
        yield worker_pb2.RouteKeyUpdate(model=name, epoch=epoch, is_snapshot=is_snapshot and not start, added=part)
