"""The whole description. Pure: the version of it is the API's, not the program's."""

from __future__ import annotations

from naru_router.core.openapi.chat import chat_schemas, completion_schemas
from naru_router.core.openapi.dialogues import error_schemas, message_schemas, response_schemas
from naru_router.core.openapi.oip import oip_schemas
from naru_router.core.openapi.paths import operations
from naru_router.core.openapi.pooling import pooling_schemas
from naru_router.core.openapi.stored import stored_schemas
from naru_router.core.openapi.words import Schema

_ABOUT = """\
OpenAI's chat completions, completions, responses, embeddings, files and batches, Anthropic's messages, the Open
Inference Protocol with Triton's extensions, and what Naru tells of itself. Fields that are not described are ignored;
null is as good as absent. A key, where tenants are known, goes into `Authorization: Bearer`, `x-api-key` or `api-key`.
"""


def document() -> dict[str, object]:
    """OpenAPI 3.1."""
    paths: dict[str, dict[str, object]] = {}
    for operation in operations():
        paths.setdefault(operation.path, {})[operation.method.lower()] = operation.to_json()
    return {
        "openapi": "3.1.0",
        "info": {"title": "Naru", "version": "1", "description": _ABOUT},
        "paths": paths,
        "components": {
            "schemas": schemas(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def schemas() -> dict[str, Schema]:
    """All components by name."""
    return {
        **error_schemas(),
        **chat_schemas(),
        **completion_schemas(),
        **response_schemas(),
        **message_schemas(),
        **pooling_schemas(),
        **stored_schemas(),
        **oip_schemas(),
    }
