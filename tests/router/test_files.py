"""/v1/files: uploads of any size to disk, lists, contents, whose files they are, and everything that is no upload."""

from __future__ import annotations

import asyncio
import errno
import os
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_rig import Rig

from naru_proto.errors import InvalidRequest, Unavailable
from naru_proto.tenants import key_digest
from naru_router.adapters.http.upload_form import UploadForm
from naru_router.adapters.storage.disk import FOLDER
from naru_router.adapters.storage.record_store import RecordStore, new_id, tenant_folder

FILES = "/v1/files"
MB = 1024 * 1024
BATCH = {"purpose": "batch"}
LINE = b'{"custom_id": "a"}\n'


async def serve(rig: Rig, folder: Path, **settings: Any) -> None:
    await rig.start_router(files_dir=str(folder), **settings)


async def upload(rig: Rig, data: bytes = LINE, name: str = "a.jsonl", **form: str) -> dict[str, Any]:
    response = await rig.client.post(FILES, files={"file": (name, data)}, data={**BATCH, **form})
    assert response.status_code == 200, response.text
    made: dict[str, Any] = response.json()
    return made


def left_in(folder: Path) -> list[str]:
    """Names of the files on disk."""
    return [path.name for path in folder.rglob("*") if path.is_file()]


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


async def test_a_file_is_uploaded_shown_listed_read_and_deleted(rig: Rig, tmp_path: Path) -> None:
    await serve(rig, tmp_path)
    data = os.urandom(3 * MB) + b"\r\n--looks-like-an-end--\r\n"
    made = await upload(rig, data, "ünï.jsonl")
    file_id = made["id"]
    assert file_id.startswith("file-")
    assert (made["object"], made["bytes"], made["filename"]) == ("file", len(data), "ünï.jsonl")
    assert (made["purpose"], made["status"], made["expires_at"]) == ("batch", "processed", None)
    assert (await rig.client.get(f"{FILES}/{file_id}")).json() == made
    listed = (await rig.client.get(FILES)).json()
    assert listed == {
        "object": "list", "data": [made], "first_id": file_id, "last_id": file_id, "has_more": False,
    }  # fmt: skip
    content = await rig.client.get(f"{FILES}/{file_id}/content")
    assert content.content == data
    assert content.headers["content-length"] == str(len(data))
    gone = await rig.client.delete(f"{FILES}/{file_id}")
    assert gone.json() == {"id": file_id, "object": "file", "deleted": True}
    for method, path in (("GET", file_id), ("DELETE", file_id), ("GET", f"{file_id}/content")):
        assert error_of(await rig.client.request(method, f"{FILES}/{path}"), 404)["code"] == "not_found"
    assert left_in(tmp_path) == [], "nothing is left on disk"


