"""Token counts of an answer in OpenAI's shape, summed over the prompts of one call."""

from __future__ import annotations

from dataclasses import dataclass

from naru_proto.v1.inference_pb2 import Usage


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens read and written."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @classmethod
    def from_wire(cls, usage: Usage) -> TokenUsage:
        """What a worker counted for one prompt."""
        return cls(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)

    def __add__(self, other: TokenUsage) -> TokenUsage:
        return TokenUsage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
        )

    def to_openai(self) -> dict[str, object]:
        """The `usage` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
