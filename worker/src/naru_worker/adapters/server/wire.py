"""Between protobuf messages and the engine's values, in both directions. No I/O, no state.

Called by the servicer and the streams.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from naru_proto.errors import InternalError, InvalidRequest, NaruError
from naru_proto.route_keys import unpack_keys
from naru_proto.v1 import inference_pb2, worker_pb2
from naru_worker.adapters.engine.deltas import SequenceDelta
from naru_worker.adapters.engine.task_output import TaskOutput
from naru_worker.adapters.server.stream import MAX_ID_CHARS, LiveRequest
from naru_worker.adapters.server.structured_wire import structured_from_wire
from naru_worker.adapters.server.task_check import check_task
from naru_worker.adapters.server.tensors import fill_tensor
from naru_worker.core.request import FinishReason, PriorOutput
from naru_worker.core.sampling import SamplingParams
from naru_worker.core.step import PositionLogprobs, TokenLogprob

TokenBytes = Callable[[int], bytes]
"""Exact bytes of a token id, as in the output."""

_FINISH = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: inference_pb2.FINISH_REASON_CANCELLED,
    FinishReason.ERROR: inference_pb2.FINISH_REASON_ERROR,
}
_SCALARS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "n",
    "logprobs",
    "prompt_logprobs",
    "beam_width",
    "length_penalty",
)
LOGPROB_BYTES = 96
"""Of one log probability on the wire: id, text and bytes of a token, rank, value, tags."""
DELTA_BYTES = 512
"""Of a delta without log probabilities."""


def sampling_from_wire(message: inference_pb2.SamplingParams) -> SamplingParams:
    """Checked sampling parameters; what is absent takes its default.

    Raises:
        InvalidRequest: a value is out of range.
    """
    given: dict[str, Any] = {name: getattr(message, name) for name in _SCALARS if message.HasField(name)}
    if message.logit_bias:
        given["logit_bias"] = tuple(sorted(message.logit_bias.items()))
    if message.stop:
        given["stop"] = tuple(message.stop)
    if message.stop_token_ids:
        given["stop_token_ids"] = tuple(message.stop_token_ids)
    if message.HasField("structured"):
        given["structured"] = structured_from_wire(message.structured)
    return SamplingParams(**given)


def check_request(message: worker_pb2.GenerateRequest) -> None:
    """What can be told from the message alone.

    Raises:
        InvalidRequest: a field is missing or too long.
    """
    if not message.request_id:
        raise InvalidRequest("request_id is empty; name the request", param="request_id")
    if len(message.request_id) > MAX_ID_CHARS:
        raise InvalidRequest(
            f"request_id has {len(message.request_id)} characters; at most {MAX_ID_CHARS} are allowed",
            param="request_id",
        )
    if not message.model:
        raise InvalidRequest("model is empty; name the model to ask", param="model")
    check_task(message)
    if message.WhichOneof("prompt") is None and message.WhichOneof("task") is None:
        raise InvalidRequest("the request has no prompt; set text or token_ids", param="prompt")
    if message.adapter:
        raise InvalidRequest(f"adapter is {message.adapter!r}; this worker serves base models only", param="adapter")
    unpack_keys(message.route_keys)
    _check_shared_part(message)


def _check_shared_part(message: worker_pb2.GenerateRequest) -> None:
    num_bytes = message.shared_prefix_bytes
    if not num_bytes:
        return
    # Of token ids nothing is shared: no part of them was seen as a text.
    most = len(message.text.encode()) if message.WhichOneof("prompt") == "text" else 0
    if not 0 <= num_bytes <= most:
        raise InvalidRequest(
            f"shared_prefix_bytes is {num_bytes}; it must be in [0, {most}], the bytes of the text",
            param="shared_prefix_bytes",
        )


def prior_from_wire(message: worker_pb2.GenerateRequest) -> tuple[PriorOutput, ...]:
    """What the choices said on another worker; its sense is checked where the request is."""
    return tuple(PriorOutput(tuple(each.token_ids), each.is_finished) for each in message.prior)


def fill_delta(out: worker_pb2.Delta, request: LiveRequest, delta: SequenceDelta) -> None:
    """Writes `delta` of `request` into the empty message `out`; the first one tells the model's revision."""
    out.request_id = request.wire_id
    _fill_first(out, request, delta)
    if delta.index:
        out.index = delta.index
    if delta.text:
        out.text = delta.text
    if delta.token_ids:
        out.num_tokens = len(delta.token_ids)
        if request.with_token_ids:
            out.token_ids.extend(delta.token_ids)
    if delta.logprobs:
        _fill_positions(out.logprobs, delta.logprobs, request.token_bytes)
    if delta.prompt_logprobs:
        _fill_prompt(out.prompt_logprobs, delta.prompt_logprobs, request)
    if delta.finish_reason is not None:
        out.finish_reason = _FINISH[delta.finish_reason]
        out.stop_reason = delta.stop_reason
    if delta.usage is not None:
        out.usage.prompt_tokens = delta.usage.prompt_tokens
        out.usage.completion_tokens = delta.usage.completion_tokens
        out.usage.cached_tokens = delta.usage.cached_tokens
    if delta.error is not None:
        fill_error(out.error, delta.error)
    if delta.output is not None:
        _fill_output(out, delta.output)
    if delta.is_last:
        out.request_done = True


