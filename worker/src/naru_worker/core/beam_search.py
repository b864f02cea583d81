"""Beam search over one request's continuations: which of them live on, which are complete, and when it ends.

Used by `core.beams`, which moves sequences and blocks accordingly. Here is no sequence and no block: numbers in,
choices out, the same for the same numbers.

Each step looks at the best continuations of all live beams together, by the sum of the log probabilities of the raw
model. Those that end a text (EOS, stop token, stop string, length) are complete if they are among the best
`beam_width`; of all others the best `beam_width` live on. A complete text's score is its sum / length **
length_penalty, its ending token counted. The search ends when `beam_width` texts are complete and the best live beam,
scored at its present length, is no better than the worst of them; or when nothing lives. This is what transformers'
``generate(num_beams=k, do_sample=False, early_stopping=False)`` does.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from naru_worker.core.candidates import Candidates
from naru_worker.core.output_text import OutputStream
from naru_worker.core.request import FinishReason
from naru_worker.core.sampling import SamplingParams
from naru_worker.core.step import PositionLogprobs, TokenLogprob

Tokens = Sequence[int]


@dataclass(frozen=True, slots=True)
class Trail:
    """Log probabilities of a beam's output, newest first: beams with a common past share it."""

    position: PositionLogprobs
    before: Trail | None


@dataclass(frozen=True, slots=True)
class Beam:
    """What is known of a live beam beside its tokens."""

    logprob: float = 0.0
    """Sum over its output."""
    stream: OutputStream | None = None
    """Its text, where stop strings may end it."""
    trail: Trail | None = None


@dataclass(frozen=True, slots=True)
class Continuation:
    """A beam of the next step: the live beam `parent`, by its place, and one token more."""

    parent: int
    token_id: int
    beam: Beam


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a text is complete."""

    reason: FinishReason
    stop_reason: str = ""
    """``token:<id>`` of a stop token; empty for EOS."""
    is_in_text: bool = False
    """By a stop string: the output stream finds it again."""


_AT_LENGTH = Ending(FinishReason.LENGTH)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A complete text. `output_token_ids` has the token that ended it, if one did."""

    score: float
    output_token_ids: tuple[int, ...]
    ending: Ending
    logprobs: tuple[PositionLogprobs, ...] = ()
    """One for each token, where they were asked for."""


def stop_tokens(params: SamplingParams, eos_token_ids: Sequence[int]) -> dict[int, str]:
    """Ids that end a text, with the stop reason of each."""
    stops = {token_id: f"token:{token_id}" for token_id in params.stop_token_ids}
    return stops if params.ignore_eos else stops | dict.fromkeys(eos_token_ids, "")


def num_candidates(params: SamplingParams, eos_token_ids: Sequence[int]) -> int:
    """How many of each beam's next tokens a step must know: `beam_width` that end nothing are among them.

    Stop strings may end any number of them; as many more are taken, which is what transformers has in reserve.
    """
    width = params.num_sequences
    reserve = width if params.stop else 0
    return max(width + len(stop_tokens(params, eos_token_ids)) + reserve, params.logprobs or 0)


