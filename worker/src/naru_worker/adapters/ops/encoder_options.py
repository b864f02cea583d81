"""What an encoder's runner is built for, whatever the backend.

Every encoder backend module offers ``load_encoder(config, tensors, options) -> EncoderRunner``,
``weight_bytes(config) -> int`` and ``workspace_bytes(config, options) -> int``, both known before anything is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

from naru_proto.errors import InternalError
from naru_worker.adapters.engine.batch_runner import EncoderInput
from naru_worker.core.encoder_config import EncoderConfig


@dataclass(frozen=True, slots=True)
class EncoderOptions:
    """Limits of a runner."""

    max_tokens: int
    """Of one input."""
    max_num_tokens: int
    """Of one call."""
    num_threads: int = 1


def check_inputs(config: EncoderConfig, inputs: list[EncoderInput], options: EncoderOptions) -> None:
    """Refuses what no caller may send.

    Raises:
        InternalError: an input is empty or too long, or an id outside its table.
    """
    if not inputs:
        raise InternalError("a batch of an encoder is empty")
    for index, each in enumerate(inputs):
        ids, types = each.token_ids, each.token_types
        if not 1 <= len(ids) <= options.max_tokens:
            raise InternalError(f"input {index} has {len(ids)} tokens; 1 to {options.max_tokens} are possible")
        if min(ids) < 0 or max(ids) >= config.vocab_size:
            raise InternalError(f"input {index} has a token outside [0, {config.vocab_size})")
        if types and (len(types) != len(ids) or min(types) < 0 or max(types) >= max(1, config.num_token_types)):
            raise InternalError(f"the token types of input {index} do not fit its tokens or the model")
