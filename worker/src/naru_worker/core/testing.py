"""A pretend model for tests of scheduling: it stores, slot by slot, which text a slot belongs to.

Used in place of a runner by tests of the scheduler and the engine loop. A real model's keys and values depend on all
tokens before them; here a slot holds a number chained over all tokens before it, read through the block table as a real
kernel would. Wrong sharing, a forgotten copy or an early reuse of a block therefore changes the tokens that come out.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from naru_worker.core.candidates import Candidates
from naru_worker.core.request import FinishReason, Request, Sequence
from naru_worker.core.step import PositionLogprobs, Row, RowResult, StepPlan, TokenLogprob

POISON = -1
"""Content of a slot never written."""


def _number(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest(), "little")


@dataclass
class PretendModel:
    """Draws tokens in ``[0, num_drawn)`` from the chain of all tokens so far, the seed and the choice."""

    block_size: int
    vocab_size: int = 50
    revision: str = "a"
    num_drawn: int = 0
    """0: the whole vocabulary. With a few, the text repeats itself now and then."""
    slots: dict[int, int] = field(default_factory=dict)
    """Slot number (block x block_size + offset) to content."""
    _chains: dict[tuple[int, int], int] = field(default_factory=dict)

    def root(self, request: Request) -> int:
        """Chain value before the first token: another model, adapter or salt gives other contents."""
        if request.marks.num_shared_blocks:
            return _number(self.revision, request.adapter, "shared")
        return _number(self.revision, request.adapter, request.cache_salt)

    def follow(self, request: Request, chain: int, position: int, token_id: int) -> int:
        """Chain value after the token at a position: behind a shared part, the tenant's own."""
        if position and position == request.marks.num_shared_blocks * self.block_size:
            chain = _number(chain, request.cache_salt)
        return self.link(chain, token_id)

    def link(self, parent: int, token_id: int) -> int:
        """Chain value after one more token."""
        key = (parent, token_id)
        if key not in self._chains:
            self._chains[key] = _number(parent, token_id)
        return self._chains[key]

    def draw(self, request: Request, index: int, chain: int) -> int:
        """The token that follows."""
        return _number(chain, request.seed, index) % (self.num_drawn or self.vocab_size)

    def score(self, chain: int, token_id: int) -> PositionLogprobs:
        """A made-up logprob that depends on all tokens before."""
        return PositionLogprobs(TokenLogprob(token_id, -(_number(chain, token_id) % 1000) / 100, 1))

    def candidates(self, chain: int) -> Candidates:
        """The whole vocabulary with made-up log probabilities, best first."""
        logprobs = [-(_number(chain, token_id, "beam") % 4000) / 1000 for token_id in range(self.vocab_size)]
        order = sorted(range(self.vocab_size), key=lambda token_id: -logprobs[token_id])
        return Candidates(order, [logprobs[token_id] for token_id in order])

    def run(self, plan: StepPlan) -> list[RowResult]:
        """Carries out a step, checking that every row reads exactly its own text."""
        sources, destinations = [s for s, _ in plan.copies], [d for _, d in plan.copies]
        assert not set(sources) & set(destinations), "a block is copied from and to in one step"
        assert len(destinations) == len(set(destinations)), "a block is copied to twice"
        for source, destination in plan.copies:
            for offset in range(self.block_size):
                content = self.slots.get(source * self.block_size + offset, POISON)
                self.slots[destination * self.block_size + offset] = content
        written: set[int] = set()
        for row in plan.rows:
            for slot in self._write(row):
                assert slot not in written, "two rows write one slot"
                written.add(slot)
        return [self._result(row) for row in plan.rows]

    def _slot(self, sequence: Sequence, position: int) -> int:
        block = sequence.block_table[position // self.block_size]
        assert block != 0, "the null block was handed out"
        return block * self.block_size + position % self.block_size

    def _write(self, row: Row) -> list[int]:
        sequence = row.sequence
        chain = self.root(sequence.request)
        if row.start:
            chain = self.slots.get(self._slot(sequence, row.start - 1), POISON)
        slots = []
        for position, token_id in enumerate(row.token_ids, start=row.start):
            chain = self.follow(sequence.request, chain, position, token_id)
            slot = self._slot(sequence, position)
            self.slots[slot] = chain
            slots.append(slot)
        return slots

    def _result(self, row: Row) -> RowResult:
        sequence = row.sequence
        request = sequence.request
        end = row.start + row.num_tokens
        first_draft = end - len(row.drafts)
        chain = self.root(request)
        scores, drawn = [], []
        for position, token_id in enumerate([*sequence.token_ids[: row.start], *row.token_ids]):
            if position > row.start:
                scores.append(self.score(chain, token_id))
            if position >= first_draft:
                drawn.append(RowResult(self.draw(request, sequence.index, chain)))
            chain = self.follow(request, chain, position, token_id)
            content = self.slots.get(self._slot(sequence, position), POISON)
            assert content == chain, f"{request.request_id}: position {position} reads somebody else's slot"
        if drawn:
            drawn.append(RowResult(self.draw(request, sequence.index, chain)))
            return RowResult(drawn[0].token_id, drafted=tuple(drawn[1:]))
        if end < sequence.num_prompt_tokens:
            scores.append(self.score(chain, sequence.token_ids[end]))
        asked = request.params.prompt_logprobs is not None
        num_scores = max(0, min(end, sequence.num_prompt_tokens - 1) - row.start)
        return RowResult(
            self.draw(request, sequence.index, chain) if row.samples else None,
            prompt_logprobs=tuple(scores[:num_scores]) if asked else (),
            candidates=self.candidates(chain) if row.samples and request.beams else None,
        )


def solo_outcome(
    model: PretendModel, request: Request, index: int, *, max_model_len: int, eos_token_ids: tuple[int, ...] = ()
) -> tuple[list[int], FinishReason]:
    """What one choice must come to, whatever else runs: its output tokens and finish reason."""
    params = request.params
    chain = model.root(request)
    for position, token_id in enumerate(request.prompt_token_ids):
        chain = model.follow(request, chain, position, token_id)
    room = max_model_len - len(request.prompt_token_ids)
    limit = room if params.max_tokens is None else min(params.max_tokens, room)
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
    output: list[int] = []
    while len(output) < limit:
        output.append(model.draw(request, index, chain))
        chain = model.follow(request, chain, len(request.prompt_token_ids) + len(output) - 1, output[-1])
        if output[-1] in stops and len(output) > params.min_tokens:
            return output, FinishReason.STOP
    return output, FinishReason.LENGTH
