"""What is known of a batch: its record, and its object in OpenAI's form. Pure.

One writer at a time: the router that made it, then the one that holds its lease. Fields for its writers alone are in
WORK; clients never see them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from naru_proto.errors import InvalidRequest
from naru_router.core.checked_json import check_metadata
from naru_router.core.fields import Fields, refuse

KIND = "batch"
ACTIVE_KIND = "batch_active"
"""One for each batch that is not over: names its tenant."""
CANCEL_KIND = "batch_cancel"
"""One for each batch that is to be cancelled."""
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
WINDOW_S = 24 * 3600
MAX_LINES = 50_000
MAX_ERRORS = 100
"""Of a file that is refused; those of further lines are not told."""
WORK = "work"
HIDDEN = (WORK, "fence")
LIVE = ("validating", "in_progress", "finalizing")
OVER = ("completed", "failed", "expired", "cancelled")

Record = dict[str, Any]


def read_batch(body: Mapping[str, object], endpoints: tuple[str, ...]) -> Record:
    """Reads the body of POST /v1/batches: the fields of a record that the client says.

    Raises:
        InvalidRequest: naming the field.
    """
    fields = Fields(body)
    file_id = fields.text("input_file_id")
    if not file_id:
        raise InvalidRequest("input_file_id is missing; upload a file with purpose batch first", param="input_file_id")
    endpoint = fields.get("endpoint")
    if endpoint not in endpoints:
        refuse("endpoint", endpoint, f"one of {', '.join(endpoints)}")
    window = fields.get("completion_window")
    if window != "24h":
        refuse("completion_window", window, "24h")
    metadata, expiry = fields.get("metadata"), fields.object("output_expires_after")
    seconds = None
    if expiry is not None:
        if expiry.get("anchor") != "created_at":
            refuse(expiry.path("anchor"), expiry.get("anchor"), "created_at")
        seconds = expiry.integer("seconds", 3600, 2_592_000)
        if seconds is None:
            refuse(expiry.path("seconds"), None, "an integer in [3600, 2592000]")
    return {
        "endpoint": endpoint,
        "input_file_id": file_id,
        "completion_window": window,
        "metadata": None if metadata is None else check_metadata("metadata", metadata),
        WORK: {"output_expires_after_s": seconds},
    }


def new_batch(batch_id: str, asked: Record, tenant: str, now_s: int) -> Record:
    """The record of a new batch."""
    return {
        "id": batch_id,
        "object": "batch",
        "endpoint": asked["endpoint"],
        "errors": None,
        "input_file_id": asked["input_file_id"],
        "completion_window": asked["completion_window"],
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now_s,
        "in_progress_at": None,
        "expires_at": now_s + WINDOW_S,
        "finalizing_at": None,
        "completed_at": None,
        "failed_at": None,
        "expired_at": None,
        "cancelling_at": None,
        "cancelled_at": None,
        "request_counts": counts(0, 0, 0),
        "metadata": asked["metadata"],
        WORK: {**asked[WORK], "tenant": tenant},
    }


def batch_object(record: Record, cancelling_s: int | None) -> Record:
    """What a client sees; `cancelling_s`: when it asked to cancel, None: it has not."""
    shown_record = {name: value for name, value in record.items() if name not in HIDDEN}
    if cancelling_s is not None and record["status"] in LIVE:
        shown_record["status"], shown_record["cancelling_at"] = "cancelling", cancelling_s
    return shown_record


def moved(record: Record, status: str, now_s: int, **fields: Any) -> Record:
    """The record with another status, and the time at which it came to that."""
    return {**record, **fields, "status": status, f"{status}_at": now_s}


def counts(total: int, completed: int, failed: int) -> dict[str, int]:
    """How far it is."""
    return {"total": total, "completed": completed, "failed": failed}


def refused(record: Record, faults: list[dict[str, Any]], now_s: int) -> Record:
    """The record of a batch whose file cannot be worked on."""
    return moved(record, "failed", now_s, errors={"object": "list", "data": faults})


def fault(code: str, message: str, line: int | None = None, param: str | None = None) -> dict[str, Any]:
    """One reason why a batch is refused; lines are counted from 1."""
    return {"code": code, "line": line, "message": message, "param": param}
