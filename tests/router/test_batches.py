"""/v1/batches: from the file to the outputs, and every file and request that is none."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from batch_client import BATCHES, CHAT, begin, ended, line, lines, read, serve
from router_rig import MODEL, Rig
from task_worker import EMBEDDER, pool, vector_of

from naru_proto.tenants import key_digest
from naru_router.adapters.batches.line_call import PRIORITY

# --- the whole way --------------------------------------------------------------------------------------------------


async def test_a_batch_goes_from_the_file_to_the_output(rig: Rig, tmp_path: Path) -> None:
    await serve(rig, tmp_path)
    batch_id = await begin(rig, lines(3), metadata={"for": "me"})
    batch = await ended(rig, batch_id)
    assert (batch["status"], batch["endpoint"], batch["completion_window"]) == ("completed", CHAT, "24h")
    assert batch["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
    assert batch["metadata"] == {"for": "me"}
    assert (batch["errors"], batch["error_file_id"]) == (None, None)
    assert batch["expires_at"] == batch["created_at"] + 86400
    for name in ("in_progress_at", "finalizing_at", "completed_at"):
        assert batch["created_at"] <= batch[name] <= time.time()
    assert not {"work", "fence"} & set(batch), "what routers note for themselves stays with them"
    found = {it["custom_id"]: it for it in await read(rig, batch["output_file_id"])}
    assert set(found) == {"line-0", "line-1", "line-2"}
    one = found["line-1"]
    assert set(one) == {"id", "custom_id", "response", "error"}
    assert (one["id"][:10], one["error"]) == ("batch_req_", None)
    assert set(one["response"]) == {"status_code", "request_id", "body"}
    assert one["response"]["status_code"] == 200
    body = one["response"]["body"]
    assert (body["object"], body["choices"][0]["message"]["content"]) == ("chat.completion", "Hello")
    assert body["usage"]["prompt_tokens"] == 5
    file = (await rig.client.get(f"/v1/files/{batch['output_file_id']}")).json()
    assert (file["purpose"], file["filename"]) == ("batch_output", f"{batch_id}_output.jsonl")
    assert all(request.priority == PRIORITY > 0 for request in rig.workers["w0"].requests)


async def test_the_openai_client_works_with_batches(rig: Rig, tmp_path: Path) -> None:
    await serve(rig, tmp_path)
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{rig.app.http_port}/v1", api_key="none") as client:
        file = await client.files.create(file=("in.jsonl", lines(2).encode()), purpose="batch")
        made = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"a": "b"}
        )
        assert made.status == "validating"
        await ended(rig, made.id)
        batch = await client.batches.retrieve(made.id)
        assert batch.request_counts is not None
        assert (batch.status, batch.request_counts.completed) == ("completed", 2)
        assert batch.output_file_id is not None
        text = (await client.files.content(batch.output_file_id)).text
        assert len(text.splitlines()) == 2
        assert [it.id async for it in client.batches.list(limit=1)] == [made.id]
        with pytest.raises(openai.BadRequestError, match="the batch is completed"):
            await client.batches.cancel(made.id)


async def test_embeddings_and_completions_run_in_batches(rig: Rig, tmp_path: Path) -> None:
    await rig.publish_model()
    await rig.publish_model("embedder")
    await rig.start_worker("w0")
    await rig.start_worker("w1", pool, models=("embedder",), facts=EMBEDDER)
    await rig.start_router(files_dir=str(tmp_path))
    url = "/v1/embeddings"
    body = {"model": "embedder", "input": ["x", "y"]}
    one = json.dumps({"custom_id": "e", "method": "POST", "url": url, "body": body})
    batch = await ended(rig, await begin(rig, one, url))  # without an end of line
    (found,) = await read(rig, batch["output_file_id"])
    assert [it["embedding"] for it in found["response"]["body"]["data"]] == [vector_of("x"), vector_of("y")]
    url = "/v1/completions"
    body = {"model": MODEL, "prompt": "hi"}
    two = json.dumps({"custom_id": "c", "method": "POST", "url": url, "body": body})
    batch = await ended(rig, await begin(rig, f"\n\n{two}\n \n", url))  # with blank lines
    (found,) = await read(rig, batch["output_file_id"])
    assert found["response"]["body"]["choices"][0]["text"] == "Hello"


async def test_requests_that_fail_stand_in_the_error_file(rig: Rig, tmp_path: Path) -> None:
    await serve(rig, tmp_path)
    content = "\n".join([line("good"), line("lost", model="nothing"), line("hot", top_p=9)])
    batch = await ended(rig, await begin(rig, content))
    assert (batch["status"], batch["request_counts"]) == ("completed", {"total": 3, "completed": 1, "failed": 2})
    assert [it["custom_id"] for it in await read(rig, batch["output_file_id"])] == ["good"]
    errors = {it["custom_id"]: it for it in await read(rig, batch["error_file_id"])}
    assert errors["lost"]["response"]["status_code"] == 404
    assert errors["lost"]["response"]["body"]["error"]["code"] == "model_not_found"
    assert errors["lost"]["error"] is None
    assert errors["hot"]["response"]["status_code"] == 400
    assert errors["hot"]["response"]["body"]["error"]["param"] == "top_p"


async def test_a_batch_of_errors_alone_has_no_output_file(rig: Rig, tmp_path: Path) -> None:
    await serve(rig, tmp_path)
    batch = await ended(rig, await begin(rig, line("a", top_p=9)))
    assert (batch["status"], batch["output_file_id"]) == ("completed", None)
    assert len(await read(rig, batch["error_file_id"])) == 1


# --- bad files and bad requests -------------------------------------------------------------------------------------


async def test_a_bad_file_fails_the_batch_with_line_numbers(rig: Rig, tmp_path: Path) -> None:
    await serve(rig, tmp_path, max_body_bytes=5000)
    bad = [
        line("a"),
        "{not json",
        line("a"),
        "",
        line("b", url="/v1/embeddings"),
        line("c", stream=True),
        '{"custom_id": "d", "method": "GET", "url": "/v1/chat/completions", "body": {}}',
        '{"custom_id": "e", "method": "POST", "url": "/v1/chat/completions"}',
        '{"method": "POST"}',
        '{"custom_id": 5}',
        "[1]",
        line("f", filler="x" * 6000),
        line("g", model=5),
    ]
    batch = await ended(rig, await begin(rig, "\n".join(bad)))
    assert (batch["status"], batch["output_file_id"]) == ("failed", None)
    assert batch["failed_at"] is not None
    assert [(it["line"], it["code"], it["param"]) for it in batch["errors"]["data"]] == [
        (2, "invalid_json_line", None),
        (3, "duplicate_custom_id", "custom_id"),
        (5, "invalid_url", "url"),
        (6, "invalid_stream", "body.stream"),
        (7, "invalid_method", "method"),
        (8, "missing_required_parameter", "body"),
        (9, "missing_required_parameter", "custom_id"),
        (10, "invalid", "custom_id"),
        (11, "invalid_json_line", None),
        (12, "line_too_long", None),
        (13, "missing_required_parameter", "body.model"),
    ]
    assert rig.workers["w0"].requests == []


@pytest.mark.parametrize("content", ["\n\n \n", "\n"])
async def test_a_file_without_requests_fails(rig: Rig, tmp_path: Path, content: str) -> None:
    await serve(rig, tmp_path)
    batch = await ended(rig, await begin(rig, content))
    assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", "empty_file")


async def test_a_file_of_bytes_fails_within_bounds(rig: Rig, tmp_path: Path) -> None:
    await serve(rig, tmp_path)
    made = await rig.client.post("/v1/files", files={"file": os.urandom(300_000)}, data={"purpose": "batch"})
    asked = {"input_file_id": made.json()["id"], "endpoint": CHAT, "completion_window": "24h"}
    batch = await ended(rig, (await rig.client.post(BATCHES, json=asked)).json()["id"])
    assert batch["status"] == "failed"
    assert 1 <= len(batch["errors"]["data"]) <= 100


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input_file_id": None}, "input_file_id"),
    ({"input_file_id": 5}, "input_file_id"),
    ({"input_file_id": "file-nothing"}, "input_file_id"),
    ({"input_file_id": "../../etc/passwd"}, "input_file_id"),
    ({"endpoint": "/v1/images"}, "endpoint"),
    ({"endpoint": None}, "endpoint"),
    ({"endpoint": ["/v1/embeddings"]}, "endpoint"),
    ({"completion_window": "1h"}, "completion_window"),
    ({"completion_window": None}, "completion_window"),
    ({"metadata": "x"}, "metadata"),
    ({"metadata": {"a": 5}}, "metadata"),
    ({"metadata": {"a" * 65: "b"}}, "metadata"),
    ({"metadata": {f"k{i}": "v" for i in range(17)}}, "metadata"),
    ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "output_expires_after.anchor"),
    ({"output_expires_after": {"anchor": "created_at"}}, "output_expires_after.seconds"),
    ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after.seconds"),
]


async def test_bad_fields_are_named(rig: Rig, tmp_path: Path) -> None:
    await serve(rig, tmp_path)
    made = await rig.client.post("/v1/files", files={"file": lines(1).encode()}, data={"purpose": "batch"})
    for fields, param in BAD:
        asked = {"input_file_id": made.json()["id"], "endpoint": CHAT, "completion_window": "24h", **fields}
        response = await rig.client.post(BATCHES, json=asked)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), fields
    assert (await rig.client.get(BATCHES)).json()["data"] == []


async def test_an_output_is_no_input(rig: Rig, tmp_path: Path) -> None:
    await serve(rig, tmp_path)
    batch = await ended(rig, await begin(rig, lines(1), output_expires_after={"anchor": "created_at", "seconds": 3600}))
    output = (await rig.client.get(f"/v1/files/{batch['output_file_id']}")).json()
    assert abs(output["expires_at"] - time.time() - 3600) < 60
    asked = {"input_file_id": output["id"], "endpoint": CHAT, "completion_window": "24h"}
    assert "has the purpose 'batch_output'" in (await rig.client.post(BATCHES, json=asked)).text


async def test_batches_of_another_tenant_do_not_exist_and_go_by_its_quota(rig: Rig, tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.yaml"
    rows = [f"- name: {name}\n  keys: [{{sha256: {key_digest(name.encode())}}}]" for name in ("a", "b")]
    tenants.write_text("tenants:\n" + "\n".join(rows))
    await serve(rig, tmp_path / "files", tenants_file=str(tenants))
    rig.client.headers["authorization"] = "Bearer a"
    batch_id = await begin(rig, lines(2))
    assert (await ended(rig, batch_id))["status"] == "completed"
    assert {request.tenant for request in rig.workers["w0"].requests} == {"a"}
    rig.client.headers["authorization"] = "Bearer b"
    assert (await rig.client.get(f"{BATCHES}/{batch_id}")).status_code == 404
    assert (await rig.client.post(f"{BATCHES}/{batch_id}/cancel")).status_code == 404
    assert (await rig.client.get(BATCHES)).json()["data"] == []
    # The header by which a batch's requests say whose they are says nothing to the live endpoints.
    del rig.client.headers["authorization"]
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
    assert (await rig.client.post(CHAT, json=asked, headers={"x-naru-batch-tenant": "a"})).status_code == 401
