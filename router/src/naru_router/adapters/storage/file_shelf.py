"""Files of clients: records and contents together. Used by the file endpoints and by batches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import BinaryIO

from naru_proto.errors import NotFound
from naru_router.adapters.storage.blob import BlobWriter
from naru_router.adapters.storage.record_store import Record, RecordStore, new_id
from naru_router.core.fields import shown
from naru_router.core.file_record import KIND, is_alive, new_record
from naru_router.core.listing import Listing

CHUNK_BYTES = 256 * 1024


class FileShelf:
    """All files in a store."""

    def __init__(self, store: RecordStore) -> None:
        self.store = store

    async def begin(self, tenant: str, file_id: str = "") -> tuple[str, BlobWriter]:
        """A new file's id, where none is given, and the writer of its content. `finish` makes it seen.

        Raises:
            Unavailable: the disk refuses.
        """
        file_id = file_id or new_id("file-")
        return file_id, await self.store.create_blob(KIND, tenant, file_id)

    async def finish(
        self, tenant: str, file_id: str, writer: BlobWriter, *, name: str, purpose: str, expires_s: int | None = None
    ) -> Record:
        """Puts a written content on the shelf; its record.

        Raises:
            Unavailable: the disk refuses.
        """
        await writer.commit()
        record = new_record(file_id, writer.num_bytes, int(time.time()), name, purpose, expires_s)
        await self.store.put(KIND, tenant, file_id, record)
        return record

    async def get(self, tenant: str, file_id: str) -> Record:
        """A file's record.

        Raises:
            NotFound: there is none, or none of this tenant's.
        """
        record = await self.store.get(KIND, tenant, file_id)
        if record is None or not is_alive(record, time.time()):
            raise NotFound(f"there is no file {shown(file_id)}", param="id")
        return record

    async def list(self, tenant: str, listing: Listing, purpose: str = "") -> tuple[list[Record], bool]:
        """Records of files, of one purpose where one is named, and whether there are more."""
        found: list[Record] = []
        after, now_s = listing.after, time.time()
        while True:
            page = await self.store.list(
                KIND, tenant, limit=listing.limit + 1, after=after, ascending=listing.is_ascending
            )
            found += [it for it in page if is_alive(it, now_s) and purpose in ("", it["purpose"])]
            if len(found) > listing.limit or len(page) <= listing.limit:
                return found[: listing.limit], len(found) > listing.limit
            after = page[-1]["id"]

    async def delete(self, tenant: str, file_id: str) -> None:
        """Removes a file.

        Raises:
            NotFound: there is none, or none of this tenant's.
        """
        if not await self.store.delete(KIND, tenant, file_id):
            raise NotFound(f"there is no file {shown(file_id)}", param="id")
        await self.store.delete_blob(KIND, tenant, file_id)

    async def content(self, tenant: str, file_id: str) -> tuple[Path, int]:
        """Where a content is, and its size in bytes.

        Raises:
            NotFound: there is none, or none of this tenant's.
        """
        record = await self.get(tenant, file_id)
        path = self.store.blob_path(KIND, tenant, file_id)
        assert path is not None  # it has a record
        return path, record["bytes"]

    async def chunks(self, path: Path, offset: int = 0) -> AsyncGenerator[bytes, None]:
        """The bytes of a content, from an offset.

        Raises:
            NotFound: it has just been deleted.
            Unavailable: the disk cannot be read.
        """
        opening = asyncio.ensure_future(self.store.run(lambda: _open(path, offset)))
        try:
            file = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_opened)
            raise
        if file is None:
            raise NotFound("the file has just been deleted", param="id")
        try:
            while data := await self.store.run(lambda: file.read(CHUNK_BYTES)):
                yield data
        finally:
            file.close()

    async def sweep(self) -> int:
        """Removes files whose time is over; how many."""
        count, now_s = 0, time.time()
        for tenant, file_id in await self.store.every(KIND):
            record = await self.store.get(KIND, tenant, file_id)
            if record is not None and not is_alive(record, now_s):
                count += await self.store.delete(KIND, tenant, file_id)
                await self.store.delete_blob(KIND, tenant, file_id)
        return count


def _close_opened(opening: asyncio.Future[BinaryIO | None]) -> None:
    """Of a file that was opened for somebody who has left meanwhile."""
    if not opening.cancelled() and opening.exception() is None:
        file = opening.result()
        if file is not None:
            file.close()


def _open(path: Path, offset: int) -> BinaryIO | None:
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    file.seek(offset)
    return file
