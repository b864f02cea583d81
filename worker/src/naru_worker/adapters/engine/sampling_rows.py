"""Turns the sampling rows of a `StepPlan` into a `SamplingBatch`, and a `SampleOutput` back into `RowResult`s.

Called by the engine at each step. While the same sequences sample as in the step before, and nothing about them changes
but their place in the random stream, the batch of the step before is used again with new counters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from naru_worker.adapters.engine.grammar_masks import make_masks
from naru_worker.adapters.engine.grammar_matcher import GrammarMatcher
from naru_worker.adapters.engine.penalties import TokenCounts
from naru_worker.adapters.ops.protocol import FloatArray, Int32Array, SampleOutput, SamplingBatch
from naru_worker.core.beam_search import num_candidates
from naru_worker.core.candidates import Candidates
from naru_worker.core.request import Sequence
from naru_worker.core.step import PositionLogprobs, Row, RowResult, StepPlan, TokenLogprob

_SKIPPED = RowResult(token_id=None)
LOGPROB_FLOOR = -9999.0
"""Reported for tokens of probability zero: JSON has no infinity."""


class SequenceSampling:
    """What the sampler must know of one sequence, prepared once. Lives as long as its request."""

    __slots__ = (
        "always_banned",
        "ban_ids",
        "bias",
        "counter_base",
        "counts",
        "drafts",
        "draws",
        "is_beam",
        "matcher",
        "needs_refresh",
        "params",
        "seed",
        "sequence",
        "temperature",
    )

    def __init__(self, sequence: Sequence, eos_token_ids: tuple[int, ...]) -> None:
        params = sequence.request.params
        self.sequence = sequence
        self.params = params
        self.is_beam = params.beam_width is not None
        """It wants candidates; what is drawn does not count."""
        self.temperature = 0.0 if params.is_greedy or self.is_beam else params.temperature
        self.seed = sequence.request.seed
        self.counter_base = sequence.index << 32
        self.bias = params.logit_bias
        repeats = params.repetition_penalty != 1.0
        penalised = repeats or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self.counts = TokenCounts(sequence, with_prompt=repeats) if penalised else None
        ends = params.stop_token_ids if params.ignore_eos else (*eos_token_ids, *params.stop_token_ids)
        self.ban_ids = tuple(sorted(set(ends))) if params.min_tokens > 0 and not self.is_beam else ()
        self.matcher = sequence.matcher if isinstance(sequence.matcher, GrammarMatcher) else None
        # A grammar's end is final: who ignores ends gets the longest text that it allows.
        self.always_banned = eos_token_ids if self.matcher is not None and params.ignore_eos else ()
        self.needs_refresh = penalised or bool(self.ban_ids)
        """True when more than the counter may change from step to step."""
        num_logprobs = num_candidates(params, eos_token_ids) if self.is_beam else _or_none(params.logprobs)
        self.draws = [RowRequest(self, -1, num_logprobs)]
        """The row that draws its next token, then those behind drafts as far as there ever were any: always the same
        objects, so that equal batches are found by identity."""
        self.drafts: tuple[int, ...] = ()
        """Of the step that is being built, where it has any."""

    def draw(self, num_ahead: int) -> RowRequest:
        """The row that draws behind so many drafts."""
        draws = self.draws
        while len(draws) <= num_ahead:
            draws.append(RowRequest(self, -1, draws[0].num_logprobs, len(draws)))
        return draws[num_ahead]

    def banned(self, num_ahead: int) -> tuple[int, ...]:
        """Ids that may not be drawn behind so many drafts: whatever would end the sequence before min_tokens."""
        num_before = self.sequence.num_output_tokens + num_ahead
        ban_ids = self.ban_ids if num_before < self.params.min_tokens else ()
        return (*self.always_banned, *ban_ids) if self.always_banned else ban_ids


@dataclass(frozen=True, slots=True, eq=False)
class RowRequest:
    """One row of logits: a sequence that draws, or (`target` ≥ 0) a prompt token that is scored."""

    state: SequenceSampling
    target: int
    num_logprobs: int
    num_ahead: int = 0
    """Drafts that this row takes for drawn: it draws the token after them."""


class SamplingBuilder:
    """Builds sampling batches of one model. Not thread-safe; a result is valid until the next `build`."""

    def __init__(self, vocab_limit: int) -> None:
        self._vocab_limit = vocab_limit
        self._rows: list[RowRequest] = []
        self._batch: SamplingBatch | None = None

    def build(self, rows: list[RowRequest]) -> SamplingBatch:
        """The batch for `rows`, in their order."""
        batch = self._batch
        if batch is None or rows != self._rows:
            batch = self._fill(rows)
            is_volatile = any(row.state.needs_refresh or row.target >= 0 for row in rows)
            self._rows, self._batch = rows, None if is_volatile else batch
        batch.counter[:] = [
            row.state.counter_base + row.state.sequence.num_output_tokens + row.num_ahead for row in rows
        ]
        return batch

    def forget(self) -> None:
        """Drops references to sequences, for an idle engine."""
        self._rows, self._batch = [], None

    def _fill(self, rows: list[RowRequest]) -> SamplingBatch:
        params = [row.state.params for row in rows]
        logprobs = [row.num_logprobs for row in rows]
        draws = [row.target < 0 for row in rows]
        bias = [row.state.bias if drawn else () for row, drawn in zip(rows, draws, strict=True)]
        banned = [row.state.banned(row.num_ahead) if drawn else () for row, drawn in zip(rows, draws, strict=True)]
        penalty_start, penalty_ids, penalty_counts = _penalties(rows)
        matchers = [row.state.matcher if drawn else None for row, drawn in zip(rows, draws, strict=True)]
        return SamplingBatch(
            temperature=_floats([row.state.temperature for row in rows]),
            top_k=_ints([max(0, p.top_k) for p in params]),
            top_p=_floats([p.top_p for p in params]),
            min_p=_floats([p.min_p for p in params]),
            presence_penalty=_floats([p.presence_penalty for p in params]),
            frequency_penalty=_floats([p.frequency_penalty for p in params]),
            repetition_penalty=_floats([p.repetition_penalty for p in params]),
            seed=np.array([row.state.seed for row in rows], np.uint64),
            counter=np.zeros(len(rows), np.uint64),
            target=_ints([row.target for row in rows]),
            num_logprobs=_ints(logprobs),
            bias_start=_starts([len(b) for b in bias]),
            bias_ids=_ints([i for b in bias for i, _ in b]),
            bias_values=_floats([v for b in bias for _, v in b]),
            penalty_start=penalty_start,
            penalty_ids=penalty_ids,
            penalty_output_counts=penalty_counts,
            banned_start=_starts([len(b) for b in banned]),
            banned_ids=_ints([i for b in banned for i in b]),
            vocab_limit=self._vocab_limit,
            max_logprobs=max(0, max(logprobs, default=0)),
            masks=make_masks(matchers) if any(matchers) else None,
            wants_hidden=any(row.state.sequence.request.wants_hidden for row in rows),
        )


def matchers_of(rows: list[RowRequest]) -> list[GrammarMatcher]:
    """Of the rows that draw, in their order: as the masks of their batch lie."""
    return [row.state.matcher for row in rows if row.target < 0 and row.state.matcher is not None]


def wanted_rows(plan: StepPlan, states: dict[Sequence, SequenceSampling]) -> tuple[list[RowRequest], list[int]]:
    """The rows of logits a plan needs, and their token indices in the batch, ascending."""
    wanted: list[RowRequest] = []
    indices: list[int] = []
    offset = 0
    for row in plan.rows:
        sequence = row.sequence
        if sequence.index == 0 and sequence.request.params.prompt_logprobs is not None:
            _add_scored(row, offset, states[sequence], wanted, indices)
        offset += row.num_tokens
        if row.drafts:
            state, count = states[sequence], len(row.drafts) + 1
            state.drafts = row.drafts
            wanted.extend([state.draw(num_ahead) for num_ahead in range(count)])
            indices.extend(range(offset - count, offset))
        elif row.samples or gives_hidden(row):
            wanted.append(states[sequence].draws[0])
            indices.append(offset - 1)
    return wanted, indices


def gives_hidden(row: Row) -> bool:
    """Whether the row ends with the token whose hidden state its request is about."""
    request = row.sequence.request
    return request.wants_hidden and row.start + row.num_tokens == len(request.prompt_token_ids)


def _add_scored(row: Row, offset: int, state: SequenceSampling, wanted: list[RowRequest], indices: list[int]) -> None:
    """Position p's logits score prompt token p + 1; the last prompt token's logits score nothing, they are drawn from.

    Once a first token is out the scores are out as well, and a recomputation after preemption needs none.
    """
    if row.sequence.num_output_tokens:
        return
    prompt = row.sequence.request.prompt_token_ids
    for position in range(row.start, min(row.start + row.num_tokens, len(prompt) - 1)):
        wanted.append(RowRequest(state, prompt[position + 1], _or_none(state.params.prompt_logprobs)))
        indices.append(offset + position - row.start)


def row_results(plan: StepPlan, wanted: list[RowRequest], output: SampleOutput) -> list[RowResult]:
    """One result for each row of `plan`, from the sampled `wanted` rows."""
    token_ids: list[int] = output.token_ids.tolist()
    if (
        output.hidden is None
        and len(wanted) == len(plan.rows)
        and all([row.num_logprobs < 0 and not row.num_ahead for row in wanted])
    ):
        # Every row draws once (a scored row always has logprobs, and comes with or without a drawing one).
        return [RowResult(token_id) for token_id in token_ids]
    results: list[RowResult] = []
    cursor = 0
    for row in plan.rows:
        scored: list[PositionLogprobs] = []
        while cursor < len(wanted) and wanted[cursor].target >= 0 and wanted[cursor].state.sequence is row.sequence:
            scored.append(_position(cursor, wanted[cursor].num_logprobs, output))
            cursor += 1
        if output.hidden is not None and gives_hidden(row):
            # The step's array lives as long as anybody holds a part of it.
            results.append(RowResult(None, prompt_logprobs=tuple(scored), hidden=output.hidden[cursor].copy()))
            cursor += 1
            continue
        if not row.samples:
            results.append(RowResult(None, prompt_logprobs=tuple(scored)) if scored else _SKIPPED)
            continue
        asked = wanted[cursor].num_logprobs
        if wanted[cursor].state.is_beam:
            best = _candidates(cursor, asked, output)
            results.append(RowResult(token_ids[cursor], None, tuple(scored), best))
        else:
            logprobs = _position(cursor, asked, output) if asked >= 0 else None
            drafted = _drafted(cursor + 1, len(row.drafts), asked, output, token_ids)
            results.append(RowResult(token_ids[cursor], logprobs, tuple(scored), drafted=drafted))
        cursor += 1 + len(row.drafts)
    return results


def _drafted(
    first: int, count: int, num_logprobs: int, output: SampleOutput, token_ids: list[int]
) -> tuple[RowResult, ...]:
    """What the rows behind a sequence's drafts drew."""
    if num_logprobs < 0:
        return tuple([RowResult(token_id) for token_id in token_ids[first : first + count]])
    return tuple([RowResult(token_ids[i], _position(i, num_logprobs, output)) for i in range(first, first + count)])


