"""Calls of models that work on texts: generation, vectors, scores. From tensors, or from the body of `generate`."""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from naru_proto.errors import InvalidRequest
from naru_proto.v1.inference_pb2 import SamplingParams
from naru_proto.v1.worker_pb2 import Tensor
from naru_router.core.fields import Fields, check_integer, check_text, refuse
from naru_router.core.json_body import parse_object
from naru_router.core.oip.calls import InferCall
from naru_router.core.oip.datatypes import BYTES, pack_bytes, split_bytes, unpack_elements
from naru_router.core.oip.kinds import (
    EMBEDDING,
    MAX_TEXTS,
    SCORE,
    TEXT,
    TEXT_INPUT,
    TEXT_OPTIONS,
    TEXT_OUTPUTS,
    TEXT_PAIR,
)
from naru_router.core.oip.tensors import check_outputs
from naru_router.core.sampling import read_sampling
from naru_router.core.structured import read_structured
from naru_router.core.usage import TokenUsage

_ALIASES = {"stop_words": "stop", "random_seed": "seed", "min_length": "min_tokens"}
"""Other names for sampling parameters, as clients of Triton send them."""
_SAMPLING = frozenset(
    {
        "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
        "frequency_penalty", "seed", "ignore_eos", "stop", "stop_token_ids", "logit_bias",
    }
)  # fmt: skip
_JSON = "sampling_parameters"
_MAX_DIMENSIONS = 1_000_000


@dataclass(frozen=True, slots=True)
class TextCall:
    """Texts to continue."""

    prompts: tuple[str, ...]
    sampling: SamplingParams
    """Never changed after it is built."""
    shape: tuple[int, ...] = (1,)
    """Of the input, and of each output."""
    stream: bool | None = None
    """None: the call does not say."""
    echo: bool = False
    """The prompt begins the output."""
    outputs: tuple[str, ...] = ()
    """Names; none: all."""

    @property
    def head(self) -> str:
        """What the output of a single prompt begins with."""
        return self.prompts[0] if self.echo else ""

    @property
    def without_echo(self) -> TextCall:
        """The same, for who has told the prompt already."""
        return dataclasses.replace(self, echo=False)


@dataclass(frozen=True, slots=True)
class TextAnswer:
    """What came of one prompt."""

    text: str
    finish_reason: str
    usage: TokenUsage


def text_call(call: InferCall) -> TextCall:
    """What an infer request asks of a model that generates text.

    Raises:
        InvalidRequest: naming the input or parameter.
    """
    inputs = _by_name(call, {TEXT_INPUT.name}, {each.name for each in TEXT_OPTIONS} | set(_ALIASES) | _SAMPLING)
    prompts, shape = _texts(inputs.pop(TEXT_INPUT.name))
    check_outputs(call.outputs, [each.name for each in TEXT_OUTPUTS])
    options = {name: _option(name, tensor) for name, tensor in inputs.items()}
    return _text_call(prompts, shape, {**call.parameters, **options}, call.outputs)


def generate_call(body: Mapping[str, object]) -> TextCall:
    """What the body of `generate` asks; options stand in it, or in its `parameters`.

    Raises:
        InvalidRequest: naming the field.
    """
    fields = Fields(body)
    prompt = check_text(TEXT_INPUT.name, fields.get(TEXT_INPUT.name))
    inner = fields.get("parameters")
    if inner is not None and not isinstance(inner, dict):
        refuse("parameters", inner, "an object")
    return _text_call((prompt,), (1,), {**(inner or {}), **body}, ())


def _text_call(
    prompts: tuple[str, ...], shape: tuple[int, ...], options: Mapping[str, object], outputs: tuple[str, ...]
) -> TextCall:
    sampling: dict[str, object] = {}
    told = options.get(_JSON)
    if told is not None:
        _take_sampling(parse_object(check_text(_JSON, told).encode()), sampling)
    _take_sampling(options, sampling)
    fields = Fields(options)
    shows_prompt = fields.boolean("exclude_input_in_output") is False
    params, structured = read_sampling(Fields(sampling)), read_structured(fields)
    if structured is not None:
        params.structured.CopyFrom(structured)
    return TextCall(prompts, params, shape, fields.boolean("stream"), shows_prompt, outputs)


def _take_sampling(options: Mapping[str, object], sampling: dict[str, object]) -> None:
    """Adds those that are sampling parameters; others have no effect, but more than one answer is refused."""
    if options.get("n") not in (None, 1):
        raise InvalidRequest("n is not 1; send the text as often as you want answers", param="n")
    for told_name, value in options.items():
        name = _ALIASES.get(told_name, told_name)
        if name in _SAMPLING and value is not None:
            sampling[name] = value


