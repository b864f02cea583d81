"""An uploaded file, or one that a batch has made: its record and its object in OpenAI's form. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from naru_proto.errors import InvalidRequest
from naru_router.core.fields import shown

KIND = "file"
PURPOSE = "batch"
"""The only one that may be uploaded."""
OUTPUT_PURPOSE = "batch_output"
MAX_NAME_CHARS = 255
EXPIRY_S = (3600, 2_592_000)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_NUMBER = re.compile(r"[0-9]{1,9}")


def new_record(
    file_id: str, num_bytes: int, created_s: int, name: str, purpose: str, expires_s: int | None
) -> dict[str, Any]:
    """The record of a file, which is its object, too."""
    return {
        "id": file_id,
        "object": "file",
        "bytes": num_bytes,
        "created_at": created_s,
        "expires_at": expires_s,
        "filename": clean_name(name),
        "purpose": purpose,
        "status": "processed",
        "status_details": None,
    }


def is_alive(record: Mapping[str, Any], now_s: float) -> bool:
    """Whether its time is not over."""
    expires_s = record.get("expires_at")
    return not isinstance(expires_s, int) or now_s < expires_s


def clean_name(name: str) -> str:
    """A file's name as it is shown; it names nothing on disk."""
    return _CONTROL.sub("", name)[:MAX_NAME_CHARS] or "file"


def check_purpose(purpose: str | None) -> str:
    """The purpose of an upload.

    Raises:
        InvalidRequest: another one than batch.
    """
    if purpose != PURPOSE:
        raise InvalidRequest(f"purpose is {shown(purpose)}; only batch is supported", param="purpose")
    return purpose


def read_expiry(fields: Mapping[str, str], created_s: int) -> int | None:
    """When a file that is uploaded with these form fields expires, in Unix seconds; None: never.

    Raises:
        InvalidRequest: naming the field.
    """
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        wanted = "it must be created_at"
        raise InvalidRequest(f"expires_after.anchor is {shown(anchor)}; {wanted}", param="expires_after.anchor")
    low, high = EXPIRY_S
    if seconds is None or not _NUMBER.fullmatch(seconds) or not low <= int(seconds) <= high:
        wanted = f"it must be an integer in [{low}, {high}]"
        raise InvalidRequest(f"expires_after.seconds is {shown(seconds)}; {wanted}", param="expires_after.seconds")
    return created_s + int(seconds)
