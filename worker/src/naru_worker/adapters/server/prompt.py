"""A request's prompt as the engine wants it: token ids, and where its route keys and its shared part end.

Called by the board; safe in any thread. Costs about as much as two passes over the text beside the tokenizer's own.
"""

from __future__ import annotations

from dataclasses import dataclass

from naru_proto.route_keys import unpack_keys
from naru_proto.v1 import worker_pb2
from naru_worker.adapters.engine.loaded import LoadedModel
from naru_worker.core.prompt_marks import NO_MARKS, PromptMarks, Vocabulary, marks_of_ids, marks_of_text


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in tokens."""

    token_ids: tuple[int, ...]
    marks: PromptMarks


def read_prompt(model: LoadedModel, message: worker_pb2.GenerateRequest) -> Prompt:
    """Tokenizes the prompt of a checked message, where it is a text.

    Raises:
        InvalidRequest: the text has no tokens in this vocabulary.
    """
    keys, block_size = unpack_keys(message.route_keys), model.facts.block_size
    if message.WhichOneof("prompt") == "token_ids":
        token_ids = tuple(message.token_ids.ids)
        return Prompt(token_ids, marks_of_ids(len(token_ids), keys, block_size) if keys else NO_MARKS)
    assert model.tokenizer is not None, "what generates has a tokenizer"
    token_ids = tuple(model.tokenizer.encode(message.text, add_special_tokens=message.add_special_tokens))
    if not (keys or message.shared_prefix_bytes):
        return Prompt(token_ids, NO_MARKS)
    vocabulary = Vocabulary(model.tokens.token_bytes, model.tokens.special_text)
    text, shared_bytes = message.text.encode(), message.shared_prefix_bytes
    return Prompt(token_ids, marks_of_text(text, token_ids, vocabulary, keys, shared_bytes, block_size))
