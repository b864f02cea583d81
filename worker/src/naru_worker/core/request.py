"""A request and its sequences: the state the scheduler moves.

The scheduler and the KV manager mutate `Sequence`; everybody else reads. One request has `n` sequences. The first
computes the prompt; the others wait for it and then fork its blocks (copy on write), computing only the last prompt
token again to draw a first token of their own. A beam search has a sequence for each beam; see `core.beams`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NewType

from naru_worker.core.candidates import Candidates
from naru_worker.core.draft_source import DraftSource
from naru_worker.core.prompt_marks import NO_MARKS, PromptMarks
from naru_worker.core.sampling import SamplingParams
from naru_worker.core.token_matcher import TokenMatcher

RequestId = NewType("RequestId", str)


class SequenceState(enum.Enum):
    """Where a sequence stands. WAITING → RUNNING ⇄ WAITING (preempted) → FINISHED; FORKING waits for its elder."""

    FORKING = "forking"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    """Why a sequence ended. The order is that of `naru.v1.FinishReason`."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class PriorOutput:
    """What one choice had said before this worker got its request: it goes on as if it had drawn that here."""

    token_ids: tuple[int, ...] = ()
    is_finished: bool = False
    """Nothing follows; its tokens count in the usage."""


@dataclass(slots=True, eq=False)
class Request:
    """One client request on one model.

    `arrival` orders requests of equal priority, sooner first, and no two have the same. It need not grow: tenants take
    turns (see `core.fair_order`).
    """

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    arrival: int
    priority: int = 0
    cache_salt: bytes = b""
    adapter: str = ""
    skip_prefix_cache: bool = False
    prior: tuple[PriorOutput, ...] = ()
    """One item for each choice, or none at all."""
    marks: PromptMarks = NO_MARKS
    """Route keys and the shared part of its prompt."""
    show_special_tokens: bool = False
    """Their text is part of the output, but for what ends a choice."""
    matchers: tuple[TokenMatcher, ...] = ()
    """Where its text is structured, one for each choice, which has taken the prior output. Empty: it is free."""
    wants_hidden: bool = False
    """The last prompt token's state after the final norm is the answer."""
    sequences: list[Sequence] = field(default_factory=list)
    beams: list[Sequence] = field(default_factory=list)
    """Of a beam search, the sequences that live now, best first; one at the beginning. Empty: there is no search."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when the first sequence was first admitted."""

    def __post_init__(self) -> None:
        """Makes the sequences: the first WAITING, the rest FORKING; or each as its prior output left it.

        A beam search begins anew: it comes to the same, and tells what was not told.
        """
        if self.prior and self.params.beam_width is None:
            self.sequences = [_continued(self, index, prior) for index, prior in enumerate(self.prior)]
            return
        self.sequences = [
            Sequence(self, index, SequenceState.WAITING if index == 0 else SequenceState.FORKING)
            for index in range(self.params.num_sequences)
        ]
        if self.params.beam_width is not None:
            self.beams = self.sequences[:1]

    @property
    def is_finished(self) -> bool:
        """True when every sequence has ended."""
        return all(s.state is SequenceState.FINISHED for s in self.sequences)


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request: its tokens, and how many of them are computed in the KV cache.

    Invariant: ``num_computed_tokens < len(token_ids)`` while not finished (all are computed of a beam that has
    `candidates`), and block_table covers at least
    ``num_computed_tokens`` slots while RUNNING.
    """

    request: Request
    index: int
    state: SequenceState
    token_ids: list[int] = field(default_factory=list)
    """Prompt, then output."""
    num_computed_tokens: int = 0
    """Tokens whose keys and values are in the cache."""
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    """Chained hashes of the full blocks of `token_ids`, as far as needed so far. They depend on tokens alone, so they
    outlive a preemption."""
    finish_reason: FinishReason | None = None
    num_preemptions: int = 0
    table_version: int = 0
    """Grows whenever its block table is given up: until then, the table only grows (but for copies on write)."""
    matcher: TokenMatcher | None = None
    """What its text must match; it has taken all output so far."""
    draft_source: DraftSource | None = None
    """Where guesses of its next tokens come from, once it has looked for some."""
    candidates: Candidates | None = None
    """Of a beam that is computed whole and waits for its mates."""
    num_waiting_tokens: int = 0
    """While it waits: its tokens that were not cached when it began to."""

    def __post_init__(self) -> None:
        """Starts from the prompt."""
        if not self.token_ids:
            self.token_ids = list(self.request.prompt_token_ids)
        if self.request.matchers:
            self.matcher = self.request.matchers[self.index]

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_missing_tokens(self) -> int:
        """Tokens not yet computed; 1 is a decode step."""
        return len(self.token_ids) - self.num_computed_tokens


def _continued(request: Request, index: int, prior: PriorOutput) -> Sequence:
    """A sequence as a preemption would leave it: known tokens, and none of them computed.

    None waits to fork: the first may have found more than the prompt in the prefix cache, or have ended.
    """
    token_ids = [*request.prompt_token_ids, *prior.token_ids]
    if prior.is_finished:
        return Sequence(request, index, SequenceState.FINISHED, token_ids, finish_reason=FinishReason.STOP)
    return Sequence(request, index, SequenceState.WAITING, token_ids)
