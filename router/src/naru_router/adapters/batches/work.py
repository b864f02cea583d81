"""One batch, from where it stands on disk to its end: check the file, run the lines, make the outputs.

Made by the runner for a batch whose lease this router holds. Whatever it was at when it is stopped, another one goes on
from what is on disk: the record says which stage it is in, the parts which lines are done.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from naru_proto.errors import NotFound, Unavailable
from naru_router.adapters.batches.batch_store import BatchStore
from naru_router.adapters.batches.line_call import LineCaller
from naru_router.adapters.batches.line_reader import read_lines
from naru_router.adapters.batches.line_run import LineRun
from naru_router.adapters.batches.outputs import Outputs
from naru_router.adapters.batches.parts import Done, PartWriter
from naru_router.adapters.batches.slots import Slots
from naru_router.adapters.storage.record_store import Record
from naru_router.core.batches.line import LineFault, parse_line
from naru_router.core.batches.record import MAX_ERRORS, MAX_LINES, OVER, WORK, counts, fault, moved, refused

logger = logging.getLogger(__name__)

FLUSH_S = 0.1
"""How long an answer may wait for the disk: what is lost with the router is done again."""
LOOK_S = 1.0
"""Between two looks at what clients have asked meanwhile, and two writings of how far it is."""
TURN_BYTES = 64 * 1024
"""Of a file that are checked between two turns of the event loop."""


class LeaseLost(Exception):
    """Another router may be at it."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What all batches of a router are worked on with."""

    store: BatchStore
    caller: LineCaller
    slots: Slots
    is_leaving: Callable[[], bool]
    """The router is to end: no further line is begun."""
    max_line_bytes: int


