"""Models, files and batches. Pure."""

from __future__ import annotations

from naru_router.core.batches.record import ENDPOINTS
from naru_router.core.openapi.words import (
    Schema,
    all_null,
    array,
    free,
    integer,
    null_or,
    number,
    one_of,
    ref,
    text,
    thing,
)


def stored_schemas() -> dict[str, Schema]:
    """Components of lists, and of what is in them."""
    model = thing(
        {
            "id": text(),
            "object": one_of("model"),
            "created": integer(0),
            "owned_by": text(),
            "root": text("Name of the ModelDeployment."),
            "aliases": array(text()),
            "max_model_len": null_or(integer(0)),
            "tasks": null_or(array(text())),
            "embedding_dim": null_or(integer(1)),
            "ready_workers": integer(0),
            "copies": free(),
            "state": text("ready, loading, fetching, draining, host, failed or cold."),
            "eta_s": null_or(number(0)),
            "progress": null_or(number(0, 1)),
            "reason": null_or(text("Why it has failed.")),
        },
        ["id", "object", "created", "owned_by", "state"],
    )
    file = thing(
        {
            "id": text(),
            "object": one_of("file"),
            "bytes": integer(0),
            "created_at": integer(0),
            "expires_at": null_or(integer(0)),
            "filename": text(),
            "purpose": text(),
            "status": text(),
        },
        ["id", "object", "bytes", "created_at", "filename", "purpose"],
    )
    expiry = thing({"anchor": one_of("created_at"), "seconds": integer(3600, 2_592_000)}, ["anchor", "seconds"])
    asked = {
        "input_file_id": text(minLength=1),
        "endpoint": one_of(*ENDPOINTS),
        "completion_window": one_of("24h"),
        "metadata": {"type": "object", "additionalProperties": text(maxLength=512), "maxProperties": 16},
        "output_expires_after": expiry,
    }
    required = ["input_file_id", "endpoint", "completion_window"]
    deleted = thing({"id": text(), "object": text(), "deleted": {"type": "boolean"}}, ["id", "deleted"])
    upload = thing(
        {"purpose": one_of("batch"), "file": text(contentMediaType="application/octet-stream")}, ["purpose", "file"]
    )
    return {
        "Model": model,
        "Models": _list("Model"),
        "File": file,
        "Files": _list("File"),
        "Upload": upload,
        "Deleted": deleted,
        "BatchRequest": thing(all_null(asked, but=required), required),
        "Batch": thing(
            {
                "id": text(),
                "object": one_of("batch"),
                "endpoint": text(),
                "status": text(),
                "input_file_id": text(),
                "output_file_id": null_or(text()),
                "error_file_id": null_or(text()),
                "created_at": integer(0),
                "request_counts": free(),
            },
            ["id", "object", "endpoint", "status", "input_file_id", "created_at"],
        ),
        "Batches": _list("Batch"),
    }


def _list(name: str) -> Schema:
    return thing({"object": one_of("list"), "data": array(ref(name))}, ["object", "data"])
