"""What all parts of the hub share: records by name, the indices over them, queues, books, and the actions of this call.

Mutable, owned by one `Hub`. The indices are insertion-ordered dicts, so that equal events give equal actions.
"""

from __future__ import annotations

import heapq

from naru_worker.core.hub.actions import Action, Changed
from naru_worker.core.hub.config import HubConfig
from naru_worker.core.hub.eviction import VictimChooser
from naru_worker.core.hub.memory import Memory
from naru_worker.core.hub.model import ModelEntry, Tier
from naru_worker.core.hub.records import Operation, Place, Record
from naru_worker.core.hub.wait_queue import Rank, WaitQueue
from naru_worker.core.residency import ModelState

_FOR_REQUEST_HANDICAP_S = 10.0
"""A load that somebody waits for elsewhere comes behind those with waiting requests, unless it waits so much longer."""
_PLAIN_HANDICAP_S = 60.0
"""The same for loads that nobody waits for: they come last, and still they come."""
_RATE_SHARE = 0.1
"""Weight of a new load in the seconds per byte of its tier."""
_LEAVING = (Operation.DRAIN, Operation.UNLOAD)
_LOADS = (Operation.RAISE, Operation.LOAD)


class HubState:
    """See the module."""

    def __init__(self, config: HubConfig, choose: VictimChooser) -> None:
        self.config = config
        self.choose = choose
        self.memory = Memory(config.budget_bytes, config.host_budget_bytes)
        self.now_s = 0.0
        self.actions: list[Action] = []
        self.records: dict[str, Record] = {}
        self.forgotten: dict[str, Record] = {}
        """Names that stand for their generation alone, oldest first."""
        self.residents: dict[str, Record] = {}
        """All that are not COLD."""
        self.loaded: dict[str, Record] = {}
        self.in_host = WaitQueue()
        """Models in host memory, least valuable first: those that rest there before those asked for there, then LRU."""
        self.pinned: dict[str, Record] = {}
        self.leaving: dict[str, Record] = {}
        """On their way out of the engine account: draining, drained, unloading, or loads told to stop."""
        self.dropping: dict[str, Record] = {}
        self.without_room: dict[str, Record] = {}
        self.trimming: dict[str, Record] = {}
        self.fetches = WaitQueue()
        self.loads = WaitQueue()
        self.num_fetches = 0
        self.num_loads = 0
        self.host_waiters: dict[str, Record] = {}
        """Drained models that wait for host memory before they unload."""
        self.has_room_changed = False
        """Something left or was unpinned: loads that failed for want of room may be tried again."""
        self.promised_bytes = 0
        """Of free and coming bytes, what waiting loads will take."""
        self.untold_until_s = 0.0
        self.load_rates: dict[bool, float] = {}
        """Seconds per byte of weights of loads from host memory (True) and from disk."""
        self._num_records = 0
        self._failure_timers: list[tuple[float, int, str]] = []

    # --- records ----------------------------------------------------------------------------------------------------

    def add(self, name: str) -> Record:
        """A record for a new name; the caller has seen to the limit."""
        record = Record(ModelEntry(name, state_since_s=self.now_s, last_used_s=self.now_s), self._num_records)
        self._num_records += 1
        self.records[name] = record
        return record

    def make_name_room(self) -> bool:
        """Forgets the oldest forgotten name where the limit is reached. False: there is none."""
        if len(self.records) < self.config.max_known_models:
            return True
        name = next(iter(self.forgotten), None)
        if name is None:
            return False
        del self.forgotten[name], self.records[name]
        return True

    # --- moves ------------------------------------------------------------------------------------------------------

    def place(self, record: Record, place: Place) -> None:
        """Its copy is somewhere else now."""
        name = record.name
        _index(self.loaded, record, is_in=place is Place.LOADED)
        record.place = place
        self.rank_in_host(record)
        if place < Place.HOST:
            record.entry.loaded_spec = None
        if place is not Place.LOADED:
            record.trim_bytes = 0
            self.trimming.pop(name, None)
        self._index_leaving(record)

    def begin(self, record: Record, operation: Operation) -> int:
        """An operation is under way; returns its attempt."""
        assert record.operation is None or record.operation is operation is Operation.DRAIN, "one operation per model"
        entry = record.entry
        if record.operation is None:
            self.num_fetches += operation is Operation.FETCH
            self.num_loads += operation in _LOADS
        entry.attempt += 1
        entry.is_busy = True
        record.operation = operation
        record.operation_spec = entry.spec
        record.is_stopping = False
        _index(self.dropping, record, is_in=operation is Operation.DROP)
        self._index_leaving(record)
        return entry.attempt

    def end(self, record: Record) -> None:
        """Its operation is over."""
        self.num_fetches -= record.operation is Operation.FETCH
        self.num_loads -= record.operation in _LOADS
        record.operation = None
        record.is_stopping = False
        record.entry.is_busy = False
        self.dropping.pop(record.name, None)
        self._index_leaving(record)

    def mark_stopping(self, record: Record) -> None:
        """Its operation was told to stop."""
        record.is_stopping = True
        self._index_leaving(record)

    def announce(self, record: Record, why: str) -> None:
        """Tells of a change of state, if there is one. The end of an eviction is told as such."""
        entry = record.entry
        old, new = entry.state, record.state()
        reason = record.eviction or why
        is_eviction = bool(record.eviction) and record.operation is None and record.place <= Place.HOST
        if is_eviction:
            entry.last_eviction, entry.last_eviction_s = record.eviction, self.now_s
            record.eviction = ""
        if old is not new:
            entry.state, entry.state_since_s = new, self.now_s
            record.why = reason
            _index(self.residents, record, is_in=new is not ModelState.COLD)
            self.actions.append(Changed(record.name, old, new, reason, is_eviction))

    def rank_in_host(self, record: Record) -> None:
        """Its place, tier or last use has changed."""
        if record.place is Place.HOST:
            self.in_host.put(record.name, self.host_rank(record))
        else:
            self.in_host.remove(record.name)

    def index_pin(self, record: Record) -> None:
        """Its residency has changed."""
        _index(self.pinned, record, is_in=record.entry.residency.pinned)

    def host_rank(self, record: Record) -> Rank:
        """Lower leaves host memory sooner."""
        return int(record.entry.tier >= Tier.HOST), record.entry.last_used_s, record.number

    # --- queues -----------------------------------------------------------------------------------------------------

    def enqueue(self, record: Record, queue: WaitQueue) -> None:
        """It waits in this queue, at its present rank."""
        if record.queued_s is None:
            record.queued_s = self.now_s
        (self.loads if queue is self.fetches else self.fetches).remove(record.name)
        queue.put(record.name, self._rank(record))

    def dequeue(self, record: Record) -> None:
        """It waits for nothing any more."""
        self.fetches.remove(record.name)
        self.loads.remove(record.name)
        record.queued_s = None
        record.blocked_since_s = None
        record.is_committed = False

    def rerank(self, record: Record) -> None:
        """Its requests or its promise have changed."""
        for queue in (self.fetches, self.loads):
            if record.name in queue:
                queue.put(record.name, self._rank(record))

    def _rank(self, record: Record) -> Rank:
        entry = record.entry
        queued_s = self.now_s if record.queued_s is None else record.queued_s
        if record.is_committed:
            return 0, queued_s, record.number
        if entry.num_held:
            return 1, entry.held_since_s, record.number
        is_awaited = record.is_for_request or record.is_demanded
        handicap_s = _FOR_REQUEST_HANDICAP_S if is_awaited else _PLAIN_HANDICAP_S
        return 1, queued_s + handicap_s, record.number

    # --- failures ---------------------------------------------------------------------------------------------------

    def set_failure_timer(self, due_s: float, record: Record) -> None:
        """A failed record is to be looked at again then."""
        heapq.heappush(self._failure_timers, (due_s, record.number, record.name))

    def next_failure_timer_s(self) -> float | None:
        """When the next one is due."""
        return self._failure_timers[0][0] if self._failure_timers else None

    def due_failures(self) -> list[Record]:
        """Takes out all that are due."""
        due: list[Record] = []
        while self._failure_timers and self._failure_timers[0][0] <= self.now_s:
            record = self.records.get(heapq.heappop(self._failure_timers)[2])
            if record is not None:
                due.append(record)
        return due

    # --- bytes ------------------------------------------------------------------------------------------------------

    def spare_bytes(self) -> int:
        """Free now, and coming: of models on their way out, of the engine or of host memory, and of KV told to be given
        up.
        """
        memory = self.memory
        coming_bytes = memory.coming_bytes(self.leaving) + memory.asleep_bytes(self.dropping)
        return memory.free_bytes + coming_bytes + self._trim_bytes()

    def is_above_high_watermark(self) -> bool:
        """Whether what is booked and promised is more than idle models may hold on to."""
        return self.memory.used_bytes + self.promised_bytes > self.config.high_watermark * self.config.budget_bytes

    def ordered_trim_bytes(self, record: Record) -> int:
        """KV that it was told to give up and has not reported yet: counted as coming."""
        if not record.trim_bytes or self.now_s >= record.trim_until_s:
            return 0
        return min(record.trim_bytes, self.memory.spare_kv_bytes(record.name))

    def _trim_bytes(self) -> int:
        return sum(
            self.ordered_trim_bytes(record) for name, record in self.trimming.items() if name not in self.leaving
        )

    def _index_leaving(self, record: Record) -> None:
        is_leaving = (
            record.operation in _LEAVING
            or record.place is Place.DRAINED
            or (record.operation is Operation.LOAD and record.is_stopping)
        )
        _index(self.leaving, record, is_in=is_leaving)

    def is_evictable(self, record: Record) -> bool:
        """Whether a serving model, busy or not, may be evicted: it is not pinned and has been there long enough."""
        return not record.entry.residency.pinned and self.now_s >= self.guarded_until_s(record)

    def learn_load(self, record: Record, load_s: float) -> None:
        """A load took so long, from where its record stands."""
        footprint = record.footprint
        is_from_host = record.place is Place.HOST
        if is_from_host:
            record.from_host_s = load_s
        else:
            record.from_disk_s = load_s
        if footprint is not None and footprint.weight_bytes:
            rate = load_s / footprint.weight_bytes
            known = self.load_rates.get(is_from_host, rate)
            self.load_rates[is_from_host] = known + _RATE_SHARE * (rate - known)

    def load_s(self, record: Record, *, is_from_host: bool) -> float:
        """What a load will take by its last one, or by loads of other models; 0: not known."""
        measured_s = record.from_host_s if is_from_host else record.from_disk_s
        if not measured_s and record.footprint is not None:
            measured_s = self.load_rates.get(is_from_host, 0.0) * record.footprint.weight_bytes
        return measured_s

    def reload_s(self, record: Record) -> float:
        """What bringing a model back will take. One tier for all candidates: else chance would decide."""
        is_from_host = self.config.host_budget_bytes > 0 and True in self.load_rates
        return max(self.load_s(record, is_from_host=is_from_host), self.config.reload_floor_s)

    def guarded_until_s(self, record: Record) -> float:
        """Before, no other model evicts it."""
        entry = record.entry
        guard_s = max(entry.residency.min_residency_s, self.config.guard_loads * entry.load_s)
        return entry.ready_since_s + guard_s


def _index(index: dict[str, Record], record: Record, *, is_in: bool) -> None:
    if is_in:
        index.setdefault(record.name, record)
    else:
        index.pop(record.name, None)
