"""A bound on prompts that needs no tokenizer: what cannot fit any context is refused before it travels.

The exact count is the worker's; this only keeps megabytes that can never be served off its stream.
"""

from __future__ import annotations

from naru_proto.errors import ContextLengthExceeded
from naru_router.core.completion_request import Prompt

MAX_TOKEN_BYTES = 512
"""No vocabulary has longer tokens; runs of blanks are the longest, at 128 and less."""
MAX_CHAR_BYTES = 4
"""Of a character in UTF-8."""


def check_prompt_size(prompt: Prompt, max_model_len: int, *, param: str) -> None:
    """Checks a prompt against a model's context.

    Raises:
        ContextLengthExceeded: it has too many tokens whatever the tokenizer.
    """
    if isinstance(prompt, str) and len(prompt) * MAX_CHAR_BYTES <= max_model_len * MAX_TOKEN_BYTES:
        return
    num_tokens = -(-len(prompt.encode()) // MAX_TOKEN_BYTES) if isinstance(prompt, str) else len(prompt)
    if num_tokens > max_model_len:
        raise ContextLengthExceeded(
            f"the model's context is {max_model_len} tokens and the prompt has at least {num_tokens}; shorten it",
            param=param,
        )
