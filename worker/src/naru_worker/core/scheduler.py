"""Decides, step by step, which tokens of which sequences one model computes, and books what came out.

Called by the engine loop: ``plan``, run, then ``commit`` (or ``fail_step``), one after the other; requests come and go
in between. There are no phases: a sequence misses some tokens, a step has a budget of tokens, and a decode is a
sequence that misses one. When blocks run out, the least important and newest sequence gives back its own and is
computed again later (mostly from the prefix cache). It touches no tensor, no clock and no thread.
"""

from __future__ import annotations

import collections.abc

from naru_proto.errors import InternalError, InvalidRequest
from naru_worker.core.ahead import Ahead, NotAhead, plan_ahead
from naru_worker.core.beams import Beams, hypothesis_outputs
from naru_worker.core.kv_manager import KVManager
from naru_worker.core.kv_stats import KVStats
from naru_worker.core.output_text import OutputStream
from naru_worker.core.planner import Planner
from naru_worker.core.prompt_logprobs import PromptLogprobs
from naru_worker.core.request import FinishReason, Request, RequestId, Sequence, SequenceState
from naru_worker.core.request_check import check_request
from naru_worker.core.roster import Roster
from naru_worker.core.scheduler_config import SchedulerConfig
from naru_worker.core.scheduler_counters import SchedulerCounters
from naru_worker.core.speculation import Speculation
from naru_worker.core.step import Row, RowResult, SequenceOutput, StepPlan
from naru_worker.core.step_budget import StepPace
from naru_worker.core.stop_check import check_stop
from naru_worker.core.token_matcher import MatchState


