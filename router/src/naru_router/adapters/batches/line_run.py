"""Runs the lines of one batch that are not done, many at once, and keeps what they bring. Driven by BatchWork.

Holds the lines in flight and the answers that are not on disk yet; both are bounded, so that a file may have any size.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

from naru_proto.errors import Unavailable
from naru_router.adapters.batches.line_call import LineCaller
from naru_router.adapters.batches.line_reader import read_lines
from naru_router.adapters.batches.parts import Done, PartWriter, entry
from naru_router.adapters.batches.slots import Slots
from naru_router.adapters.storage.file_shelf import FileShelf
from naru_router.core.batches.line import LineFault, error_line, output_line, parse_line
from naru_router.core.batches.pace import Pace, pause_s

logger = logging.getLogger(__name__)

MAX_KEPT_BYTES = 8 * 1024 * 1024
"""Of answers that are not on disk; no line is begun above it."""
MAX_LINES_BYTES = 32 * 1024 * 1024
"""Of lines in flight; above it none is begun, but for one at a time."""
TURN_LINES = 256
"""Lines that are skipped between two turns of the event loop."""
BUSY = (0, 429, 499, 503)
"""Statuses of a request that is sent again until it is answered; 0 and 499: the endpoint was stopped."""
BROKEN = (500, 502)
MAX_BROKEN_TRIES = 3


class LineRun:
    """One go at a batch. Mutable."""

    def __init__(
        self,
        *,
        endpoint: str,
        tenant: str,
        path: Path,
        done: Done,
        writer: PartWriter,
        shelf: FileShelf,
        caller: LineCaller,
        slots: Slots,
        is_leaving: Callable[[], bool],
        max_line_bytes: int,
    ) -> None:
        """`done` is added to as answers come onto disk; `is_leaving`: no further line is to be begun."""
        self._endpoint = endpoint
        self._tenant = tenant
        self._path = path
        self._done = done
        self._writer = writer
        self._shelf = shelf
        self._caller = caller
        self._slots = slots
        self._is_leaving = is_leaving
        self._max_line_bytes = max_line_bytes
        self._pace = Pace()
        self._tasks: dict[asyncio.Task[None], int] = {}
        """Lines in flight, with their bytes."""
        self._lines_bytes = 0
        self._kept: list[tuple[int, bool, bytes]] = []
        self._kept_bytes = 0
        self._is_disk_refusing = False
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None

    async def feed(self) -> None:
        """Begins line after line until all were, and waits for them; a cancelled caller ends those in flight.

        Raises:
            NotFound: the file is gone.
            Unavailable: the disk cannot be read.
        """
        try:
            ordinal = 0
            async with contextlib.aclosing(read_lines(self._shelf, self._path, self._max_line_bytes)) as lines:
                async for _, data in lines:
                    ordinal += 1
                    if ordinal in self._done:
                        if ordinal % TURN_LINES == 0:
                            await asyncio.sleep(0)
                        continue
                    num_bytes = len(data or b"")
                    await self._room(num_bytes)
                    if self._is_leaving():
                        break
                    task = asyncio.create_task(self._line(ordinal, data))
                    self._tasks[task] = num_bytes
                    self._lines_bytes += num_bytes
                    task.add_done_callback(self._ended)
            while self._tasks:
                await asyncio.wait(self._tasks)
            self._raise_failure()
        finally:
            ending = tuple(self._tasks)
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)

    async def flush(self) -> bool:
        """Brings kept answers onto disk; whether there were any. While the disk refuses, they stay, and no line begins.

        Raises nothing that passes by itself.
        """
        kept, self._kept, kept_bytes = self._kept, [], self._kept_bytes
        if not kept:
            return False
        data = b"".join(entry(number, line, is_error=is_error) for number, is_error, line in kept)
        try:
            await self._shelf.store.run(lambda: self._writer.append(data))
        except Unavailable as exc:
            logger.warning("%d answers of a batch wait for the disk: %s", len(kept), exc.message)
            self._kept = kept + self._kept
            self._is_disk_refusing = True
            return False
        self._is_disk_refusing = False
        self._kept_bytes -= kept_bytes
        for number, is_error, _ in kept:
            self._done.add(number, is_error=is_error)
        self._changed.set()
        return True

    @property
    def num_kept(self) -> int:
        """Answers that are not on disk."""
        return len(self._kept)

    def nudge(self) -> None:
        """Something outside has changed."""
        self._changed.set()

    async def _room(self, num_bytes: int) -> None:
        """Returns when a line of this size may be begun, or none is to be any more."""
        while not self._is_leaving():
            self._raise_failure()
            is_full = self._is_disk_refusing or self._kept_bytes > MAX_KEPT_BYTES
            is_full = is_full or (bool(self._tasks) and self._lines_bytes + num_bytes > MAX_LINES_BYTES)
            if not is_full and len(self._tasks) < self._pace.limit(self._slots.most()):
                return
            self._changed.clear()
            await self._changed.wait()

    async def _line(self, ordinal: int, data: bytes | None) -> None:
        item_id = f"batch_req_{os.urandom(12).hex()}"
        try:
            if data is None:
                raise LineFault("line_too_long", f"the line is longer than {self._max_line_bytes} bytes")
            line = parse_line(data, self._endpoint)
        except LineFault as exc:  # it was checked: the file has been changed since
            self._keep(ordinal, error_line(item_id, "", exc.code, exc.message), is_error=True)
            return
        request_id, body = os.urandom(16).hex(), line.request()
        num_tries = num_broken = 0
        while True:
            async with self._slots:
                reply = await self._caller.call(self._endpoint, self._tenant, body, request_id)
            is_busy, is_broken = reply.status in BUSY, reply.status in BROKEN
            num_broken += is_broken
            if not is_busy and not (is_broken and num_broken < MAX_BROKEN_TRIES):
                break
            if is_busy:
                self._pace.refused(time.monotonic())
            if not self._is_leaving():
                await asyncio.sleep(pause_s(num_tries, reply.retry_after_s, random.random()))
            if self._is_leaving():
                return  # whoever goes on with the batch does it
            num_tries += 1
        self._pace.answered()
        is_error = reply.status != 200
        answer = output_line(item_id, line.custom_id, reply.status, request_id, bytes(reply.body))
        self._keep(ordinal, answer, is_error=is_error)

    def _keep(self, ordinal: int, line: bytes, *, is_error: bool) -> None:
        self._kept.append((ordinal, is_error, line))
        self._kept_bytes += len(line)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._lines_bytes -= self._tasks.pop(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()
        self._changed.set()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
