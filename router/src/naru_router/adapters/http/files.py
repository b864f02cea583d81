"""/v1/files: upload, list, look at, read and delete files. An upload goes to disk as it comes, whatever its size."""

from __future__ import annotations

import contextlib
import time

from naru_proto.errors import InternalError, InvalidRequest
from naru_router.adapters.http.generation import Edge
from naru_router.adapters.http.messages import HttpRequest, Reply
from naru_router.adapters.http.resource import ResourceEndpoint, send_object
from naru_router.adapters.http.upload_form import FILE_FIELD, UploadForm
from naru_router.adapters.storage.blob import BlobWriter
from naru_router.adapters.storage.file_shelf import FileShelf
from naru_router.adapters.storage.record_store import Record
from naru_router.core.caller import Caller
from naru_router.core.file_record import check_purpose, read_expiry
from naru_router.core.listing import page_of, read_listing, read_query

FORM_BYTES = 256 * 1024
"""Of an upload beside its file, at most."""
WRITE_BYTES = 1024 * 1024
"""Of a file that are written at once."""
FILES_PATH = b"/v1/files"


def is_upload(method: bytes, target: bytes) -> bool:
    """Whether a request is an upload, so that its body is to be handed on as it comes."""
    return method == b"POST" and target.partition(b"?")[0] == FILES_PATH


class FilesEndpoint(ResourceEndpoint[FileShelf]):
    """POST and GET /v1/files."""

    name = "files"
    methods = (b"GET", b"POST")

    def __init__(self, edge: Edge, shelf: FileShelf | None, max_file_bytes: int) -> None:
        super().__init__(edge, shelf)
        self._max_file_bytes = max_file_bytes

    async def answer(self, request: HttpRequest, reply: Reply, caller: Caller, shelf: FileShelf) -> None:
        """Takes an upload, or lists files."""
        if request.method == b"POST":
            send_object(reply, await self._upload(request, caller, shelf))
            return
        query = read_query(request.target)
        listing = read_listing(query, usual=10_000, most=10_000)
        records, has_more = await shelf.list(caller.tenant, listing, query.get("purpose", ""))
        send_object(reply, page_of(records, has_more=has_more))

    async def _upload(self, request: HttpRequest, caller: Caller, shelf: FileShelf) -> Record:
        declared = request.header(b"content-length")
        if declared is not None and declared.isdigit() and int(declared) > self._max_file_bytes + FORM_BYTES:
            raise self._too_large()
        form = UploadForm(request.header(b"content-type"))
        file_id, writer = await shelf.begin(caller.tenant)
        try:
            await self._spool(request, form, writer)
            created_s = int(time.time())
            purpose, expires_s = check_purpose(form.fields.get("purpose")), read_expiry(form.fields, created_s)
            return await shelf.finish(
                caller.tenant, file_id, writer, name=form.filename or "", purpose=purpose, expires_s=expires_s
            )
        finally:
            await writer.drop()

    async def _spool(self, request: HttpRequest, form: UploadForm, writer: BlobWriter) -> None:
        assert request.stream is not None  # see is_upload
        pieces, num_waiting, num_bytes = [], 0, 0
        while data := await request.stream.read():
            piece = form.feed(data)
            num_bytes += len(data)
            num_waiting += len(piece)
            pieces.append(piece)
            if writer.num_bytes + num_waiting > self._max_file_bytes or num_bytes > self._max_file_bytes + FORM_BYTES:
                raise self._too_large()
            if "purpose" in form.fields:
                check_purpose(form.fields["purpose"])
            if num_waiting >= WRITE_BYTES:
                await writer.write(b"".join(pieces))
                pieces, num_waiting = [], 0
        if not form.is_complete:
            raise InvalidRequest("the form ends before its last boundary; send it whole")
        if form.filename is None:
            raise InvalidRequest("the form has no file; send one", param=FILE_FIELD)
        await writer.write(b"".join(pieces))
        if not writer.num_bytes:
            raise InvalidRequest("the file is empty; send one with a line in it", param=FILE_FIELD)

    def _too_large(self) -> InvalidRequest:
        return InvalidRequest(
            f"the file is larger than the limit of {self._max_file_bytes} bytes; send it in parts", param=FILE_FIELD
        )


class FileEndpoint(ResourceEndpoint[FileShelf]):
    """GET and DELETE /v1/files/{id}."""

    name = "file"
    methods = (b"GET", b"DELETE")

    async def answer(self, request: HttpRequest, reply: Reply, caller: Caller, shelf: FileShelf) -> None:
        """Shows a file's object, or deletes the file."""
        file_id = request.params["id"]
        if request.method == b"DELETE":
            await shelf.delete(caller.tenant, file_id)
            send_object(reply, {"id": file_id, "object": "file", "deleted": True})
            return
        send_object(reply, await shelf.get(caller.tenant, file_id))


class FileContentEndpoint(ResourceEndpoint[FileShelf]):
    """GET /v1/files/{id}/content."""

    name = "file_content"

    async def answer(self, request: HttpRequest, reply: Reply, caller: Caller, shelf: FileShelf) -> None:
        """Sends the bytes, no faster than the client takes them."""
        path, num_bytes = await shelf.content(caller.tenant, request.params["id"])
        headers = ((b"content-type", b"application/octet-stream"),)
        num_sent = 0
        async with contextlib.aclosing(shelf.chunks(path)) as chunks:
            async for data in chunks:
                if not reply.has_started:
                    reply.begin(200, headers, num_bytes)
                reply.write(data)
                num_sent += len(data)
                await reply.drained()
        if num_sent != num_bytes:
            raise InternalError(f"the file has {num_sent} bytes on disk and {num_bytes} in its record")
        reply.end()
