"""Makes the output and the error file of a batch of its parts. Used by BatchWork when no line runs any more.

May be stopped and done again: the files' ids were chosen before, and a file is seen only when it is whole.
"""

from __future__ import annotations

import contextlib
import os
import time

from naru_proto.errors import NotFound
from naru_router.adapters.batches.batch_store import BatchStore
from naru_router.adapters.batches.line_reader import read_lines
from naru_router.adapters.batches.parts import Done, Parts
from naru_router.adapters.storage.blob import BlobWriter
from naru_router.adapters.storage.record_store import Record, new_id
from naru_router.core.batches.line import LineFault, error_line, parse_line
from naru_router.core.batches.record import WORK, counts, fault, moved, refused
from naru_router.core.file_record import OUTPUT_PURPOSE

EXPIRED = ("batch_expired", "the batch's time was over before this request was run")


class Outputs:
    """Of one batch."""

    def __init__(self, store: BatchStore, parts: Parts, tenant: str, record: Record, max_line_bytes: int) -> None:
        """`record`: in the state finalizing."""
        self._store = store
        self._shelf = store.shelf
        self._parts = parts
        self._tenant = tenant
        self._record = record
        self._max_line_bytes = max_line_bytes

    @staticmethod
    def new_ids() -> dict[str, str]:
        """For the record's WORK."""
        return {"output_id": new_id("file-"), "error_id": new_id("file-")}

    async def finish(self) -> Record:
        """Writes both files, those with a line in them; the record of the batch that is over.

        Raises:
            Unavailable: the disk is full or away.
        """
        work = self._record[WORK]
        done = Done(work["num_lines"])
        _, output = await self._shelf.begin(self._tenant, work["output_id"])
        try:
            _, error = await self._shelf.begin(self._tenant, work["error_id"])
            try:
                return await self._fill(output, error, done)
            finally:
                await error.drop()
        finally:
            await output.drop()

    async def _fill(self, output: BlobWriter, error: BlobWriter, done: Done) -> Record:
        def take(number: int, is_error: bool, line: bytes) -> None:
            if done.add(number, is_error=is_error):  # two routers may have done one line
                (error if is_error else output).append(line + b"\n")

        work, outcome = self._record[WORK], self._record[WORK]["outcome"]
        await self._parts.scan(take)
        if outcome == "expired":
            await self._tell_expired(error, done)
        ids = {
            "output_file_id": await self._keep(output, work["output_id"], "output"),
            "error_file_id": await self._keep(error, work["error_id"], "error"),
        }
        now_s = int(time.time())
        told = counts(work["num_lines"], done.completed, done.failed)
        record = {**self._record, **ids, "request_counts": told}
        if outcome == "failed":
            gone = fault("invalid_input_file", "the input file was deleted before all was done", param="input_file_id")
            return refused(record, [gone], now_s)
        return moved(record, outcome, now_s)

    async def _keep(self, writer: BlobWriter, file_id: str, what: str) -> str | None:
        if not writer.num_bytes:
            return None
        expiry_s = self._record[WORK]["output_expires_after_s"]
        await self._shelf.finish(
            self._tenant,
            file_id,
            writer,
            name=f"{self._record['id']}_{what}.jsonl",
            purpose=OUTPUT_PURPOSE,
            expires_s=None if expiry_s is None else int(time.time()) + expiry_s,
        )
        return file_id

    async def _tell_expired(self, error: BlobWriter, done: Done) -> None:
        """A line of the error file for each request that was not answered; none where the input is gone."""
        with contextlib.suppress(NotFound):
            path, _ = await self._shelf.content(self._tenant, self._record["input_file_id"])
            ordinal = 0
            async with contextlib.aclosing(read_lines(self._shelf, path, self._max_line_bytes)) as lines:
                async for _, data in lines:
                    ordinal += 1
                    if done.add(ordinal, is_error=True):
                        item_id = f"batch_req_{os.urandom(12).hex()}"
                        await error.write(error_line(item_id, self._custom_id(data), *EXPIRED) + b"\n")

    def _custom_id(self, data: bytes | None) -> str:
        with contextlib.suppress(LineFault):
            return parse_line(data or b"", self._record["endpoint"]).custom_id
        return ""
