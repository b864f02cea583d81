"""What one engine step does, as data: the scheduler writes it, the runner carries it out, the scheduler commits it."""

from __future__ import annotations

from dataclasses import dataclass

from naru_worker.core.candidates import Candidates
from naru_worker.core.request import FinishReason, Sequence


@dataclass(slots=True)  # one for each row of each step, as below
class Row:
    """A run of tokens of one sequence: positions ``[start, start + num_tokens)``."""

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    """True when the run reaches the last known token, so that its logits give a new one."""
    drafts: tuple[int, ...] = ()
    """Guesses of what follows the last known token: the last of `num_tokens`. Each draws a token of its own, and those
    after a wrong guess are thrown away. Only of generated rows that sample."""

    @property
    def num_known_tokens(self) -> int:
        """Tokens that are no guesses."""
        return self.num_tokens - len(self.drafts)

    @property
    def token_ids(self) -> list[int]:
        """What is computed, guesses at the end."""
        known = self.sequence.token_ids[self.start : self.start + self.num_known_tokens]
        return [*known, *self.drafts] if self.drafts else known

    @property
    def is_prompt(self) -> bool:
        """Whether these are prompt tokens; else generated ones. Never both."""
        return self.start < len(self.sequence.request.prompt_token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: first `copies`, then one forward pass over `rows`.

    Rows of generated tokens come first, then rows of prompt tokens; in both kinds single tokens before longer runs.
    Valid until the next call of `plan`.
    """

    rows: tuple[Row, ...]
    copies: tuple[tuple[int, int], ...] = ()
    """(source block, destination block): copy-on-write of partly filled shared blocks. No block is both a source and a
    destination, and no destination comes twice, so their order does not matter."""
    preempted: tuple[Sequence, ...] = ()
    """Sequences that lost their blocks in this plan; they are waiting again."""
    ended: tuple[Sequence, ...] = ()
    """Sequences finished by the planner itself (grown past the pool with nobody left to preempt)."""
    is_starved: bool = False
    """Nothing to run although sequences wait: the pool may have more blocks, but is given no memory for them now.

    Everything waits and holds nothing. Plan again when memory may have come free, or end the first that waits.
    """

    @property
    def is_decode(self) -> bool:
        """Whether each row is one generated token: the last one in the order of rows decides."""
        return bool(self.rows) and self.rows[-1].num_tokens == 1 and not self.rows[-1].is_prompt

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step, at most the token budget."""
        return sum(row.num_tokens for row in self.rows)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One candidate at one position. `logprob` is a natural log of the raw distribution, floored at -9999."""

    token_id: int
    logprob: float
    rank: int
    """1 is the most likely; the chosen token may have any rank."""


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The chosen (or given) token and the best k of one position. `chosen` is None for the first prompt token."""

    chosen: TokenLogprob | None
    top: tuple[TokenLogprob, ...] = ()


@dataclass(slots=True)  # one for each row of each step: frozen ones take twice as long to make
class RowResult:
    """What the forward pass gave one row."""

    token_id: int | None
    """The drawn token, or None when the row does not sample."""
    logprobs: PositionLogprobs | None = None
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    """For a prefill row of a request that asked: of prompt tokens ``start+1 .. start+num_tokens`` (as far as the prompt
    goes): position p's logits score token p+1."""
    candidates: Candidates | None = None
    """Of a beam, for which `token_id` does not count: `num_candidates` of its request, or the whole vocabulary."""
    drafted: tuple[RowResult, ...] = ()
    """What each of the row's drafts drew: the first of them as if the first guess were right, and so on."""
    hidden: object = None
    """The last prompt token's hidden state where its request wants it: an array that is only passed on here."""


@dataclass(slots=True)  # one for each row of each step: frozen ones take twice as long to make
class SequenceOutput:
    """What one sequence gained in one step, after stop checks; the detokenizer turns it into text.

    `new_token_ids` are all tokens that count as output, an ending EOS or stop token included; `logprobs` has one item
    for each of them when asked for. Such an ending token has no text: see `text_token_ids`. `prompt_logprobs` come all
    at once (one per prompt token, the first without `chosen`), with the first output of the first sequence.
    """

    sequence: Sequence
    new_token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: str = ""
    """``token:<id>`` when a stop token ended it; stop strings are the detokenizer's."""
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    hidden: object = None
    """See `RowResult`."""

    is_complete: bool = False
    """It ends as its grammar lets nothing follow; the last token is ordinary text."""

    @property
    def text_token_ids(self) -> tuple[int, ...]:
        """The new tokens whose text belongs to the output: unless `is_complete`, STOP means a stop token at the end."""
        has_stop_token = self.finish_reason is FinishReason.STOP and not self.is_complete
        return self.new_token_ids[:-1] if has_stop_token else self.new_token_ids
