"""The requests of the affinity measurement: chats of many turns, and few system prompts with many tails. Pure.

A session is a list of texts that its client sends one after another, each as the next turn of one chat; a session of
one turn is a single question. A seed fixes all of it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from naru_router.core.tenancy.cache_scope import common_prefix

WORDS = (
    "the river port keeps small boats that carry grain salt iron and letters between two towns on either bank while "
    "clerks write down who paid which toll and when the water rose above the third mark of the old stone pier because "
    "summer storms bring mud from hills where farmers cut trees to build barns bridges and mills that turn all winter"
).split()


BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Session:
    """One client's chat."""

    system: str
    turns: tuple[str, ...]


def multi_turn(num_sessions: int, num_turns: int, seed: int) -> tuple[Session, ...]:
    """Chats that grow: each turn adds some hundred words; no two share a beginning beyond the template's."""
    rng = random.Random(f"turns {seed}")
    return tuple(
        Session(f"Chat {number}. {_text(rng, 100)}", tuple(_text(rng, 100) for _ in range(num_turns)))
        for number in range(num_sessions)
    )


def shared_prefix(num_prompts: int, num_sessions: int, num_words: int, seed: int) -> tuple[Session, ...]:
    """Single questions under few long system prompts, in random order."""
    rng = random.Random(f"shared {seed}")
    systems = [f"Rules {number}. {_text(rng, num_words)}" for number in range(num_prompts)]
    return tuple(Session(rng.choice(systems), (_text(rng, 30),)) for _ in range(num_sessions))


def _text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(WORDS, k=num_words)) + "."


class Oracle:
    """What a router could get that knows all caches, if nothing ever left them: the longest beginning that any earlier
    request had, in whole blocks, which is what caches hold. Reckoned in characters: off by a point or two. Mutable.
    """

    def __init__(self) -> None:
        self._seen: list[str] = []
        self.cached_tokens = 0.0
        self.prompt_tokens = 0

    def ask(self, prompt: str, num_tokens: int) -> None:
        """Counts a request, in the order in which they were sent, and remembers its prompt."""
        longest = max((len(common_prefix(prompt, other)) for other in self._seen), default=0)
        self.cached_tokens += num_tokens * longest / len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS
        self.prompt_tokens += num_tokens
        self._seen.append(prompt)

    @property
    def hit_ratio(self) -> float:
        """Cached tokens over prompt tokens."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
