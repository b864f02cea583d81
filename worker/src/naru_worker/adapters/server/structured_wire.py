"""What a message asks of the text's form, as a checked value. No I/O, no state.

Called where sampling parameters are read from the wire.
"""

from __future__ import annotations

from naru_proto.errors import InvalidRequest
from naru_proto.v1 import inference_pb2
from naru_worker.core.structured import StructuredKind, StructuredOutput

ANY_OBJECT = '{"type":"object"}'
DEFAULT_PARAM = "response_format"

_TEXTS = {
    "json_schema": StructuredKind.JSON_SCHEMA,
    "regex": StructuredKind.REGEX,
    "grammar": StructuredKind.GRAMMAR,
}


def structured_from_wire(message: inference_pb2.StructuredOutput) -> StructuredOutput | None:
    """None: the text is free.

    Raises:
        InvalidRequest: it names no kind, or is empty or too long.
    """
    kind = message.WhichOneof("kind")
    param = message.param or DEFAULT_PARAM
    if kind == "json_object":
        return StructuredOutput(StructuredKind.JSON_SCHEMA, (ANY_OBJECT,), param) if message.json_object else None
    if kind == "choice":
        return StructuredOutput(StructuredKind.CHOICE, tuple(message.choice.texts), param)
    if kind is None:
        raise InvalidRequest(
            "structured names no kind; set json_schema, json_object, regex, choice or grammar", param=param
        )
    return StructuredOutput(_TEXTS[kind], (getattr(message, kind),), param)