def _fill_first(out: worker_pb2.Delta, request: LiveRequest, delta: SequenceDelta) -> None:
    """What only the first delta of a request has."""
    if request.untold_revision and delta.error is None:
        out.revision, request.untold_revision = request.untold_revision, ""
    if delta.cached_tokens:
        out.cached_tokens = delta.cached_tokens


def _fill_output(out: worker_pb2.Delta, output: TaskOutput) -> None:
    for vector in output.vectors:
        message = out.vectors.add(index=vector.index, prompt_tokens=vector.prompt_tokens)
        message.values = vector.values.astype("<f4", copy=False).tobytes()
    for each in output.arrays:
        fill_tensor(out.tensors.add(), each)
    if output.tokens is not None:
        out.tokenized.token_ids.extend(output.tokens.token_ids)
        out.tokenized.texts.extend(output.tokens.texts)
        out.tokenized.text = output.tokens.text


def fill_error(out: worker_pb2.Error, error: NaruError) -> None:
    """Writes `error` into the empty message `out`."""
    out.code = error.code
    out.message = error.message
    out.param = error.param
    out.retryable = error.retryable
    out.retry_after_s = error.retry_after_s


def check_answer_size(num_prompt_tokens: int, params: SamplingParams, max_message_bytes: int) -> None:
    """Refuses prompt log probabilities that no message could carry: they travel in one delta.

    Raises:
        InvalidRequest: too many tokens times alternatives.
    """
    if params.prompt_logprobs is None:
        return
    least_bytes = num_prompt_tokens * (params.prompt_logprobs + 1) * LOGPROB_BYTES
    if least_bytes > max_message_bytes // 2:
        raise InvalidRequest(
            f"prompt_logprobs is {params.prompt_logprobs} for {num_prompt_tokens} prompt tokens, about {least_bytes} "
            f"bytes of answer, above {max_message_bytes // 2}; lower it or shorten the prompt",
            param="prompt_logprobs",
        )


def estimated_bytes(delta: SequenceDelta) -> int:
    """About what a delta takes on the wire, on the high side."""
    if delta.output is not None:
        return DELTA_BYTES + delta.output.num_bytes
    if not (delta.logprobs or delta.prompt_logprobs):
        return DELTA_BYTES + 4 * len(delta.text)
    entries = sum(1 + len(p.top) for part in (delta.logprobs, delta.prompt_logprobs) for p in part)
    return DELTA_BYTES + 4 * len(delta.text) + LOGPROB_BYTES * entries


def as_error(exc: Exception) -> NaruError:
    """`exc` as one of ours; what is none is told without its insides."""
    if isinstance(exc, NaruError):
        return exc
    return InternalError(f"the call failed inside the worker ({type(exc).__name__}); its log has the reason")


def _fill_positions(out: Any, positions: tuple[PositionLogprobs, ...], token_bytes: TokenBytes) -> None:
    for position in positions:
        message = out.add()
        if position.chosen is not None:
            _fill_token(message.chosen, position.chosen, token_bytes)
        for token in position.top:
            _fill_token(message.top.add(), token, token_bytes)


def _fill_prompt(out: Any, positions: tuple[PositionLogprobs, ...], request: LiveRequest) -> None:
    """Prompt positions; the first token is named without a score, so that an echo is whole."""
    _fill_positions(out, positions, request.token_bytes)
    if request.first_prompt_token_id is not None:
        _name_token(out[0].chosen, request.first_prompt_token_id, request.token_bytes)


def _name_token(out: inference_pb2.TokenLogprob, token_id: int, token_bytes: TokenBytes) -> None:
    raw = token_bytes(token_id)
    out.token_id = token_id
    out.bytes = raw
    out.token = raw.decode("utf-8", "replace")


def _fill_token(out: inference_pb2.TokenLogprob, token: TokenLogprob, token_bytes: TokenBytes) -> None:
    _name_token(out, token.token_id, token_bytes)
    out.logprob = token.logprob
    out.rank = token.rank
