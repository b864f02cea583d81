"""A loaded model as the asyncio thread knows it: the engine to post to, the tokenizer, and fixed facts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from naru_proto.registry import ModelInfoRecord
from naru_worker.adapters.engine.loop import SteppedEngine
from naru_worker.adapters.engine.token_table import TokenTable
from naru_worker.core.request_limits import RequestLimits


class PromptTokenizer(Protocol):
    """What the server needs of a tokenizer. Safe to use from several threads."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text.

        Raises:
            InvalidRequest: it has none.
        """


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is told about a loaded model."""

    info: ModelInfoRecord
    revision: str
    weight_bytes: int
    kv_bytes: int
    """Of all blocks it may ever have."""
    kv_bytes_per_token: int
    block_size: int
    num_blocks: int
    """The most there will ever be."""
    info_digest: str = ""
    """Of `info`: computed once, told with each lease."""

    def __post_init__(self) -> None:
        """Fills the digest in."""
        object.__setattr__(self, "info_digest", self.info.digest())


@dataclass(slots=True, eq=False)
class LoadedModel:
    """One load of a model: a reload is another object."""

    name: str
    engine: SteppedEngine
    tokenizer: PromptTokenizer
    tokens: TokenTable
    limits: RequestLimits
    facts: ModelFacts
    release: Callable[[], None]
    """Gives back runner, KV and engine; blocks; the engine thread must have let go before. The weights stay hosted."""
    posted: deque[int] = field(default_factory=deque)
    """Prompt tokens of requests posted to the engine, the last ones; see `posted_tokens`."""
    num_posted: int = 0

    def note_posted(self, num_tokens: int) -> None:
        """A request with so many prompt tokens is on its way to the engine. Asyncio thread only."""
        self.posted.append(num_tokens)
        self.num_posted += 1

    def posted_tokens(self) -> int:
        """Prompt tokens of requests that the engine has not taken yet: they are taken in order. Asyncio thread only."""
        num_under_way = self.num_posted - self.engine.stats.num_taken
        while len(self.posted) > max(0, num_under_way):
            self.posted.popleft()
        return sum(self.posted)
