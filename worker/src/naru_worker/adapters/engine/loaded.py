"""A loaded model as the asyncio thread knows it: the engine to post to, the tokenizer, and fixed facts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from naru_proto.registry import ModelInfoRecord
from naru_worker.adapters.engine.loop import SteppedEngine
from naru_worker.adapters.engine.token_table import TokenTable
from naru_worker.adapters.ops.device_stats import DeviceStats
from naru_worker.core.request import PriorOutput
from naru_worker.core.request_limits import RequestLimits
from naru_worker.core.structured import StructuredOutput
from naru_worker.core.token_matcher import TokenMatcher


class TypedInput(Protocol):
    """A text or a pair in tokens."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Special tokens included."""

    @property
    def token_types(self) -> Sequence[int]:
        """1 for tokens of a second text; none: all are of the first."""


class PromptTokenizer(Protocol):
    """What the server needs of a tokenizer. Safe to use from several threads."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text.

        Raises:
            InvalidRequest: it has none.
        """

    def encode_input(
        self, text: str, pair: str | None, *, add_special_tokens: bool, max_tokens: int | None
    ) -> TypedInput:
        """A text or a pair as encoders take it, cut to `max_tokens`, special tokens kept; None: not cut.

        Raises:
            InvalidRequest: it has no tokens, or the model has no mark between the texts of a pair.
        """

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of a whole run of tokens."""


class Grammars(Protocol):
    """What the server needs of a model's grammars. Asyncio thread only."""

    async def matchers(
        self, wish: StructuredOutput, num_choices: int, prior: Sequence[PriorOutput] = ()
    ) -> tuple[TokenMatcher, ...]:
        """A matcher for each choice, moved past its prior output.

        Raises:
            InvalidRequest: the wish cannot be kept, or prior output does not match it.
            Overloaded: too many others are being compiled.
        """


@dataclass(frozen=True, slots=True)
class PoolingFacts:
    """How a model's vectors or scores are made, as its files say."""

    kind: str
    """embed or score."""
    max_tokens: int
    """Of the longest input, special tokens included."""
    normalize: bool
    """Vectors have length 1 unless asked otherwise."""
    dimension: int
    is_sigmoid: bool = True
    """Scores go through a sigmoid unless asked otherwise."""


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
    tokenizer: PromptTokenizer | None
    """None: it takes tensors, not text."""
    tokens: TokenTable
    limits: RequestLimits
    facts: ModelFacts
    release: Callable[[], None]
    """Gives back runner, KV and engine; blocks; the engine thread must have let go before. The weights stay hosted."""
    posted: deque[int] = field(default_factory=deque)
    """Prompt tokens of requests posted to the engine, the last ones; see `posted_tokens`."""
    num_posted: int = 0
    grammars: Grammars | None = None
    """None: it has no structured output."""
    pooling: PoolingFacts | None = None
    """None: it gives neither vectors nor scores."""
    device_stats: Callable[[], DeviceStats] | None = None
    """May be called from any thread. None: it has no device of its own."""

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
