"""Small JSON records of clients on disk: files, batches, stored responses. One folder for any number of routers.

Each record is one file, written beside its place and renamed into it, so that readers see the old one or the new one.
Nothing here is locked: of two writers of one record the last one wins. Who may write a batch is the lease's business.
What records hold is up to their owners. All disk work is done in threads of the store's own.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import orjson

from naru_router.adapters.storage.blob import BlobWriter
from naru_router.adapters.storage.disk import (
    FENCE,
    disk_error,
    names_in,
    read_record,
    remove,
    sweep_pieces,
    tenant_folders,
    write_fenced,
    write_whole,
)

logger = logging.getLogger(__name__)

Record = dict[str, Any]
Records = list[Record]


class TenantFolder(str):
    """The name of a tenant's folder, where a store is asked in place of the tenant's own name."""

    __slots__ = ()


TenantAndId = tuple[TenantFolder, str]
TenantsAndIds = list[TenantAndId]
NUM_THREADS = 4
STRAY_AGE_S = 24 * 3600.0
"""Pieces of writes that never ended are removed after so long; no upload takes longer."""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_KIND = re.compile(r"[a-z_]{1,32}")
_T = TypeVar("_T")


def new_id(prefix: str, now_s: float | None = None) -> str:
    """An id nobody can guess; in the order of names, later ones come later. Listings go by that order."""
    milliseconds = int((time.time() if now_s is None else now_s) * 1000)
    return f"{prefix}{milliseconds:011x}{secrets.token_hex(12)}"


class RecordStore:
    """Records by kind, tenant and id; and blobs, the contents of files, by the same names."""

    def __init__(self, folder: str | Path) -> None:
        """`folder` is made at the first write."""
        self._folder = Path(folder)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="records")

    async def put(self, kind: str, tenant: str, record_id: str, record: Record) -> None:
        """Writes a record, in place of an older one; on disk when this returns.

        Raises:
            Unavailable: the disk is full, read-only or away.
        """
        path = self._path("records", kind, tenant, record_id)
        assert path is not None, record_id  # ids are our own
        data = orjson.dumps(record)
        await self.run(lambda: write_whole(path, data))

    async def put_fenced(self, kind: str, tenant: str, record_id: str, record: Record, fence: int) -> bool:
        """The same for a writer that holds a lease with a fencing token; False: a later one has written already.

        The token stays in the record, in the field `fence`. Of writers at the same time one waits for the other.

        Raises:
            Unavailable: the disk is full, read-only or away.
        """
        path = self._path("records", kind, tenant, record_id)
        assert path is not None, record_id  # ids are our own
        data = orjson.dumps({**record, FENCE: fence})
        return await self.run(lambda: write_fenced(path, data, fence))

    async def get(self, kind: str, tenant: str, record_id: str) -> Record | None:
        """The record; None where there is none, or where that can be no id.

        Raises:
            Unavailable: the disk cannot be read.
        """
        path = self._path("records", kind, tenant, record_id)
        return None if path is None else await self.run(lambda: read_record(path))

    async def delete(self, kind: str, tenant: str, record_id: str) -> bool:
        """Removes a record; whether there was one.

        Raises:
            Unavailable: the disk refuses.
        """
        path = self._path("records", kind, tenant, record_id)
        return False if path is None else await self.run(lambda: remove(path))

    async def list(
        self, kind: str, tenant: str, *, limit: int, after: str = "", ascending: bool = False
    ) -> list[Record]:
        """At most `limit` records, newest first by `new_id`, those behind the id `after`; broken ones are left out.

        Raises:
            Unavailable: the disk cannot be read.
        """
        folder = self._folder_of("records", kind, tenant)

        def read() -> Records:
            found: Records = []
            for name in sorted(names_in(folder, ".json"), reverse=not ascending):
                if len(found) >= limit:
                    break
                is_behind = not after or (name > after if ascending else name < after)
                record = read_record(folder / f"{name}.json") if is_behind else None
                if record is not None:
                    found.append(record)
            return found

        return await self.run(read)

    async def every(self, kind: str) -> TenantsAndIds:
        """Folder of the tenant and id of all records of a kind, oldest first: for who works on all of them.

        Raises:
            Unavailable: the disk cannot be read.
        """
        parent = self._folder / "records" / kind

        def read() -> TenantsAndIds:
            folders = tenant_folders(parent)
            found = [(TenantFolder(folder), name) for folder in folders for name in names_in(parent / folder, ".json")]
            return sorted(found, key=lambda pair: pair[1])

        return await self.run(read)

    async def create_blob(self, kind: str, tenant: str, record_id: str) -> BlobWriter:
        """A writer of a new content, seen by nobody until it is committed.

        Raises:
            Unavailable: the disk is full, read-only or away.
        """
        path = self._path("blobs", kind, tenant, record_id)
        assert path is not None, record_id  # ids are our own
        return await self.run(lambda: BlobWriter(path, self.run))

    def blob_path(self, kind: str, tenant: str, record_id: str) -> Path | None:
        """Where a content is or would be; None where that can be no id. Whoever reads it does so in `run`."""
        return self._path("blobs", kind, tenant, record_id)

    async def delete_blob(self, kind: str, tenant: str, record_id: str) -> bool:
        """Removes a content; whether there was one. Who reads it just now reads on.

        Raises:
            Unavailable: the disk refuses.
        """
        path = self._path("blobs", kind, tenant, record_id)
        return False if path is None else await self.run(lambda: remove(path))

    async def sweep(self) -> int:
        """Removes what writes have left that never ended; how many pieces.

        Raises:
            Unavailable: the disk refuses.
        """
        return await self.run(lambda: sweep_pieces(self._folder, time.time() - STRAY_AGE_S))

    async def run(self, work: Callable[[], _T]) -> _T:
        """Runs disk work in a thread of the store.

        Raises:
            Unavailable: the disk is full, read-only or away.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except OSError as exc:
            raise disk_error(exc) from exc

    async def close(self) -> None:
        """Waits for what is under way."""
        await asyncio.to_thread(self._threads.shutdown)

    def _folder_of(self, part: str, kind: str, tenant: str) -> Path:
        assert _KIND.fullmatch(kind), kind
        return self._folder / part / kind / tenant_folder(tenant)

    def _path(self, part: str, kind: str, tenant: str, record_id: str) -> Path | None:
        if not _ID.fullmatch(record_id):
            return None
        suffix = ".json" if part == "records" else ""
        return self._folder_of(part, kind, tenant) / f"{record_id}{suffix}"


def tenant_folder(tenant: str) -> str:
    """The name of a tenant's folder: names of tenants may hold anything."""
    if isinstance(tenant, TenantFolder):
        return tenant
    return f"t-{hashlib.blake2b(tenant.encode('utf-8', 'surrogatepass'), digest_size=16).hexdigest()}"
