"""Requests of a simulated fleet, and the conversations they come in. Called by traces, engines and the fleet."""

from __future__ import annotations

from dataclasses import dataclass, field

from bench.fleet_sim.prompts import Prompt


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One request to come."""

    prompt: Prompt
    num_answer_tokens: int
    """At least 1."""
    answer_blocks: tuple[int, ...]
    """Full blocks of prompt and answer together."""
    think_s: float = 0.0
    """From the end of the answer before it."""


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """Turns that follow each other: each begins after the answer to the one before it."""

    start: float
    """In mean gaps between sessions; the load makes seconds of them."""
    turns: tuple[Turn, ...]


@dataclass(slots=True, eq=False)
class Request:
    """Mutable: one request from its arrival at a router to its end."""

    number: int
    turn: Turn
    router: int
    arrived_s: float
    worker: int = -1
    expected_cached_tokens: int = -1
    """As the router thought; -1: it did not say."""
    expected_computed_tokens: int = 0
    """The same of what is left, for the router's own books."""
    num_cached_tokens: int = 0
    first_token_s: float = 0.0
    ended_s: float = 0.0
    num_computed: int = 0
    """Prompt tokens that are in the cache, found or computed."""
    held: list[int] = field(default_factory=list)
    num_private: int = 0

    @property
    def prompt(self) -> Prompt:
        """Its prompt."""
        return self.turn.prompt

    @property
    def ttft_s(self) -> float:
        """Seconds from its arrival to its first token."""
        return self.first_token_s - self.arrived_s