def _by_name(call: InferCall, needed: set[str], optional: set[str]) -> dict[str, Tensor]:
    inputs: dict[str, Tensor] = {}
    for tensor in call.inputs:
        if tensor.name not in needed | optional or tensor.name in inputs:
            message = f"the input {tensor.name[:100]!r} is unknown or stands twice; the model takes "
            raise InvalidRequest(message + ", ".join(sorted(needed | optional)), param="inputs")
        inputs[tensor.name] = tensor
    missing = sorted(needed - inputs.keys())
    if missing:
        raise InvalidRequest(f"the input {missing[0]!r} is missing; the model needs it", param="inputs")
    return inputs


def _texts(tensor: Tensor) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The texts of an input, and its shape: one dimension, or a second one of size 1."""
    path, shape = f"inputs.{tensor.name}", tuple(tensor.shape)
    if tensor.datatype != BYTES:
        raise InvalidRequest(f"{path} is of {tensor.datatype}; the model takes {BYTES}", param=path)
    if len(shape) not in (1, 2) or not 1 <= shape[0] <= MAX_TEXTS or shape[1:] not in ((), (1,)):
        message = f"{path} has the shape {list(shape)}; it must be [n] or [n, 1] with n in [1, {MAX_TEXTS}]"
        raise InvalidRequest(message, param=path)
    try:
        return tuple(element.decode() for element in split_bytes(path, tensor.data)), shape
    except UnicodeDecodeError as exc:
        raise InvalidRequest(f"{path} is not UTF-8: {exc.reason} at byte {exc.start}", param=path) from exc


def _option(name: str, tensor: Tensor) -> object:
    """The value of an input that holds an option: one for all texts."""
    path = f"inputs.{name}"
    values = unpack_elements(path, tensor.datatype, tensor.data)
    if any(isinstance(value, float) and not math.isfinite(value) for value in values):
        raise InvalidRequest(f"{path} holds a number that is not finite; send finite ones", param=path)
    if _ALIASES.get(name, name) in ("stop", "stop_token_ids"):
        return values
    if not values or any(value != values[0] for value in values):
        raise InvalidRequest(f"{path} has {len(values)} unequal values, or none; send one for all texts", param=path)
    return values[0]


def text_tensors(call: TextCall, answers: Sequence[TextAnswer]) -> list[Tensor]:
    """The outputs, those that were asked for."""
    texts = [(prompt if call.echo else "") + answer.text for prompt, answer in zip(call.prompts, answers, strict=True)]
    reasons = [answer.finish_reason for answer in answers]
    columns: dict[str, bytes] = {
        "text_output": pack_bytes([text.encode() for text in texts]),
        "finish_reason": pack_bytes([reason.encode() for reason in reasons]),
        "prompt_tokens": _int32([answer.usage.prompt_tokens for answer in answers]),
        "completion_tokens": _int32([answer.usage.completion_tokens for answer in answers]),
    }
    return [
        Tensor(name=each.name, datatype=each.datatype, shape=call.shape, data=columns[each.name])
        for each in TEXT_OUTPUTS
        if not call.outputs or each.name in call.outputs
    ]


def _int32(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def embed_texts(call: InferCall) -> tuple[tuple[str, ...], int]:
    """The texts of which vectors are asked, and how many dimensions; 0: all.

    Raises:
        InvalidRequest: naming the input or parameter.
    """
    texts, _ = _texts(_by_name(call, {TEXT.name}, set())[TEXT.name])
    check_outputs(call.outputs, [EMBEDDING])
    dimensions = call.parameters.get("dimensions")
    if dimensions is None:
        return texts, 0
    return texts, check_integer("parameters.dimensions", dimensions, 1, _MAX_DIMENSIONS)


def embedding_tensor(vectors: Sequence[bytes]) -> Tensor:
    """Vectors of float32, all of one length, as the output."""
    width = len(vectors[0]) // 4
    return Tensor(name=EMBEDDING, datatype="FP32", shape=(len(vectors), width), data=b"".join(vectors))


def score_pairs(call: InferCall) -> list[tuple[str, str]]:
    """The pairs of texts of which scores are asked.

    Raises:
        InvalidRequest: naming the input.
    """
    inputs = _by_name(call, {TEXT.name, TEXT_PAIR.name}, set())
    check_outputs(call.outputs, [SCORE.name])
    firsts, _ = _texts(inputs[TEXT.name])
    seconds, _ = _texts(inputs[TEXT_PAIR.name])
    if len(firsts) != len(seconds):
        message = f"{len(firsts)} texts and {len(seconds)} of {TEXT_PAIR.name}; send as many of both"
        raise InvalidRequest(message, param="inputs")
    return list(zip(firsts, seconds, strict=True))


def score_tensor(scores: Sequence[bytes]) -> Tensor:
    """Scores, each one float32, as the output."""
    return Tensor(name=SCORE.name, datatype="FP32", shape=(len(scores),), data=b"".join(scores))
