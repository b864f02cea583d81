# ruff: noqa: E501 - a row is a line of a table
"""Files and batches: what their clients may send. What comes of a batch is tested where batches are."""

from __future__ import annotations

from typing import Any

from compatibility.row import Outcome, Row

FILES, BATCHES = "/v1/files", "/v1/batches"
FILES_API, BATCHES_API = "OpenAI files", "OpenAI batches"
FORM = {"content-type": "multipart/form-data; boundary=b"}
NO_FILE, NO_BATCH = "file-0123456789ab", "batch_0123456789ab"
CHATS = "/v1/chat/completions"


def form(*, purpose: str = "batch", content: str = "{}", **fields: str) -> bytes:
    """An upload's body; two underscores in a name stand for brackets."""
    named = {"purpose": purpose, **{name.replace("__", "[") + "]": value for name, value in fields.items()}}
    parts = [f'--b\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{it}\r\n' for name, it in named.items()]
    parts.append(f'--b\r\ncontent-disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n{content}\r\n')
    return ("".join(parts) + "--b--\r\n").encode()


def batch(**fields: Any) -> dict[str, Any]:
    return {"input_file_id": NO_FILE, "endpoint": CHATS, "completion_window": "24h", **fields}


def uploaded(outcome: Outcome) -> None:
    made = outcome.json
    assert made["id"].startswith("file-")
    told = made["object"], made["bytes"], made["filename"], made["purpose"], made["status"]
    assert told == ("file", 2, "in.jsonl", "batch", "processed")


def expires(outcome: Outcome) -> None:
    assert outcome.json["expires_at"] == outcome.json["created_at"] + 3600


def listed(outcome: Outcome) -> None:
    assert outcome.json["object"] == "list"
    assert isinstance(outcome.json["has_more"], bool)


ROWS = [
    Row(FILES_API, "`file`, `purpose: batch`", "yes", "goes to disk as it comes, up to `max_file_bytes`", FILES, form(), uploaded, headers=FORM),
    Row(FILES_API, "`expires_after`", "yes", "the file is gone then", FILES, form(expires_after__anchor="created_at", expires_after__seconds="3600"), expires, headers=FORM),
    Row(FILES_API, "`expires_after` out of range", "refused", "3600 to 2592000 s", FILES, form(expires_after__anchor="created_at", expires_after__seconds="5"), param="expires_after.seconds", headers=FORM),
    Row(FILES_API, "other purposes", "refused", "only batch", FILES, form(purpose="assistants"), param="purpose", headers=FORM),
    Row(FILES_API, "empty files", "refused", "as at OpenAI", FILES, form(content=""), param="file", headers=FORM),
    Row(FILES_API, "a body that is no form", "refused", "send multipart/form-data", FILES, {"purpose": "batch"}, says="multipart/form-data"),
    Row(FILES_API, "list: `limit`, `after`, `order`, `purpose`", "yes", "newest first", f"{FILES}?limit=2&order=asc&purpose=batch", check=listed),
    Row(FILES_API, "list: `limit` out of range", "refused", "1 to 10000", f"{FILES}?limit=0", param="limit"),
    Row(FILES_API, "retrieve, unknown id", "refused", "404; also for files of other tenants", f"{FILES}/{NO_FILE}", code=404, param="id"),
    Row(FILES_API, "content, unknown id", "refused", "404", f"{FILES}/{NO_FILE}/content", code=404, param="id"),
    Row(FILES_API, "delete, unknown id", "refused", "404", f"{FILES}/{NO_FILE}", code=404, param="id", method="DELETE"),
    Row(FILES_API, "`/v1/uploads` (uploads in parts)", "refused", "404", "/v1/uploads", {}, code=404),
    Row(BATCHES_API, "`input_file_id`", "refused", "an unknown file; also of other tenants", BATCHES, batch(), param="input_file_id"),
    Row(BATCHES_API, "`endpoint` of another kind", "refused", "chat and text completions, embeddings, responses", BATCHES, batch(endpoint="/v1/images/generations"), param="endpoint"),
    Row(BATCHES_API, "`completion_window` other than 24h", "refused", "as at OpenAI", BATCHES, batch(completion_window="1h"), param="completion_window"),
    Row(BATCHES_API, "`metadata` out of range", "refused", "16 pairs of strings", BATCHES, batch(metadata={"a": 5}), param="metadata"),
    Row(BATCHES_API, "`output_expires_after` out of range", "refused", "3600 to 2592000 s", BATCHES, batch(output_expires_after={"anchor": "created_at", "seconds": 5}), param="output_expires_after.seconds"),
    Row(BATCHES_API, "list: `limit`, `after`", "yes", "newest first", f"{BATCHES}?limit=2", check=listed),
    Row(BATCHES_API, "retrieve, unknown id", "refused", "404; also for batches of other tenants", f"{BATCHES}/{NO_BATCH}", code=404, param="id"),
    Row(BATCHES_API, "cancel, unknown id", "refused", "404", f"{BATCHES}/{NO_BATCH}/cancel", {}, code=404, param="id"),
]  # fmt: skip