class Scheduler:
    """Running and waiting sequences of one model, and the KV blocks they hold. One thread at a time."""

    def __init__(self, config: SchedulerConfig, kv: KVManager) -> None:
        self.config = config
        self.kv = kv
        self.counters = SchedulerCounters()
        self._prompt_logprobs = PromptLogprobs()
        self._roster = Roster(config.max_num_seqs, kv)
        self._beams = Beams(config, kv, self._roster)
        self.speculation = Speculation(config, kv, self.counters) if config.max_draft_tokens else None
        self._planner = Planner(config, kv, self._roster, self._prompt_logprobs, self.counters, self.speculation)
        self._eos_token_ids = frozenset(config.eos_token_ids)

    # --- requests come and go --------------------------------------------------------------------------------------

    def add(self, request: Request, stream: OutputStream | None = None) -> None:
        """Takes a request in. `stream`: an unused one, by which a beam search obeys stop strings.

        Raises:
            InvalidRequest: empty prompt, an id outside the vocabulary, or a request id that is alive already.
            ContextLengthExceeded: it can never fit the model or the KV pool.
        """
        if request.request_id in self._roster.requests:
            raise InvalidRequest(
                f"request id {request.request_id!r} is in use; wait for its end or choose another", param="request_id"
            )
        check_request(request, self.config, self.kv)
        self._prompt_logprobs.open(request)
        self._beams.open(request, stream)
        self._roster.add(request)

    def cancel(self, request_id: RequestId) -> list[SequenceOutput]:
        """Ends all unfinished sequences of a request, in any state; an unknown id gives an empty list."""
        return self._end_request(request_id, FinishReason.CANCELLED)

    def fail(self, request_ids: collections.abc.Iterable[RequestId]) -> list[SequenceOutput]:
        """Ends requests that an error has hit; their blocks come back and nothing of the failed step is published."""
        return [output for request_id in request_ids for output in self._end_request(request_id, FinishReason.ERROR)]

    def fail_step(self, plan: StepPlan) -> list[SequenceOutput]:
        """In place of `commit` when a step could not be run: ends every request that had a row in it."""
        self.kv.forget_copies()
        outputs = [SequenceOutput(sequence, (), sequence.finish_reason) for sequence in plan.ended]
        return outputs + self.fail(dict.fromkeys(row.sequence.request.request_id for row in plan.rows))

    def finish_sequence(self, sequence: Sequence, reason: FinishReason, num_unseen: int = 0) -> bool:
        """Ends one sequence from outside: a stop string was found in its text. Call it before the next `plan`.

        Nothing beyond the stop is ever cached. `num_unseen`: its newest tokens that come after the stop, and do not
        count. False: it had ended already.
        """
        self.counters.generated_tokens -= num_unseen
        if sequence.state is SequenceState.FINISHED or sequence.request.beams:
            return False  # a beam search has found the stop string itself
        self._end(sequence, reason)
        return True

    def reset(self) -> list[SequenceOutput]:
        """Ends all requests as cancelled and forgets the prefix cache: the weights have changed."""
        outputs = [output for request_id in list(self._roster.requests) for output in self.cancel(request_id)]
        self.kv.reset()
        return outputs

    # --- what there is ---------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """True while a call of `plan` would give rows or end a sequence, unless it is starved of memory."""
        return bool(self._roster.running) or bool(self._roster.waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._roster.running)

    @property
    def num_waiting(self) -> int:
        """Sequences ready to run that hold nothing."""
        return len(self._roster.waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of all prompts that are neither cached nor computed yet; what is cached is judged as they come."""
        missing = (len(s.token_ids) - s.num_computed_tokens for s in self._roster.running)
        return self._roster.waiting_tokens + sum(num for num in missing if num > 1)

    @property
    def first_waiting(self) -> Request | None:
        """Whose sequence is let in next."""
        waiting = self._roster.waiting
        return waiting[0].request if waiting else None

    @property
    def num_requests(self) -> int:
        """Requests with an unfinished sequence."""
        return len(self._roster.requests)

    def kv_stats(self) -> KVStats:
        """Blocks and slots of this instant; O(blocks in use)."""
        return self.kv.stats(self._roster.running)

    def check(self) -> None:
        """Asserts all invariants of blocks and queues (for tests: O(everything))."""
        self._roster.check()
        self._beams.check()
        assert len(self._prompt_logprobs) <= len(self._roster.requests), "prompt logprobs of a request that is gone"

    # --- a step ----------------------------------------------------------------------------------------------------

    def plan(self, pace: StepPace | None = None) -> StepPlan:
        """What the next step computes, cut to `pace` where there is one.

        Rows are empty only without work, when all of it ended, or when starved.
        """
        return self._planner.plan(pace)

    def plan_ahead(self, plan: StepPlan) -> Ahead | NotAhead:
        """The step behind `plan`, which is launched and not committed, as far as it is sure; or why none is.

        Its rows get their blocks. Once it is launched set `kv.is_in_flight`, call no `plan`, and commit it next, after
        `plan`: rows of what ended meanwhile are ignored. Else call `forgo`.
        """
        return plan_ahead(plan, self._roster, self.kv, self.config)

    def forgo(self, ahead: Ahead) -> None:
        """Takes a step back that could not be launched ahead."""
        for row in ahead.plan.rows:
            self.kv.trim(row.sequence, 1)

    def commit(self, plan: StepPlan, results: collections.abc.Sequence[RowResult]) -> list[SequenceOutput]:
        """Books a step that was run: `results` has one item per row of `plan`.

        Gives what each sequence gained or how it ended, sequences ended by the planner first. Rows of sequences that
        were cancelled in between are ignored.
        """
        if len(results) != len(plan.rows):
            raise InternalError(f"the runner gave {len(results)} results for {len(plan.rows)} rows; this is a fault")
        self.counters.num_steps += 1
        self.kv.forget_copies()
        outputs = [SequenceOutput(sequence, (), sequence.finish_reason) for sequence in plan.ended]
        for row, result in zip(plan.rows, results, strict=True):
            if row.sequence.state is SequenceState.RUNNING:
                outputs += self._commit_row(row, result)
        return outputs

    # --- committing ------------------------------------------------------------------------------------------------

    def _commit_row(self, row: Row, result: RowResult) -> list[SequenceOutput]:
        sequence = row.sequence
        request = sequence.request
        if row.samples and result.token_id is None:
            return self._end_request(request.request_id, FinishReason.ERROR)
        if row.drafts:
            return self._accept(row, result)
        if row.num_tokens > 1:
            self.counters.prefilled_tokens += row.num_tokens
        sequence.num_computed_tokens = row.start + row.num_tokens
        self._publish(row, sequence.num_computed_tokens)
        if sequence.index == 0:
            self._prompt_logprobs.collect(row, result)
            if sequence.num_computed_tokens == sequence.num_prompt_tokens and not request.beams:
                self._roster.fork_siblings(sequence)
        if row.samples:
            return self._search(sequence, result) if request.beams else self._append(sequence, result)
        if request.params.max_tokens == 0 and sequence.num_computed_tokens == sequence.num_prompt_tokens:
            if request.wants_hidden and result.hidden is None:
                return self._end_request(request.request_id, FinishReason.ERROR)
            return self._end_request(request.request_id, FinishReason.LENGTH, result.hidden)
        return []

    def _append(self, sequence: Sequence, result: RowResult) -> list[SequenceOutput]:
        assert result.token_id is not None, "checked before"
        sequence.token_ids.append(result.token_id)
        self.counters.generated_tokens += 1
        reason, stop_reason = check_stop(sequence, self._eos_token_ids, self.config.max_model_len)
        is_complete = False
        if sequence.matcher is not None and reason is not FinishReason.STOP:
            match = sequence.matcher.advance(result.token_id)
            if match is MatchState.FAILED:
                return self._end_request(sequence.request.request_id, FinishReason.ERROR)
            if match is not MatchState.OPEN:
                reason, is_complete = FinishReason.STOP, match is MatchState.COMPLETE
        prompt_logprobs = self._prompt_logprobs.take(sequence)
        if reason is not None:
            self._end(sequence, reason)
        logprobs = () if result.logprobs is None else (result.logprobs,)
        output = SequenceOutput(
            sequence, (result.token_id,), reason, stop_reason, logprobs, prompt_logprobs, is_complete=is_complete
        )
        return [output]

    def _accept(self, row: Row, result: RowResult) -> list[SequenceOutput]:
        """Books a row with drafts: its tokens up to the first one that a wrong guess does not precede."""
        sequence, drafts = row.sequence, row.drafts
        drawn = (result, *result.drafted)
        if len(drawn) != row.num_tokens - row.num_known_tokens + 1:
            raise InternalError(f"the runner gave {len(drawn) - 1} results for {len(drafts)} drafts; this is a fault")
        new: list[int] = []
        for each in drawn:
            if each.token_id is None:
                return self._end_request(sequence.request.request_id, FinishReason.ERROR)
            sequence.token_ids.append(each.token_id)
            new.append(each.token_id)
            reason, stop_reason = check_stop(sequence, self._eos_token_ids, self.config.max_model_len)
            if reason is not None or len(new) > len(drafts) or each.token_id != drafts[len(new) - 1]:
                break
        num_known = row.start + row.num_known_tokens
        sequence.num_computed_tokens = num_known + len(new) - 1
        self.counters.generated_tokens += len(new)
        self.counters.accepted_tokens += len(new) - 1
        # A stop string may turn out to end before the newest tokens: then their blocks wait for the next step.
        self._publish(row, num_known if sequence.request.params.stop else sequence.num_computed_tokens)
        self.kv.trim(sequence)
        prompt_logprobs = self._prompt_logprobs.take(sequence)
        if reason is not None:
            self._end(sequence, reason)
        logprobs = tuple(each.logprobs for each in drawn[: len(new)] if each.logprobs is not None)
        return [SequenceOutput(sequence, tuple(new), reason, stop_reason, logprobs, prompt_logprobs)]

    def _publish(self, row: Row, num_final: int) -> None:
        waited = self.config.max_draft_tokens if row.sequence.request.params.stop else 0
        self.kv.publish(row.sequence, max(0, row.start - waited), num_final)

    def _search(self, sequence: Sequence, result: RowResult) -> list[SequenceOutput]:
        """Nothing comes out of a beam search before its end."""
        request = sequence.request
        if result.candidates is None:
            return self._end_request(request.request_id, FinishReason.ERROR)
        hypotheses = self._beams.take(sequence, result.candidates)
        if hypotheses is None:
            return []
        prompt_logprobs = self._prompt_logprobs.take(request.sequences[0])
        reasons = [each.ending.reason for each in hypotheses]
        for index, each in enumerate(request.sequences):
            self._end(each, reasons[index] if index < len(reasons) else FinishReason.LENGTH)
        self.counters.generated_tokens += sum(len(each.output_token_ids) for each in hypotheses)
        return hypothesis_outputs(request, hypotheses, prompt_logprobs)

    # --- ending ----------------------------------------------------------------------------------------------------

    def _end_request(self, request_id: RequestId, reason: FinishReason, hidden: object = None) -> list[SequenceOutput]:
        request = self._roster.requests.get(request_id)
        if request is None:
            return []
        outputs = []
        for sequence in request.sequences:
            if sequence.state is not SequenceState.FINISHED:
                prompt_logprobs = self._prompt_logprobs.take(sequence) if reason is FinishReason.LENGTH else ()
                self._end(sequence, reason)
                if sequence.index >= request.params.n:
                    continue  # a beam that is no choice
                outputs.append(SequenceOutput(sequence, (), reason, prompt_logprobs=prompt_logprobs, hidden=hidden))
        return outputs

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        self._roster.end(sequence, reason)
        if sequence.request.is_finished:
            self._prompt_logprobs.close(sequence.request)
            self._beams.close(sequence.request)
