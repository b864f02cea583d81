"""Is the memory budget kept? Samples what a worker has booked and what the kernel says it has.

Called around the measured run. RSS is all resident pages of the worker's process: its own (heap, KV, workspace) and
mapped pages of images, also those the page cache would hold anyway. Child processes, which pack, are counted apart.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
from bench.hub_worker import MAX_MESSAGE_BYTES, rpc_words

from naru_proto.v1 import worker_pb2, worker_pb2_grpc

RSS_ALLOWANCE_BYTES = 150 * 10**6
"""For the process itself: interpreter, libraries, buffers of the server."""
RSS_SAMPLE_S = 0.02
BOOKS_SAMPLE_S = 0.05
STATS_TIMEOUT_S = 30.0
CHILDREN_EVERY = 10
"""RSS samples between two looks at child processes."""
BOOKED = ("weight_bytes", "kv_bytes", "workspace_bytes", "private_bytes", "unreturned_bytes")
"""Fields of the worker's memory stats that count against the budget; what is reserved for loads is part of them."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_RESET_HIGH_WATER_MARK = "5"


@dataclass(frozen=True, slots=True)
class Rss:
    """Resident bytes of one process."""

    all_bytes: int
    mapped_bytes: int
    """Of these, pages of files and shared memory."""


@dataclass(slots=True)
class MemoryTally:
    """What was seen so far, and how often a limit was broken."""

    budget_bytes: int
    host_budget_bytes: int
    rss_allowance_bytes: int = RSS_ALLOWANCE_BYTES
    num_rss_samples: int = 0
    rss_gap_max_s: float = 0.0
    """Longest time between two of them."""
    num_books_samples: int = 0
    num_rss_violations: int = 0
    num_books_violations: int = 0
    rss_peak_bytes: int = 0
    rss_peak_mapped_bytes: int = 0
    """Of files, in the sample with the most RSS."""
    booked_peak_bytes: int = 0
    booked_peak_parts: dict[str, int] = field(default_factory=dict)
    """What was booked for what, in the sample with the most."""
    reserved_peak_bytes: int = 0
    unreturned_peak_bytes: int = 0
    host_peak_bytes: int = 0
    image_peak_bytes: int = 0
    children_rss_peak_bytes: int = 0
    num_children_peak: int = 0

    @property
    def rss_limit_bytes(self) -> int:
        """RSS above this is a violation."""
        return self.budget_bytes + self.host_budget_bytes + self.rss_allowance_bytes

    @property
    def num_violations(self) -> int:
        """Samples in which bookings were above the budget or RSS above its limit."""
        return self.num_rss_violations + self.num_books_violations

    @property
    def rss_over_budget_mb(self) -> float:
        """Largest RSS less both budgets, in 10**6 bytes; negative where it never came near."""
        return (self.rss_peak_bytes - self.budget_bytes - self.host_budget_bytes) / 1e6

    def as_dict(self) -> dict[str, Any]:
        """All of it, for the results file."""
        values = dataclasses.asdict(self)
        return {**values, "rss_limit_bytes": self.rss_limit_bytes, "num_violations": self.num_violations}

    def add_rss(self, rss: Rss) -> None:
        """One sample of the process."""
        self.num_rss_samples += 1
        self.num_rss_violations += rss.all_bytes > self.rss_limit_bytes
        if rss.all_bytes > self.rss_peak_bytes:
            self.rss_peak_bytes, self.rss_peak_mapped_bytes = rss.all_bytes, rss.mapped_bytes

    def add_children(self, rss_bytes: int, count: int) -> None:
        """One sample of the child processes, all together."""
        self.children_rss_peak_bytes = max(self.children_rss_peak_bytes, rss_bytes)
        self.num_children_peak = max(self.num_children_peak, count)

    def add_books(self, memory: worker_pb2.MemoryStats) -> None:
        """One sample of the worker's own numbers. The budget is the one it was started with, whatever it says."""
        booked = booked_bytes(memory)
        self.num_books_samples += 1
        self.num_books_violations += booked > self.budget_bytes
        if booked > self.booked_peak_bytes:
            self.booked_peak_bytes = booked
            self.booked_peak_parts = {name: getattr(memory, name) for name in BOOKED}
        self.reserved_peak_bytes = max(self.reserved_peak_bytes, memory.reserved_bytes)
        self.unreturned_peak_bytes = max(self.unreturned_peak_bytes, memory.unreturned_bytes)
        self.host_peak_bytes = max(self.host_peak_bytes, memory.host_bytes)
        self.image_peak_bytes = max(self.image_peak_bytes, memory.image_bytes)


def booked_bytes(memory: worker_pb2.MemoryStats) -> int:
    """All that counts against the budget."""
    return sum(getattr(memory, name) for name in BOOKED)


def read_rss(pid: int) -> Rss:
    """Of one process, now. Raises OSError when it is gone."""
    _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    return Rss(int(resident) * _PAGE_BYTES, int(shared) * _PAGE_BYTES)


def children_of(pid: int) -> list[int]:
    """Living child processes, of whichever thread they are."""
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            found += [int(child) for child in (thread / "children").read_text().split()]
        except OSError:
            continue  # the thread has ended
    return found


def reset_high_water_mark(pid: int) -> None:
    """The kernel's own largest RSS starts anew."""
    Path(f"/proc/{pid}/clear_refs").write_text(_RESET_HIGH_WATER_MARK)


def high_water_mark(pid: int) -> int:
    """Largest RSS that the kernel saw since the last reset, bytes: nothing escapes between two samples."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


@dataclass(slots=True)
class MemoryWatch:
    """Samples a worker from two threads while the `with` block runs: RSS does not wait for the worker's answers."""

    pid: int
    address: str
    tally: MemoryTally
    last: worker_pb2.MemoryStats | None = None
    """The newest numbers of the worker."""
    failure: str = ""
    """Why sampling ended early; empty while it goes on."""
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> MemoryWatch:
        reset_high_water_mark(self.pid)
        for watch in (self._watch_rss, self._watch_books):
            thread = threading.Thread(target=self._guarded, args=(watch,), daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _guarded(self, watch: Callable[[], None]) -> None:
        try:
            watch()
        except grpc.RpcError as exc:
            self.failure = f"the worker gave no stats: {rpc_words(exc)}"
        except OSError as exc:
            self.failure = f"the worker's memory cannot be read: {exc}"

    def _watch_rss(self) -> None:
        last_s = time.monotonic()
        while not self._stop.wait(RSS_SAMPLE_S):
            self.tally.add_rss(read_rss(self.pid))
            now_s = time.monotonic()
            self.tally.rss_gap_max_s, last_s = max(self.tally.rss_gap_max_s, now_s - last_s), now_s
            if self.tally.num_rss_samples % CHILDREN_EVERY == 0:
                self.tally.add_children(*_rss_of(children_of(self.pid)))

    def _watch_books(self) -> None:
        options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
        with grpc.insecure_channel(self.address, options=options) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            while not self._stop.wait(BOOKS_SAMPLE_S):
                self.last = stub.Stats(worker_pb2.StatsRequest(), timeout=STATS_TIMEOUT_S).memory
                self.tally.add_books(self.last)


def _rss_of(pids: list[int]) -> tuple[int, int]:
    """(bytes of all, how many were still there)."""
    total = count = 0
    for pid in pids:
        try:
            total += read_rss(pid).all_bytes
            count += 1
        except OSError:
            continue
    return total, count
