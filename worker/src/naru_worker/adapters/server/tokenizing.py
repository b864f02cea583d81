"""A text in tokens, and tokens in text. Called by `tasks`; safe in any thread."""

from __future__ import annotations

from naru_proto.errors import InvalidRequest
from naru_proto.v1 import worker_pb2
from naru_worker.adapters.engine.loaded import LoadedModel
from naru_worker.adapters.engine.task_output import Tokens


def tokenize(model: LoadedModel, task: worker_pb2.TokenizeTask) -> Tokens:
    """The answer to a checked task; special tokens are spelt out where tokens become text.

    Raises:
        InvalidRequest: an id outside the vocabulary, or a text that has no tokens.
    """
    tokenizer = model.tokenizer
    assert tokenizer is not None, "the caller has looked"
    if task.WhichOneof("from") == "text":
        try:
            token_ids = tuple(tokenizer.encode(task.text, add_special_tokens=task.add_special_tokens))
        except InvalidRequest as error:
            raise InvalidRequest(error.message, param="text") from error
        return Tokens(token_ids, _texts(model, token_ids) if task.with_texts else ())
    token_ids = tuple(task.token_ids.ids)
    limit = model.facts.info.vocab_size
    wrong = next((token_id for token_id in token_ids if not 0 <= token_id < limit), None)
    if wrong is not None:
        raise InvalidRequest(f"token_ids has {wrong}; ids of this model are in [0, {limit})", param="token_ids")
    text = tokenizer.decode(token_ids, skip_special_tokens=False)
    return Tokens(token_ids, _texts(model, token_ids) if task.with_texts else (), text)


def _texts(model: LoadedModel, token_ids: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(model.tokens.token_bytes(token_id).decode("utf-8", "replace") for token_id in token_ids)
