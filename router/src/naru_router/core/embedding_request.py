"""The body of POST /v1/embeddings, checked, and how a large one is cut. Built by the HTTP edge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from naru_proto.errors import InvalidRequest
from naru_router.core.chat_request import read_model
from naru_router.core.completion_request import Prompt
from naru_router.core.fields import Fields, check_integer, check_text, refuse
from naru_router.core.sampling import INT32_MAX

MAX_INPUTS = 2048
"""Of one call, as at OpenAI."""
MAX_DIMENSIONS = 65_536
"""No model has more; what a model really has is checked when that is known."""
MAX_JOB_INPUTS = 128
MAX_JOB_BYTES = 256 * 1024
"""Of the texts of one job: copies of a model share a large call, and each gets enough to fill its batches."""
TOKEN_BYTES = 4
_WANTED = "a string, an array of strings, an array of token ids, or an array of such arrays; none may be empty"


@dataclass(frozen=True, slots=True)
class PoolingOptions:
    """What is asked of every input."""

    truncate_tokens: int = 0
    """Longer inputs are cut to so many tokens; -1: to the model's limit; 0: they are refused."""
    normalize: bool | None = None
    """Vectors have length 1; None: as the model's files say."""
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class EmbeddingCall:
    """What a client asked for."""

    model: str
    inputs: tuple[Prompt, ...]
    dimensions: int = 0
    """Of each vector; 0: all."""
    is_base64: bool = False
    options: PoolingOptions = PoolingOptions()


def parse_embedding(body: dict[str, object]) -> EmbeddingCall:
    """Reads an embedding body. Unknown fields are ignored.

    Raises:
        InvalidRequest: naming the field.
    """
    fields = Fields(body)
    model = read_model(fields)
    inputs = _read_inputs(fields.get("input"))
    encoding = fields.get("encoding_format")
    if encoding not in (None, "float", "base64"):
        refuse("encoding_format", encoding, "float or base64")
    fields.text("user")
    dimensions = fields.integer("dimensions", 1, MAX_DIMENSIONS) or 0
    return EmbeddingCall(model, inputs, dimensions, encoding == "base64", read_options(fields))


def read_options(fields: Fields, truncate_tokens: int = 0) -> PoolingOptions:
    """The fields that all pooling calls share; `truncate_tokens` where none is named.

    Raises:
        InvalidRequest: naming the field.
    """
    name = "truncate_prompt_tokens"
    value = fields.integer(name, -1, INT32_MAX)
    if value == 0:
        refuse(name, value, "at least 1, or -1 for the model's own limit")
    specials = fields.boolean("add_special_tokens")
    return PoolingOptions(
        truncate_tokens if value is None else value,
        fields.boolean("normalize"),
        True if specials is None else specials,
    )


def cut(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Half-open ranges of inputs with these sizes in bytes, each one job's. One that is too large goes alone."""
    ranges, first, num_bytes = [], 0, 0
    for i, size in enumerate(sizes):
        if i > first and (i - first >= MAX_JOB_INPUTS or num_bytes + size > MAX_JOB_BYTES):
            ranges.append((first, i))
            first, num_bytes = i, 0
        num_bytes += size
    if first < len(sizes):
        ranges.append((first, len(sizes)))
    return ranges


def size_of(prompt: Prompt) -> int:
    """Bytes of a text, about, or of token ids."""
    return len(prompt) if isinstance(prompt, str) else len(prompt) * TOKEN_BYTES


def _read_inputs(value: object) -> tuple[Prompt, ...]:
    if isinstance(value, str):
        return (_text("input", value),)
    if not isinstance(value, list) or not value:
        refuse("input", value, _WANTED)
    if isinstance(value[0], int) and not isinstance(value[0], bool):
        return (_token_ids("input", value),)
    if len(value) > MAX_INPUTS:
        raise InvalidRequest(f"input has {len(value)} inputs; at most {MAX_INPUTS} are allowed", param="input")
    inputs: list[Prompt] = []
    for i, item in enumerate(value):
        if isinstance(item, str) and isinstance(value[0], str):
            inputs.append(_text(f"input[{i}]", item))
        elif isinstance(item, list) and isinstance(value[0], list):
            inputs.append(_token_ids(f"input[{i}]", item))
        else:
            refuse(f"input[{i}]", item, f"like the others: input must be {_WANTED}")
    return tuple(inputs)


def _text(path: str, value: str) -> str:
    if not value:
        raise InvalidRequest(f"{path} is an empty string; send text", param=path)
    return check_text(path, value)


def _token_ids(path: str, values: list[object]) -> tuple[int, ...]:
    if not values:
        raise InvalidRequest(f"{path} is an empty array; send token ids", param=path)
    return tuple(check_integer(f"{path}[{i}]", value, 0, INT32_MAX) for i, value in enumerate(values))
