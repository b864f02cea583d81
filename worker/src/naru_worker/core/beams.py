"""Beam searches of one model's scheduler: the beams of a request are its sequences, and move in lockstep.

Used by the scheduler at commit. A beam's row gives candidates in place of a token. Once every live beam of a request
has its candidates, `core.beam_search` says which continuations live on; here sequences and block tables are moved
along: a beam with several children shares its blocks with all of them (copy on write), one without children gives its
own back.

A preempted request loses the blocks of all its beams together. Its first beam then computes its tokens again, lets the
others share what they have in common with it, and these compute their rest; the search goes on where it stood.
"""

from __future__ import annotations

from naru_worker.core.beam_search import BeamSearch, Continuation, Hypothesis
from naru_worker.core.candidates import Candidates
from naru_worker.core.kv_manager import KVManager
from naru_worker.core.output_text import OutputStream
from naru_worker.core.request import FinishReason, PriorOutput, Request, RequestId, Sequence, SequenceState
from naru_worker.core.request_check import max_beam_tokens
from naru_worker.core.roster import Roster
from naru_worker.core.scheduler_config import SchedulerConfig
from naru_worker.core.step import PositionLogprobs, SequenceOutput

MAX_PIECE_TOKENS = 512
"""Of an answer, in one message; with log probabilities as many fewer as there are alternatives."""


class Beams:
    """The searches that are under way."""

    def __init__(self, config: SchedulerConfig, kv: KVManager, roster: Roster) -> None:
        self._config = config
        self._kv = kv
        self._roster = roster
        self._searches: dict[RequestId, BeamSearch] = {}

    def __len__(self) -> int:
        """Requests with a search."""
        return len(self._searches)

    def open(self, request: Request, stream: OutputStream | None) -> None:
        """Begins a search, if the request asks for one."""
        if request.beams:
            num_prompt = len(request.prompt_token_ids)
            num_output = max_beam_tokens(request, self._config, self._kv) - num_prompt
            if request.params.max_tokens is not None:
                num_output = min(num_output, request.params.max_tokens)
            eos = self._config.eos_token_ids
            search = BeamSearch(request.params, num_prompt, num_output, eos, stream)
            self._searches[request.request_id] = search

    def close(self, request: Request) -> None:
        """Forgets a search."""
        self._searches.pop(request.request_id, None)

    def take(self, sequence: Sequence, candidates: Candidates) -> list[Hypothesis] | None:
        """Books the candidates of a beam that is computed whole; the best texts once the search is over."""
        request = sequence.request
        sequence.candidates = candidates
        beams = request.beams
        if sequence is beams[0]:
            self._roster.fork_beams(request)
        found = [beam.candidates for beam in beams if beam.candidates is not None]
        if len(found) < len(beams):
            return None
        for beam in beams:
            beam.candidates = None
        search = self._searches[request.request_id]
        continuations = search.advance([beam.token_ids for beam in beams], found)
        if search.is_over:
            return search.best(request.params.n)
        self._move(request, continuations)
        return None

    def check(self) -> None:
        """Asserts that searches and requests agree (for tests)."""
        requests = self._roster.requests
        assert self._searches.keys() == {key for key, request in requests.items() if request.beams}, "a search is lost"

    def _move(self, request: Request, continuations: list[Continuation]) -> None:
        """Makes the live beams those of the next step. A beam's best child stays in its place, blocks and all."""
        parents = request.beams
        heirs = {each.parent: place for place, each in reversed(list(enumerate(continuations)))}
        for place, parent in enumerate(parents):
            if place not in heirs:
                self._roster.rest_beam(parent)
        spare = [each for each in request.sequences if each.state is SequenceState.FORKING]
        beams = []
        for place, each in enumerate(continuations):
            beam = parents[each.parent]
            if heirs[each.parent] != place:
                beam = spare.pop(0)
                beam.token_ids = parents[each.parent].token_ids.copy()
                self._roster.fork_beam(parents[each.parent], beam, len(beam.token_ids))
            beams.append(beam)
        for beam, each in zip(beams, continuations, strict=True):
            beam.token_ids.append(each.token_id)
        request.beams = beams


def hypothesis_outputs(
    request: Request, hypotheses: list[Hypothesis], prompt_logprobs: tuple[PositionLogprobs, ...]
) -> list[SequenceOutput]:
    """What the choices of a request say: each in pieces that a message can carry, all sequences having ended."""
    piece = MAX_PIECE_TOKENS // (1 + (request.params.logprobs or 0))
    outputs = []
    for sequence, hypothesis in zip(request.sequences, hypotheses, strict=False):
        token_ids, ending = hypothesis.output_token_ids, hypothesis.ending
        told = request.prior[sequence.index] if request.prior else PriorOutput()
        if told.is_finished:
            continue
        num_told = len(told.token_ids)
        if token_ids[:num_told] != told.token_ids:
            # Another machine's numbers came to another text: nothing can follow what was told of that one.
            return [SequenceOutput(sequence, (), FinishReason.ERROR)]
        for start in range(num_told, max(len(token_ids), num_told + 1), piece):
            end = start + piece
            # A stop string is found once more where the text is made, and says so itself.
            is_last = end >= len(token_ids) and not ending.is_in_text
            outputs.append(
                SequenceOutput(
                    sequence,
                    token_ids[start:end],
                    ending.reason if is_last else None,
                    ending.stop_reason if is_last else "",
                    hypothesis.logprobs[start:end],
                    prompt_logprobs if sequence.index == 0 and start == num_told else (),
                )
            )
    # A vocabulary smaller than the beams has no more texts.
    for sequence in request.sequences[len(hypotheses) : request.params.n]:
        outputs.append(SequenceOutput(sequence, (), FinishReason.LENGTH))
    return outputs
