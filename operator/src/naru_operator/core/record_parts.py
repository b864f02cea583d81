"""Parts of a model's record that are kept as dataclasses of their own, with fields of the same names.

Used by both plans for `core.scaling` and `core.traffic`.
"""

from __future__ import annotations

import dataclasses

from naru_operator.core.scaling import Scaling
from naru_operator.core.traffic import Traffic
from naru_proto.registry import ModelRecord


def with_parts(record: ModelRecord, *parts: Scaling | Traffic) -> ModelRecord:
    """The record, saying what the parts say."""
    fields = {field.name: getattr(part, field.name) for part in parts for field in dataclasses.fields(part)}
    return dataclasses.replace(record, **fields)