def _position(i: int, num_top: int, output: SampleOutput) -> PositionLogprobs:
    chosen = TokenLogprob(int(output.token_ids[i]), _floored(output.logprobs[i]), int(output.ranks[i]))
    ids: list[int] = output.top_ids[i, :num_top].tolist()
    values: list[float] = output.top_logprobs[i, :num_top].tolist()
    top = tuple(
        TokenLogprob(token_id, _floored(value), rank)
        for rank, (token_id, value) in enumerate(zip(ids, values, strict=True), start=1)
        if token_id >= 0
    )
    return PositionLogprobs(chosen, top)


def _candidates(i: int, num_top: int, output: SampleOutput) -> Candidates:
    ids: list[int] = output.top_ids[i, :num_top].tolist()
    values: list[float] = output.top_logprobs[i, :num_top].tolist()
    num_known = ids.index(-1) if -1 in ids else len(ids)
    return Candidates(ids[:num_known], [_floored(value) for value in values[:num_known]])


def _floored(value: Any) -> float:
    """Also turns NaN, which compares false, into the floor."""
    number = float(value)
    return number if number >= LOGPROB_FLOOR else LOGPROB_FLOOR


def _penalties(rows: list[RowRequest]) -> tuple[Int32Array, Int32Array, Int32Array]:
    ids: list[Int32Array] = []
    counts: list[Int32Array] = []
    lengths: list[int] = []
    for row in rows:
        if row.target >= 0 or row.state.counts is None:
            lengths.append(0)
            continue
        row_ids, row_counts = row.state.counts.refresh(row.state.drafts[: row.num_ahead])
        ids.append(row_ids)
        counts.append(row_counts)
        lengths.append(len(row_ids))
    if not ids:
        empty = np.zeros(0, np.int32)
        return _starts(lengths), empty, empty
    return _starts(lengths), np.concatenate(ids), np.concatenate(counts)


def _starts(lengths: list[int]) -> Int32Array:
    starts = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    return starts


def _floats(values: list[float]) -> FloatArray:
    return np.array(values, np.float32)


def _ints(values: list[int]) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)


def _or_none(value: int | None) -> int:
    return -1 if value is None else value