class BeamSearch:
    """One request's search. Mutable; `advance` is called once a step."""

    def __init__(
        self,
        params: SamplingParams,
        num_prompt_tokens: int,
        max_output_tokens: int,
        eos_token_ids: Sequence[int],
        stream: OutputStream | None = None,
    ) -> None:
        """`stream`: of an output without text so far, where the request has stop strings."""
        self._width = params.num_sequences
        self._params = params
        self._num_prompt_tokens = num_prompt_tokens
        self._max_output_tokens = max_output_tokens
        self._stop_tokens = stop_tokens(params, eos_token_ids)
        self._beams = [Beam(stream=stream if params.stop else None)]
        self._complete: list[Hypothesis] = []
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """Whether nothing better can be found by the rule above."""
        return self._is_over

    def best(self, count: int) -> list[Hypothesis]:
        """The best complete texts, best first: fewer than asked for only where the vocabulary has no more."""
        return self._complete[:count]

    def advance(self, parents: Sequence[Tokens], candidates: Sequence[Candidates]) -> list[Continuation]:
        """The beams of the next step, best first; none when the search is over.

        Args:
            parents: all tokens of each live beam, in the order of the continuations that made them.
            candidates: of each live beam, `num_candidates` of them or the whole vocabulary.
        """
        num_output = len(parents[0]) - self._num_prompt_tokens + 1
        is_longest = num_output >= self._max_output_tokens
        is_banned = num_output <= self._params.min_tokens
        live: list[Continuation] = []
        rank = 0
        for logprob, parent, place in _merged(self._beams, candidates):
            if len(live) == self._width or (is_longest and rank >= self._width):
                break
            token_id = candidates[parent].token_ids[place]
            if is_banned and token_id in self._stop_tokens:
                continue
            rank += 1
            ending, stream = self._end(parent, token_id, is_longest=is_longest)
            if ending is None:
                trail = self._trail(parent, candidates[parent], place)
                live.append(Continuation(parent, token_id, Beam(logprob, stream, trail)))
            elif rank <= self._width:
                positions = _positions(self._trail(parent, candidates[parent], place))
                output = (*parents[parent][self._num_prompt_tokens :], token_id)
                self._keep(Hypothesis(self._score(logprob, num_output), output, ending, positions))
        self._beams = [each.beam for each in live]
        self._is_over = not live or not self._can_improve(self._score(live[0].beam.logprob, num_output))
        return [] if self._is_over else live

    def _end(self, parent: int, token_id: int, *, is_longest: bool) -> tuple[Ending | None, OutputStream | None]:
        """How a beam ends with this token, if it does; else its text so far."""
        stop_reason = self._stop_tokens.get(token_id)
        if stop_reason is not None:
            return Ending(FinishReason.STOP, stop_reason), None
        stream = self._beams[parent].stream
        if stream is not None:
            stream, stop = stream.ahead(token_id)
            if stop is not None:
                return Ending(FinishReason.STOP, is_in_text=True), None
        return (_AT_LENGTH, None) if is_longest else (None, stream)

    def _score(self, logprob: float, num_output: int) -> float:
        return float(logprob / num_output**self._params.length_penalty)

    def _can_improve(self, best_score: float) -> bool:
        return len(self._complete) < self._width or best_score > self._complete[-1].score

    def _keep(self, hypothesis: Hypothesis) -> None:
        insort(self._complete, hypothesis, key=lambda each: -each.score)
        del self._complete[self._width :]

    def _trail(self, parent: int, candidates: Candidates, place: int) -> Trail | None:
        num_top = self._params.logprobs
        if num_top is None:
            return None
        ids, logprobs = candidates.token_ids, candidates.logprobs
        top = [TokenLogprob(ids[i], logprobs[i], i + 1) for i in range(min(max(num_top, place + 1), len(ids)))]
        return Trail(PositionLogprobs(top[place], tuple(top[:num_top])), self._beams[parent].trail)


def _merged(beams: Sequence[Beam], candidates: Sequence[Candidates]) -> Iterator[tuple[float, int, int]]:
    """(sum of log probabilities, beam, place among its candidates), best first; the better beam first on ties."""
    heap = [
        (-(beam.logprob + each.logprobs[0]), parent, 0)
        for parent, (beam, each) in enumerate(zip(beams, candidates, strict=True))
        if each.logprobs
    ]
    heapq.heapify(heap)
    while heap:
        worst_first, parent, place = heap[0]
        yield -worst_first, parent, place
        following = candidates[parent].logprobs
        if place + 1 < len(following):
            heapq.heapreplace(heap, (-(beams[parent].logprob + following[place + 1]), parent, place + 1))
        else:
            heapq.heappop(heap)


def _positions(trail: Trail | None) -> tuple[PositionLogprobs, ...]:
    positions = []
    while trail is not None:
        positions.append(trail.position)
        trail = trail.before
    return tuple(reversed(positions))
