"""Which sequences run, which wait, and every change between the two; blocks are taken and given back along with it.

Used by the scheduler and its planner: a sequence changes its state here and nowhere else.
"""

from __future__ import annotations

from naru_worker.core.kv_manager import KVManager
from naru_worker.core.request import FinishReason, Request, RequestId, Sequence, SequenceState
from naru_worker.core.sequence_queue import SequenceQueue


class Roster:
    """Requests alive, and their sequences by state. Only running sequences hold blocks."""

    def __init__(self, max_num_seqs: int, kv: KVManager) -> None:
        self.requests: dict[RequestId, Request] = {}
        self.running = SequenceQueue()
        self.waiting = SequenceQueue()
        self.awaited: dict[Sequence, bytes] = {}
        """Waiting sequences whose next block is being computed by a running one, and that block's hash."""
        self.waiting_tokens = 0
        """Tokens of waiting sequences that were not cached when they began to wait."""
        self.max_num_seqs = max_num_seqs
        self._kv = kv
        self._searches: set[Request] = set()
        """Requests that run a beam search: each has places for all its beams."""
        self._num_kept_places = 0
        """Of these places, those that no beam takes now."""

    @property
    def has_place(self) -> bool:
        """Whether one more sequence may run."""
        return len(self.running) + self._num_kept_places < self.max_num_seqs

    def has_places_for(self, request: Request) -> bool:
        """Whether a waiting sequence of this request may run, all its beams beside it."""
        num_places = request.params.num_sequences if request.beams else 1
        return len(self.running) + self._num_kept_places + num_places <= self.max_num_seqs

    def add(self, request: Request) -> None:
        """Takes in a request; its first sequence waits, or all that go on with prior output."""
        self.requests[request.request_id] = request
        for sequence in request.sequences:
            if sequence.state is SequenceState.WAITING:
                self._wait(sequence)

    def start(self, index: int) -> None:
        """Lets the waiting sequence at `index` run; the KV manager has admitted it."""
        sequence = self.waiting.pop(index)
        self.waiting_tokens -= sequence.num_waiting_tokens
        sequence.state = SequenceState.RUNNING
        self.running.add(sequence)
        if sequence.request.beams:
            self._searches.add(sequence.request)
            self._num_kept_places += len(sequence.request.sequences) - 1

    def preempt_last(self) -> list[Sequence]:
        """Takes the blocks of the least important, newest running sequence; it waits again, in its old place.

        With a beam all beams of its request go. The first of them waits, the others wait for it.
        """
        sequence = self.running.pop()
        victims = [sequence]
        request = sequence.request
        if not request.beams:
            self._give_up_blocks(sequence)
            self._wait(sequence)
            return victims
        while self.running and self.running[-1].request is request:
            victims.append(self.running.pop())
        for victim in victims:
            self._give_up_blocks(victim)
            victim.state = SequenceState.FORKING
        self._searches.remove(request)
        self._num_kept_places -= len(request.sequences) - len(victims)
        self._wait(request.beams[0])
        return victims

    def fork_beams(self, request: Request) -> None:
        """Gives live beams without blocks what they have in common with the first one, which is computed whole."""
        elder = request.beams[0]
        for sibling in request.beams[1:]:
            if sibling.state is SequenceState.FORKING:
                pairs = zip(elder.token_ids, sibling.token_ids, strict=True)
                num_common = next(place for place, (one, other) in enumerate(pairs) if one != other)
                self.fork_beam(elder, sibling, num_common)

    def fork_beam(self, elder: Sequence, sibling: Sequence, num_tokens: int) -> None:
        """Lets a beam run from the elder's first `num_tokens` computed tokens on, in a place kept for it."""
        self._kv.fork(elder, sibling, num_tokens)
        sibling.state = SequenceState.RUNNING
        self.running.add(sibling)
        self._num_kept_places -= 1

    def rest_beam(self, sequence: Sequence) -> None:
        """Takes a running beam's blocks: nothing continues it. Its place is kept."""
        self.running.remove(sequence)
        self._kv.free(sequence)
        sequence.state = SequenceState.FORKING
        self._num_kept_places += 1

    def fork_siblings(self, elder: Sequence) -> None:
        """Gives the other choices the prompt their elder has just computed, all but its last token."""
        for sibling in elder.request.sequences[1:]:
            if sibling.state is not SequenceState.FORKING:
                continue
            if self.has_place:
                self._kv.fork(elder, sibling, elder.num_prompt_tokens - 1)
                sibling.state = SequenceState.RUNNING
                self.running.add(sibling)
            else:
                # No place to run: it holds nothing and finds what is still cached when its turn comes.
                self._wait(sibling)

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        """Finishes a sequence in whatever state it is, and its request with the last one."""
        request = sequence.request
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
            self._kv.free(sequence)
            self._num_kept_places += 1 if request.beams else 0
        elif sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
            self.waiting_tokens -= sequence.num_waiting_tokens
        self.awaited.pop(sequence, None)
        sequence.state = SequenceState.FINISHED
        sequence.finish_reason = reason
        sequence.candidates = None
        sequence.draft_source = None
        for sibling in request.sequences[1:] if sequence.index == 0 and not request.beams else ():
            if sibling.state is SequenceState.FORKING:
                # There is no elder to wait for any more: it computes the prompt itself.
                self._wait(sibling)
        if request.is_finished:
            del self.requests[request.request_id]
            if request in self._searches:
                self._searches.remove(request)
                self._num_kept_places -= len(request.sequences)

    def check(self) -> None:
        """Asserts all invariants of queues and blocks (for tests: O(everything))."""
        self._kv.check(self.running)
        for sequence in self.running:
            assert sequence.state is SequenceState.RUNNING
            is_whole = sequence.candidates is not None
            assert sequence.num_computed_tokens < len(sequence.token_ids) + is_whole
            num_spare = len(sequence.block_table) - self._kv.num_blocks_for(sequence.num_computed_tokens)
            assert 0 <= num_spare <= self._kv.is_in_flight, "one more token may be computed already"
        for sequence in self.waiting:
            assert sequence.state is SequenceState.WAITING
            assert not sequence.block_table and not sequence.num_computed_tokens
        queued = {*self.running, *self.waiting}
        for request in self.requests.values():
            for sequence in request.sequences:
                assert (sequence in queued) == (sequence.state in {SequenceState.RUNNING, SequenceState.WAITING})
        assert self.waiting_tokens == sum(sequence.num_waiting_tokens for sequence in self.waiting)
        assert len(self.running) + self._num_kept_places <= self.max_num_seqs
        assert self.awaited.keys() <= set(self.waiting)
        self._check_beams()

    def _check_beams(self) -> None:
        num_kept_places = 0
        for request in self.requests.values():
            if not request.beams:
                assert request not in self._searches
                continue
            first, *others = (beam.state for beam in request.beams)
            num_running = sum(each.state is SequenceState.RUNNING for each in request.sequences)
            assert (request in self._searches) == (first is SequenceState.RUNNING)
            assert first in {SequenceState.RUNNING, SequenceState.WAITING}
            assert set(others) <= {first if num_running > 1 else SequenceState.FORKING}, "beams out of step"
            assert len({len(beam.token_ids) for beam in request.beams}) == 1, "beams of different lengths"
            assert len({tuple(beam.token_ids) for beam in request.beams}) == len(request.beams), "a beam comes twice"
            for each in request.sequences:
                is_live = each in request.beams
                assert is_live or (each.state is SequenceState.FORKING and not each.block_table), "a dead beam lives"
                assert each.candidates is None or each.num_missing_tokens == 0, "candidates of what is not computed"
            if request in self._searches:
                num_kept_places += len(request.sequences) - num_running
        assert num_kept_places == self._num_kept_places
        assert self._searches <= set(self.requests.values()), "places are kept for nobody"

    def _give_up_blocks(self, sequence: Sequence) -> None:
        self._kv.free(sequence)
        sequence.num_preemptions += 1
        sequence.candidates = None

    def _wait(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.WAITING
        num_cached = 0 if sequence.request.skip_prefix_cache else self._kv.match(sequence).num_tokens
        sequence.num_waiting_tokens = len(sequence.token_ids) - num_cached
        self.waiting_tokens += sequence.num_waiting_tokens
        self.waiting.add(sequence)
