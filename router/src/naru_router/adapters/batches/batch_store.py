"""Batches on disk: their records, which of them are not over, and which are to be cancelled.

The desk makes batches and asks to cancel them, on any router; the one that holds a batch's lease writes the rest.
"""

from __future__ import annotations

import time

from naru_proto.errors import InvalidRequest, NotFound, Unavailable
from naru_router.adapters.batches.parts import Parts
from naru_router.adapters.storage.disk import FENCE
from naru_router.adapters.storage.file_shelf import FileShelf
from naru_router.adapters.storage.record_store import Record, TenantFolder, TenantsAndIds, new_id
from naru_router.core.batches.record import ACTIVE_KIND, CANCEL_KIND, KIND, LIVE, WORK, batch_object, new_batch
from naru_router.core.fields import shown
from naru_router.core.file_record import PURPOSE
from naru_router.core.listing import Listing


class BatchStore:
    """All batches of a store."""

    def __init__(self, shelf: FileShelf) -> None:
        self.shelf = shelf
        self._store = shelf.store

    async def create(self, tenant: str, asked: Record) -> Record:
        """A new batch's object.

        Raises:
            InvalidRequest: there is no such file, or it was uploaded for something else.
            Unavailable: the disk refuses.
        """
        try:
            file = await self.shelf.get(tenant, asked["input_file_id"])
        except NotFound as exc:
            raise InvalidRequest(exc.message, param="input_file_id") from exc
        if file["purpose"] != PURPOSE:
            message = f"the file has the purpose {file['purpose']!r}; upload one with purpose {PURPOSE}"
            raise InvalidRequest(message, param="input_file_id")
        batch_id = new_id("batch_")
        record = new_batch(batch_id, asked, tenant, int(time.time()))
        await self._store.put(KIND, tenant, batch_id, {**record, FENCE: 0})
        try:
            await self._store.put(ACTIVE_KIND, tenant, batch_id, {"tenant": tenant})
        except Unavailable:
            await self._store.delete(KIND, tenant, batch_id)
            raise
        return batch_object(record, None)

    async def object(self, tenant: str, batch_id: str) -> Record:
        """What a client sees of a batch.

        Raises:
            NotFound: there is none, or none of this tenant's.
        """
        return await self._shown(tenant, await self.record(tenant, batch_id))

    async def list(self, tenant: str, listing: Listing) -> tuple[list[Record], bool]:
        """Objects of batches, and whether there are more."""
        records = await self._store.list(
            KIND, tenant, limit=listing.limit + 1, after=listing.after, ascending=listing.is_ascending
        )
        return [await self._shown(tenant, it) for it in records[: listing.limit]], len(records) > listing.limit

    async def cancel(self, tenant: str, batch_id: str) -> Record:
        """Asks whoever works on a batch to end it; its object.

        Raises:
            NotFound: there is none, or none of this tenant's.
            InvalidRequest: it is over.
        """
        record = await self.record(tenant, batch_id)
        if record["status"] not in LIVE:
            raise InvalidRequest(f"the batch is {record['status']}; only one that is not over can be cancelled")
        if await self.cancelling_s(tenant, batch_id) is None:
            await self._store.put(CANCEL_KIND, tenant, batch_id, {"at": int(time.time())})
        return await self._shown(tenant, record)

    async def record(self, tenant: str, batch_id: str) -> Record:
        """A batch's whole record.

        Raises:
            NotFound: there is none, or none of this tenant's.
        """
        record = await self._store.get(KIND, tenant, batch_id)
        if record is None:
            raise NotFound(f"there is no batch {shown(batch_id)}", param="id")
        return record

    async def cancelling_s(self, tenant: str, batch_id: str) -> int | None:
        """When a client asked to cancel a batch, in Unix seconds; None: nobody has."""
        mark = await self._store.get(CANCEL_KIND, tenant, batch_id)
        return None if mark is None else int(mark["at"])

    async def put(self, tenant: str, record: Record, fence: int) -> bool:
        """Writes the record of a batch whose lease is held; False: somebody with a later lease has written.

        Raises:
            Unavailable: the disk refuses.
        """
        return await self._store.put_fenced(KIND, tenant, record["id"], record, fence)

    async def active(self) -> TenantsAndIds:
        """Tenant's folder and id of all batches that are not over, oldest first."""
        return await self._store.every(ACTIVE_KIND)

    async def revive(self) -> None:
        """Marks as active what is not over and has no mark: its router died while it made the batch.

        Raises:
            Unavailable: the disk refuses.
        """
        marked = {batch_id for _, batch_id in await self.active()}
        for folder, batch_id in await self._store.every(KIND):
            record = None if batch_id in marked else await self._store.get(KIND, folder, batch_id)
            if record is not None and record.get("status") in LIVE:
                await self._store.put(ACTIVE_KIND, folder, batch_id, {"tenant": record[WORK]["tenant"]})

    async def tenant_of(self, folder: TenantFolder, batch_id: str) -> str | None:
        """The tenant of an active batch; None: it is over by now."""
        mark = await self._store.get(ACTIVE_KIND, folder, batch_id)
        return None if mark is None else str(mark.get("tenant", ""))

    def parts(self, tenant: str, batch_id: str) -> Parts:
        """What is done of a batch."""
        return Parts(self._store, tenant, batch_id)

    async def leave(self, tenant: str, batch_id: str) -> None:
        """A batch is over: nobody needs to look at it again."""
        await self.parts(tenant, batch_id).remove()
        await self._store.delete(CANCEL_KIND, tenant, batch_id)
        await self._store.delete(ACTIVE_KIND, tenant, batch_id)

    async def _shown(self, tenant: str, record: Record) -> Record:
        is_live = record["status"] in LIVE
        return batch_object(record, await self.cancelling_s(tenant, record["id"]) if is_live else None)
