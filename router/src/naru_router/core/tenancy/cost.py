"""What a request may cost in tokens, before anybody has computed one. Asked where it is admitted."""

from __future__ import annotations

from naru_proto.v1.inference_pb2 import SamplingParams

USUAL_ANSWER_TOKENS = 256
"""Of a request that names no limit: most end by themselves long before the model's context does."""


def expected_tokens(num_prompt_tokens: int, sampling: SamplingParams, *, has_answer: bool = True) -> int:
    """Of the prompt and of all answers, where text is asked for; what was really used is settled at the end."""
    if not has_answer:
        return max(0, num_prompt_tokens)
    longest = sampling.max_tokens if sampling.HasField("max_tokens") else USUAL_ANSWER_TOKENS
    return max(0, num_prompt_tokens) + max(0, longest) * max(1, sampling.n if sampling.HasField("n") else 1)