async def test_the_openai_client_works_with_files(rig: Rig, tmp_path: Path) -> None:
    await serve(rig, tmp_path)
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{rig.app.http_port}/v1", api_key="none") as client:
        made = await client.files.create(
            file=("in.jsonl", LINE), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
        assert made.expires_at == made.created_at + 3600
        assert (await client.files.retrieve(made.id)).bytes == len(LINE)
        assert [it.id async for it in client.files.list()] == [made.id]
        assert (await client.files.content(made.id)).content == LINE
        assert (await client.files.delete(made.id)).deleted
        with pytest.raises(openai.NotFoundError, match="there is no file"):
            await client.files.retrieve(made.id)


async def test_lists_go_by_pages_newest_first(rig: Rig, tmp_path: Path) -> None:
    await serve(rig, tmp_path)
    ids = [new_id("file-", now_s=1000.0 + i) for i in range(5)]
    store = RecordStore(tmp_path)
    for i, file_id in enumerate(ids):
        await store.put("file", "", file_id, {"id": file_id, "purpose": "batch" if i % 2 else "batch_output"})
    await store.close()

    async def page(**params: Any) -> tuple[list[int], bool]:
        reply = (await rig.client.get(FILES, params=params)).json()
        return [ids.index(it["id"]) for it in reply["data"]], reply["has_more"]

    assert await page(limit=2) == ([4, 3], True)
    assert await page(limit=2, after=ids[3]) == ([2, 1], True)
    assert await page(limit=2, after=ids[1]) == ([0], False)
    assert await page(order="asc", limit=3) == ([0, 1, 2], True)
    assert await page(order="asc", after=ids[2]) == ([3, 4], False)
    assert await page(purpose="batch") == ([3, 1], False)
    assert await page(purpose="batch_output", limit=1) == ([4], True)
    assert await page(purpose="batch_output", limit=2, after=ids[4]) == ([2, 0], False)
    for params, param in (({"limit": "0"}, "limit"), ({"limit": "x"}, "limit"), ({"order": "up"}, "order")):
        assert error_of(await rig.client.get(FILES, params=params))["param"] == param


async def test_an_expired_file_is_gone(rig: Rig, tmp_path: Path) -> None:
    await serve(rig, tmp_path)
    made = await upload(rig)
    store = RecordStore(tmp_path)
    await store.put("file", "", made["id"], {**made, "expires_at": 5})
    await store.close()
    error_of(await rig.client.get(f"{FILES}/{made['id']}"), 404)
    assert (await rig.client.get(FILES)).json()["data"] == []


async def test_an_upload_far_above_the_body_limit_takes_no_memory(rig: Rig, tmp_path: Path) -> None:
    await serve(rig, tmp_path, max_body_bytes=1000)
    size, boundary = 64 * MB, "b0undary"

    async def body() -> AsyncIterator[bytes]:
        yield f'--{boundary}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'.encode()
        yield f'--{boundary}\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\n'.encode()
        for _ in range(size // MB):
            yield b"x" * MB
        yield f"\r\n--{boundary}--\r\n".encode()

    headers = {"content-type": f"multipart/form-data; boundary={boundary}"}
    tracemalloc.start()
    response = await rig.client.post(FILES, content=body(), headers=headers)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert response.json()["bytes"] == size
    assert most < 16 * MB, "client and router together, in one process"


async def test_a_file_above_the_limit_is_refused_before_and_while_it_comes(rig: Rig, tmp_path: Path) -> None:
    await serve(rig, tmp_path, max_file_bytes=MB)
    assert (await upload(rig, b"x" * MB))["bytes"] == MB
    error = error_of(await rig.client.post(FILES, files={"file": b"x" * (MB + 1)}, data=BATCH))
    assert (error["param"], "larger than the limit of 1048576 bytes" in error["message"]) == ("file", True)
    error_of(await rig.client.post(FILES, files={"file": b"x" * (2 * MB)}, data=BATCH))
    assert not any(name.endswith(".part") for name in left_in(tmp_path))
    assert len((await rig.client.get(FILES)).json()["data"]) == 1


def part(name: str, value: str, extra: str = "") -> str:
    return f'--b\r\ncontent-disposition: form-data; name="{name}"{extra}\r\n\r\n{value}\r\n'


FILE_PART = part("file", "line", '; filename="x"')


BAD_FORMS = [
    (part("purpose", "batch") + "--b--", "no file"),
    (part("purpose", "batch") + FILE_PART, "ends before its last boundary"),
    (FILE_PART + "--b--", "purpose is null"),
    (part("purpose", "fine-tune") + FILE_PART + "--b--", "purpose is 'fine-tune'"),
    (part("purpose", "batch") + FILE_PART + FILE_PART + "--b--", "two files"),
    (part("purpose", "batch") + part("file", "", '; filename="x"') + "--b--", "the file is empty"),
    (part("purpose", "x" * 5000) + FILE_PART + "--b--", "longer than 4096"),
    ("".join(part(f"f{i}", "x") for i in range(40)) + "--b--", "more than 32 fields"),
    ("--b\r\nx: y\r\n\r\nz\r\n--b--", "has no name"),
    ("not a form at all", "no multipart form"),
    ("--b\r\n" + "x" * 9000 + ": y\r\n\r\nz\r\n--b--", "no multipart form"),
    ("", "ends before its last boundary"),
    (part("purpose", "batch") + part("expires_after[anchor]", "now") + FILE_PART + "--b--", "expires_after.anchor"),
    (
        part("purpose", "batch")
        + part("expires_after[anchor]", "created_at")
        + part("expires_after[seconds]", "5")
        + FILE_PART
        + "--b--",
        "expires_after.seconds",
    ),
]


async def test_what_is_no_upload_is_refused(rig: Rig, tmp_path: Path) -> None:
    await serve(rig, tmp_path)
    headers = {"content-type": "multipart/form-data; boundary=b"}
    for body, says in BAD_FORMS:
        error = error_of(await rig.client.post(FILES, content=body.encode(), headers=headers))
        assert says in error["message"]
        assert left_in(tmp_path) == []


@pytest.mark.parametrize(
    "content_type", ["application/json", "multipart/form-data", f"multipart/form-data; boundary={'b' * 300}"]
)
async def test_another_content_type_is_refused(rig: Rig, tmp_path: Path, content_type: str) -> None:
    await serve(rig, tmp_path)
    error_of(await rig.client.post(FILES, content=b"{}", headers={"content-type": content_type}))


async def test_an_id_is_never_a_path(rig: Rig, tmp_path: Path) -> None:
    await serve(rig, tmp_path / "files")
    (tmp_path / "passwd.json").write_text("{}")
    for file_id in ("..", "%2e%2e", "..%2f..%2fpasswd", "file-x%00", ".lock", "a" * 200, "%ff", "a%2fb"):
        for path in (f"{FILES}/{file_id}", f"{FILES}/{file_id}/content", f"/v1/batches/{file_id}"):
            head = b"GET %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" % path.encode()
            assert (await raw(rig, head)).startswith(b"HTTP/1.1 404 "), path


async def raw(rig: Rig, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.app.http_port)
    writer.write(data)
    async with asyncio.timeout(20):
        reply = await reader.read()
    writer.close()
    return reply


async def test_files_of_another_tenant_do_not_exist(rig: Rig, tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.yaml"
    rows = [f"- name: {name}\n  keys: [{{sha256: {key_digest(name.encode())}}}]" for name in ("a", "b")]
    tenants.write_text("tenants:\n" + "\n".join(rows))
    await serve(rig, tmp_path / "files", tenants_file=str(tenants))
    mine, theirs = ({"authorization": f"Bearer {name}"} for name in ("a", "b"))
    made = await rig.client.post(FILES, files={"file": LINE}, data=BATCH, headers=mine)
    file_id = made.json()["id"]
    assert (await rig.client.get(f"{FILES}/{file_id}", headers=mine)).status_code == 200
    assert (await rig.client.get(FILES, headers=theirs)).json()["data"] == []
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/content")):
        error_of(await rig.client.request(method, f"{FILES}/{file_id}{path}", headers=theirs), 404)
    assert (await rig.client.post(FILES, files={"file": LINE}, data=BATCH)).status_code == 401
    assert (await rig.client.get(FILES)).status_code == 401
    assert (await rig.client.get(f"{FILES}/{file_id}/content", headers=mine)).content == LINE


async def test_without_a_folder_the_reply_says_how_to_turn_files_on(rig: Rig) -> None:
    await rig.start_router()
    for method, path in (("GET", FILES), ("POST", FILES), ("GET", f"{FILES}/x"), ("POST", "/v1/batches")):
        error = error_of(await rig.client.request(method, path, json={} if method == "POST" else None), 404)
        assert "files_dir" in error["message"]


async def test_methods_that_a_path_does_not_take_are_named(rig: Rig, tmp_path: Path) -> None:
    await serve(rig, tmp_path)
    for method, path, allowed in (
        ("DELETE", FILES, "GET, POST"),
        ("POST", f"{FILES}/x", "GET, DELETE"),
        ("PUT", f"{FILES}/x/content", "GET"),
        ("DELETE", "/v1/batches/x", "GET"),
        ("GET", "/v1/batches/x/cancel", "POST"),
    ):
        response = await rig.client.request(method, path)
        assert (response.status_code, response.headers["allow"]) == (405, allowed)


@pytest.mark.parametrize(
    ("number", "says"), [(errno.ENOSPC, "is full"), (errno.EROFS, "cannot be used: Read-only file system")]
)
async def test_a_disk_that_refuses_is_told_and_leaves_nothing(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, says: str
) -> None:
    await serve(rig, tmp_path)

    def refuse(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        response = await rig.client.post(FILES, files={"file": LINE}, data=BATCH)
    error = error_of(response, 503)
    assert says in error["message"]
    assert str(tmp_path) not in error["message"]
    assert left_in(tmp_path) == []
    await upload(rig)


# --- the store itself -----------------------------------------------------------------------------------------------


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[RecordStore]:
    made = RecordStore(tmp_path / "store")
    yield made
    await made.close()


async def test_a_record_is_what_was_put_last(store: RecordStore) -> None:
    assert await store.get("thing", "t", "a") is None
    await store.put("thing", "t", "a", {"x": 1})
    await store.put("thing", "t", "a", {"x": 2, "text": "ü"})
    assert await store.get("thing", "t", "a") == {"x": 2, "text": "ü"}
    assert await store.get("thing", "other", "a") is None
    assert await store.delete("thing", "t", "a")
    assert not await store.delete("thing", "t", "a")


async def test_a_write_that_fails_leaves_the_old_record(store: RecordStore, monkeypatch: pytest.MonkeyPatch) -> None:
    await store.put("thing", "", "a", {"x": 1})
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _full)
        with pytest.raises(Unavailable, match="disk for files is full"):
            await store.put("thing", "", "a", {"x": 2})
    assert await store.get("thing", "", "a") == {"x": 1}
    assert await store.sweep() == 0


def _full(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, "no space")


async def test_a_later_fence_shuts_out_an_earlier_one(store: RecordStore) -> None:
    assert await store.put_fenced("thing", "", "a", {"x": 1}, 5)
    assert await store.put_fenced("thing", "", "a", {"x": 2}, 5)
    assert await store.put_fenced("thing", "", "a", {"x": 3}, 9)
    assert not await store.put_fenced("thing", "", "a", {"x": 4}, 5)
    record = await store.get("thing", "", "a")
    assert record is not None
    assert record["x"] == 3


async def test_broken_records_are_left_out(store: RecordStore, tmp_path: Path) -> None:
    await store.put("thing", "", "a", {"x": 1})
    folder = tmp_path / "store" / "records" / "thing" / tenant_folder("")
    (folder / "b.json").write_bytes(b'{"x": ')
    (folder / "c.json").write_bytes(b"[1]")
    assert await store.list("thing", "", limit=10) == [{"x": 1}]
    assert await store.get("thing", "", "b") is None


async def test_what_was_never_finished_is_swept_when_it_is_old(store: RecordStore, tmp_path: Path) -> None:
    writer = await store.create_blob("file", "", "a")
    await writer.write(b"half")
    assert await store.sweep() == 0
    (piece,) = (tmp_path / "store").rglob("*.part")
    os.utime(piece, (1000, 1000))
    assert await store.sweep() == 1
    await writer.drop()


@given(st.text(max_size=20), st.text(max_size=20))
def test_tenants_have_folders_of_their_own_whatever_their_names(first: str, second: str) -> None:
    assert (tenant_folder(first) == tenant_folder(second)) == (first == second)
    assert FOLDER.fullmatch(tenant_folder(first))
    assert tenant_folder(tenant_folder(first)) != tenant_folder(first), "nobody is called into another's folder"


@given(st.lists(st.floats(0, 4e9), max_size=5))
def test_ids_sort_by_time(times: list[float]) -> None:
    ids = [new_id("x-", now_s=time_s) for time_s in sorted(times)]
    assert [it[:13] for it in ids] == sorted(it[:13] for it in ids)


@given(st.binary(max_size=300), st.integers(1, 50))
def test_a_file_is_what_was_in_the_form_however_it_is_cut(content: bytes, size: int) -> None:
    head = b'--bnd\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
    body = head + content + b'\r\n--bnd\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--bnd--\r\n'
    form = UploadForm(b"multipart/form-data; boundary=bnd")
    found = b"".join(form.feed(body[i : i + size]) for i in range(0, len(body), size))
    if b"\r\n--bnd" not in content:
        assert (found, form.fields, form.filename, form.is_complete) == (content, BATCH, "f", True)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_form_are_refused_or_read(body: bytes) -> None:
    form = UploadForm(b"multipart/form-data; boundary=bnd")
    try:
        form.feed(body)
    except InvalidRequest as exc:
        assert exc.message
    assert not form.is_complete or b"--bnd" in body
