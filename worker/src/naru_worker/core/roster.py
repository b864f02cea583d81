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

    @property
    def has_place(self) -> bool:
        """Whether one more sequence may run."""
        return len(self.running) < self.max_num_seqs

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

    def preempt_last(self) -> Sequence:
        """Takes the blocks of the least important, newest running sequence; it waits again, in its old place."""
        sequence = self.running.pop()
        self._kv.free(sequence)
        sequence.num_preemptions += 1
        self._wait(sequence)
        return sequence

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
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
            self._kv.free(sequence)
        elif sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
            self.waiting_tokens -= sequence.num_waiting_tokens
        self.awaited.pop(sequence, None)
        sequence.state = SequenceState.FINISHED
        sequence.finish_reason = reason
        request = sequence.request
        for sibling in request.sequences[1:] if sequence.index == 0 else ():
            if sibling.state is SequenceState.FORKING:
                # There is no elder to wait for any more: it computes the prompt itself.
                self._wait(sibling)
        if request.is_finished:
            del self.requests[request.request_id]

    def check(self) -> None:
        """Asserts all invariants of queues and blocks (for tests: O(everything))."""
        self._kv.check(self.running)
        for sequence in self.running:
            assert sequence.state is SequenceState.RUNNING
            assert sequence.num_computed_tokens < len(sequence.token_ids)
            assert len(sequence.block_table) == self._kv.num_blocks_for(sequence.num_computed_tokens)
        for sequence in self.waiting:
            assert sequence.state is SequenceState.WAITING
            assert not sequence.block_table and not sequence.num_computed_tokens
        queued = {*self.running, *self.waiting}
        for request in self.requests.values():
            for sequence in request.sequences:
                assert (sequence in queued) == (sequence.state in {SequenceState.RUNNING, SequenceState.WAITING})
        assert self.waiting_tokens == sum(sequence.num_waiting_tokens for sequence in self.waiting)
        assert len(self.running) <= self.max_num_seqs
        assert self.awaited.keys() <= set(self.waiting)

    def _wait(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.WAITING
        num_cached = 0 if sequence.request.skip_prefix_cache else self._kv.match(sequence).num_tokens
        sequence.num_waiting_tokens = len(sequence.token_ids) - num_cached
        self.waiting_tokens += sequence.num_waiting_tokens
        self.waiting.add(sequence)
