"""Packing processes that stay for the next model: starting one takes longer than packing a small model.

Owned by `ImageStore`, called by loading threads. There are as many processes as models being packed at once; one that
is idle ends soon, for its memory is not ours to keep.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from naru_proto.errors import LoadError
from naru_worker.adapters.images.errors import LoadStopped
from naru_worker.adapters.images.packing import PackingDied, PackingProcess, PackPlan

IDLE_S = 10.0
"""An idle process ends by itself after as long (see `pack`); here it is reaped."""


class PackingPool:
    """Thread-safe. `close` it: processes live as long as it does."""

    def __init__(self) -> None:
        # Re-entrant: a store that is forgotten is closed by the collector, which may run under the lock.
        self._lock = threading.RLock()
        self._idle: list[tuple[float, PackingProcess]] = []
        """(since when, process), longest idle first."""
        # The kernel ends a process when the thread that started it ends, so that must be one that stays.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="packing")
        self._timer: threading.Timer | None = None
        self._is_closed = False

    @contextlib.contextmanager
    def planned(
        self, source: Path, destination: Path, should_stop: threading.Event
    ) -> Iterator[tuple[PackingProcess, PackPlan]]:
        """A process that has read the source, and what it would write; `write` it or not.

        Raises:
            LoadError: the source cannot be served, or no process can be started, or it died.
            LoadStopped: it was told to stop.
        """
        process, plan = self._plan(source, destination, should_stop)
        try:
            yield process, plan
        except LoadError:
            self._release(process)  # No room, say: nothing is wrong with the process.
            raise
        except BaseException:
            process.close()
            raise
        self._release(process)

    def close(self) -> None:
        """Kills idle processes now, and others when they are given back."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            if self._timer is not None:
                self._timer.cancel()
        for _, process in idle:
            process.close()
        self._starter.shutdown(wait=False)

    def _plan(self, source: Path, destination: Path, should_stop: threading.Event) -> tuple[PackingProcess, PackPlan]:
        process = self._take()
        is_used = process is not None
        while True:
            process = process or self._start(source)
            try:
                return process, process.plan(source, destination, should_stop)
            except PackingDied:
                process.close()
                if not is_used:
                    raise
                # It may have been about to end by itself. Nothing has been done yet: another one gets the model.
                process, is_used = None, False
            except BaseException:
                self._release(process)
                raise

    def _start(self, source: Path) -> PackingProcess:
        try:
            return self._starter.submit(PackingProcess).result()
        except (OSError, RuntimeError) as e:  # RuntimeError: the interpreter or the store is about to end.
            why = e.strerror if isinstance(e, OSError) else str(e)
            raise LoadError(f"{source}: no process to pack it can be started ({why})") from e

    def _take(self) -> PackingProcess | None:
        """The idle process that was used last."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                _, process = self._idle.pop()
            if process.is_fit():
                return process
            process.close()

    def _release(self, process: PackingProcess) -> None:
        """Keeps the process if it is fit for another model."""
        with contextlib.suppress(LoadError, LoadStopped):
            process.skip()
        if process.is_fit():
            with self._lock:
                if not self._is_closed:
                    self._idle.append((time.monotonic(), process))
                    self._arm()
                    return
        process.close()

    def _arm(self) -> None:
        """Sees to it that somebody looks when the first idle process is due. The lock is held."""
        if self._timer is None and self._idle:
            self._timer = threading.Timer(max(0.0, self._idle[0][0] + IDLE_S - time.monotonic()), self._reap)
            self._timer.daemon = True
            self._timer.start()

    def _reap(self) -> None:
        """Ends processes that are idle for too long, or are dead."""
        with self._lock:
            self._timer = None
            due = time.monotonic() - IDLE_S
            gone = [entry for entry in self._idle if entry[0] <= due or not entry[1].is_fit()]
            self._idle = [entry for entry in self._idle if entry not in gone]
            if not self._is_closed:
                self._arm()
        for _, process in gone:
            process.close()