class BatchWork:
    """Mutable; run once."""

    def __init__(self, tools: Tools, tenant: str, batch_id: str, fence: int, is_held: Callable[[], bool]) -> None:
        """`fence`: the lease's token; `is_held`: whether it still is ours."""
        self._tools = tools
        self._tenant = tenant
        self._batch_id = batch_id
        self._fence = fence
        self._is_held = is_held
        self._parts = tools.store.parts(tenant, batch_id)

    async def run(self) -> None:
        """Works until the batch is over, or the router leaves.

        Raises:
            LeaseLost: another router may be at it.
            Unavailable: the disk refuses; try again later.
        """
        try:
            record = await self._tools.store.record(self._tenant, self._batch_id)
        except NotFound:
            await self._tools.store.leave(self._tenant, self._batch_id)
            return
        if record["status"] == "validating":
            record = await self._put(await self._validated(record))
        if record["status"] == "in_progress":
            outcome = await self._run_lines(record)
            if not outcome:
                return
            record = await self._tools.store.record(self._tenant, self._batch_id)
            record = await self._put(_ending(record, outcome))
        if record["status"] == "finalizing":
            record = await self._put(await self._outputs(record).finish())
        if record["status"] in OVER:
            await self._tools.store.leave(self._tenant, self._batch_id)

    async def _put(self, record: Record) -> Record:
        if not self._is_held() or not await self._tools.store.put(self._tenant, record, self._fence):
            raise LeaseLost
        return record

    # --- the file ---------------------------------------------------------------------------------------------------

    async def _validated(self, record: Record) -> Record:
        """The record of a batch whose file was checked: in progress, or failed."""
        try:
            total, faults = await self._check_file(record)
        except NotFound:
            total, faults = 0, [fault("invalid_input_file", "the input file has been deleted", param="input_file_id")]
        now_s = int(time.time())
        if faults:
            return refused(record, faults, now_s)
        work = {**record[WORK], "num_lines": total}
        return moved(record, "in_progress", now_s, request_counts=counts(total, 0, 0), **{WORK: work})

    async def _check_file(self, record: Record) -> tuple[int, list[dict[str, Any]]]:
        """How many lines there are, and what is wrong with them.

        Raises:
            NotFound: the file is gone.
        """
        shelf = self._tools.store.shelf
        path, _ = await shelf.content(self._tenant, record["input_file_id"])
        faults: list[dict[str, Any]] = []
        seen: set[bytes] = set()
        total = num_bytes = 0
        async with contextlib.aclosing(read_lines(shelf, path, self._tools.max_line_bytes)) as lines:
            async for number, data in lines:
                total += 1
                if total > MAX_LINES:
                    message = f"the file has more than {MAX_LINES} requests; send it in parts"
                    return total, [*faults, fault("too_many_requests", message)]
                try:
                    self._check_line(data, record["endpoint"], seen)
                except LineFault as exc:
                    faults.append(fault(exc.code, exc.message, number, exc.param))
                    if len(faults) >= MAX_ERRORS:
                        return total, faults
                num_bytes += len(data or b"")
                if num_bytes > TURN_BYTES:
                    num_bytes = 0
                    await asyncio.sleep(0)
        if not total:
            faults.append(fault("empty_file", "the file has no requests"))
        return total, faults

    def _check_line(self, data: bytes | None, endpoint: str, seen: set[bytes]) -> None:
        if data is None:
            raise LineFault("line_too_long", f"the line is longer than {self._tools.max_line_bytes} bytes")
        line = parse_line(data, endpoint)
        digest = hashlib.blake2b(line.custom_id.encode(), digest_size=16).digest()
        if digest in seen:
            raise LineFault(
                "duplicate_custom_id", "the custom_id stands in a line before; give each its own", "custom_id"
            )
        seen.add(digest)

    # --- the lines --------------------------------------------------------------------------------------------------

    async def _run_lines(self, record: Record) -> str:
        """How the batch ends; empty: it goes on elsewhere, or later."""
        tools, done = self._tools, Done(record[WORK]["num_lines"])

        def take(number: int, is_error: bool, line: bytes) -> None:
            done.add(number, is_error=is_error)

        await self._parts.scan(take)
        try:
            path, _ = await tools.store.shelf.content(self._tenant, record["input_file_id"])
        except NotFound:
            return "failed"
        writer = await self._parts.writer(self._fence)
        run = LineRun(
            endpoint=record["endpoint"],
            tenant=self._tenant,
            path=path,
            done=done,
            writer=writer,
            shelf=tools.store.shelf,
            caller=tools.caller,
            slots=tools.slots,
            is_leaving=tools.is_leaving,
            max_line_bytes=tools.max_line_bytes,
        )
        feed = asyncio.create_task(run.feed())
        try:
            return await self._attend(record, run, feed, done, writer)
        except NotFound:
            return "failed"
        finally:
            feed.cancel()
            await asyncio.gather(feed, return_exceptions=True)
            await run.flush()
            await tools.store.shelf.store.run(writer.close)

    async def _attend(
        self, record: Record, run: LineRun, feed: asyncio.Task[None], done: Done, writer: PartWriter
    ) -> str:
        """Brings answers onto disk while lines run, and looks at what is asked meanwhile."""
        look_s = 0.0
        while not feed.done() or run.num_kept:
            if not self._is_held():
                raise LeaseLost
            await run.flush()
            if time.monotonic() >= look_s:
                look_s = time.monotonic() + LOOK_S
                run.nudge()
                outcome = await self._asked_for(record)
                if outcome:
                    return outcome
                record = await self._progress(record, done, writer)
            await asyncio.wait({feed}, timeout=FLUSH_S)
            if feed.done() and run.num_kept:
                await asyncio.sleep(0 if await run.flush() else FLUSH_S)
        feed.result()
        return "completed" if done.completed + done.failed >= record[WORK]["num_lines"] else ""

    async def _asked_for(self, record: Record) -> str:
        if await self._tools.store.cancelling_s(self._tenant, self._batch_id) is not None:
            return "cancelled"
        return "expired" if time.time() >= record["expires_at"] else ""

    async def _progress(self, record: Record, done: Done, writer: PartWriter) -> Record:
        """Says how far it is, once that is on disk for good."""
        told = counts(record[WORK]["num_lines"], done.completed, done.failed)
        if told == record["request_counts"]:
            return record
        with contextlib.suppress(Unavailable):  # the next look says it
            await self._tools.store.shelf.store.run(writer.sync)
            return await self._put({**record, "request_counts": told})
        return record

    def _outputs(self, record: Record) -> Outputs:
        return Outputs(self._tools.store, self._parts, self._tenant, record, self._tools.max_line_bytes)


def _ending(record: Record, outcome: str) -> Record:
    """The record of a batch whose lines are over; the ids of its outputs are chosen now, so that they stay."""
    now_s = int(time.time())
    if outcome == "cancelled":
        record = {**record, "cancelling_at": now_s}
    work = {**record[WORK], "outcome": outcome, **Outputs.new_ids()}
    return moved(record, "finalizing", now_s, **{WORK: work})
