"""The inputs of a pooling task in tokens, each within the model's limits. Called by `tasks`; safe in any thread."""

from __future__ import annotations

from naru_proto.errors import ContextLengthExceeded, InvalidRequest
from naru_proto.v1 import worker_pb2
from naru_worker.adapters.engine.batch_runner import EncoderInput
from naru_worker.adapters.engine.loaded import LoadedModel, PoolingFacts


def read_inputs(model: LoadedModel, facts: PoolingFacts, task: worker_pb2.PoolingTask) -> tuple[EncoderInput, ...]:
    """All inputs of a checked task.

    Raises:
        InvalidRequest: an input has no tokens, or one outside the vocabulary; `param` names it by its index.
        ContextLengthExceeded: an input is too long, and may not be cut.
    """
    longest = facts.max_tokens
    cut = min(task.truncate_tokens, longest) if task.truncate_tokens > 0 else longest if task.truncate_tokens else None
    inputs = []
    for index, each in enumerate(task.inputs):
        try:
            read = _read(model, task, each, cut)
            if len(read.token_ids) > longest:
                raise _too_long(f"has {len(read.token_ids)} tokens", longest)
        except InvalidRequest as error:
            raise type(error)(f"input {index}: {error.message}", param=f"inputs[{index}]") from error
        inputs.append(read)
    return tuple(inputs)


def _read(
    model: LoadedModel, task: worker_pb2.PoolingTask, each: worker_pb2.PoolingInput, cut: int | None
) -> EncoderInput:
    if each.WhichOneof("first") == "token_ids":
        token_ids = tuple(each.token_ids.ids)[:cut]
        limit = model.facts.info.vocab_size
        wrong = next((token_id for token_id in token_ids if not 0 <= token_id < limit), None)
        if wrong is not None:
            raise InvalidRequest(f"it has token id {wrong}; ids of this model are in [0, {limit})")
        read = EncoderInput(token_ids)
    else:
        if cut is None:
            _check_bytes(model, len(each.text.encode()) + len(each.pair.encode()))
        is_score = task.kind == worker_pb2.POOLING_KIND_SCORE
        assert model.tokenizer is not None, "what pools texts has a tokenizer"
        typed = model.tokenizer.encode_input(
            each.text,
            each.pair if is_score else None,
            # A pair without its marks is no pair.
            add_special_tokens=task.add_special_tokens or is_score,
            max_tokens=cut,
        )
        read = EncoderInput(tuple(typed.token_ids), tuple(typed.token_types))
    if not read.token_ids:
        raise InvalidRequest("it has no tokens; send some text")
    return read


def _check_bytes(model: LoadedModel, num_bytes: int) -> None:
    """Before time is spent on tokens that are too many whatever they are."""
    limits = model.limits
    least = -(-num_bytes // limits.max_token_bytes)
    if model.pooling is not None and least > model.pooling.max_tokens:
        raise _too_long(f"has {num_bytes} bytes, at least {least} tokens", model.pooling.max_tokens)


def _too_long(what: str, longest: int) -> ContextLengthExceeded:
    return ContextLengthExceeded(f"it {what}, and the model takes {longest}; shorten it, or set truncate_tokens")
