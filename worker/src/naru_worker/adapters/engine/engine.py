"""One loaded model's engine: plan, run, commit, and text out. The engine loop owns it and calls it in its thread.

scheduler.plan ─► batch and sampling arrays ─► runner.run (no GIL) ─► scheduler.commit ─► text ─► deltas

A step may find that weights it needs are still being loaded: it is held, and the very same step is run again at the
next turn. Requests that come or are cancelled meanwhile go straight to the scheduler, whose `commit` ignores rows of
what was cancelled; a held step that nobody waits for any more is dropped. A runner that can launch a step before it has
given the last one's tokens is run by `StepsAhead`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from naru_proto.errors import InternalError, InvalidRequest, LoadError, NaruError, Overloaded, Unavailable
from naru_worker.adapters.engine.batch import BatchBuilder
from naru_worker.adapters.engine.deltas import Outbox, SequenceDelta
from naru_worker.adapters.engine.grammar_masks import MaskThread, begin_masks, end_masks
from naru_worker.adapters.engine.key_news import KeyNews
from naru_worker.adapters.engine.request_output import RequestOutput, is_stopped_by_text
from naru_worker.adapters.engine.sampling_rows import (
    SamplingBuilder,
    SequenceSampling,
    matchers_of,
    row_results,
    wanted_rows,
)
from naru_worker.adapters.engine.stats import EngineStats
from naru_worker.adapters.engine.steps_ahead import BuiltStep, StepsAhead, can_launch
from naru_worker.adapters.engine.token_table import TokenTable
from naru_worker.adapters.memory.kv_space import KVSpace
from naru_worker.adapters.ops.protocol import DeviceFault, Runner, RunnerOptions, WeightsPending
from naru_worker.core.kv_stats import KVStats
from naru_worker.core.memory_wait import MemoryWait
from naru_worker.core.request import FinishReason, Request, RequestId, Sequence, SequenceState
from naru_worker.core.scheduler import Scheduler
from naru_worker.core.step import RowResult, SequenceOutput, StepPlan
from naru_worker.core.step_budget import StepPace
from naru_worker.core.step_rates import StepRates

_log = logging.getLogger(__name__)

MEMORY_WAIT_S = 10.0
"""A request waits this long for KV memory that other models hold, while its own model can run nothing at all."""
WEIGHTS_WAIT_S = 0.03
"""A step waits this long for weights, at most: a request for another model may come meanwhile."""
PENDING_RETRY_S = 0.002
"""A held step is begun at most once in this time; the runner itself waits for weights a little."""


class ModelEngine:
    """One model's requests from submission to their last delta. Not thread-safe, but for `stats`."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        options: RunnerOptions,
        tokens: TokenTable,
        vocab_limit: int,
        clock: Callable[[], float] = time.monotonic,
        kv_space: KVSpace | None = None,
        memory_wait_s: float = MEMORY_WAIT_S,
        masks: MaskThread | None = None,
    ) -> None:
        """`vocab_limit`: ids at or above it are never drawn. `kv_space`: the growth of the scheduler's KV manager.
        `masks`: shared with other engines of the same engine thread.

        Raises:
            ValueError: the scheduler's KV manager was not made with `kv_space`.
        """
        self.stats = EngineStats(num_blocks=scheduler.kv.max_usable_blocks)
        self.kv_space = kv_space
        self.key_news = KeyNews()
        self._rates = StepRates()
        self._scheduler = scheduler
        self._runner = runner
        self._tokens = tokens
        self._clock = clock
        self._batches = BatchBuilder(options)
        self._samplings = SamplingBuilder(vocab_limit)
        self._masks = MaskThread() if masks is None else masks
        self._outputs: dict[RequestId, RequestOutput] = {}
        self._sampling: dict[Sequence, SequenceSampling] = {}
        self.steps_ahead = (
            StepsAhead(runner, scheduler, self._batches, self._samplings, self._sampling)
            if can_launch(runner)
            else None
        )
        """None: the runner computes while the engine waits."""
        self._held: BuiltStep | None = None
        self._held_until_s = 0.0
        self._is_put_off = False
        """A step was not begun, as its weights are still on their way and others have work."""
        self._memory_wait = MemoryWait(memory_wait_s)
        if kv_space is not None:
            kv_space.attach(scheduler.kv, self._refresh_stats)
        self._refresh_stats()

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything now: not before its time while weights or memory are on their way."""
        if self._held is not None or (self._is_put_off and self._scheduler.has_work):
            return self._clock() >= self._held_until_s
        if self.steps_ahead is not None and self.steps_ahead.is_busy:
            return True
        if self._memory_wait.is_waiting:
            return self._memory_wait.is_due(self._clock(), self._memory_version)
        return self._scheduler.has_work

    @property
    def wake_s(self) -> float | None:
        """When there will be work again though there is none now; None: not before a command comes."""
        if self._held is not None or (self._is_put_off and self._scheduler.has_work):
            return self._held_until_s
        return self._memory_wait.wake_s if self._memory_wait.is_waiting else None

    @property
    def kv_committed_bytes(self) -> int:
        """Bytes of the KV cache now; 0 where it neither grows nor shrinks. May be read from any thread."""
        return 0 if self.kv_space is None else self.kv_space.committed_bytes

    def queue_age_s(self) -> float:
        """How long ago the first of the waiting requests arrived; 0: none waits."""
        first = self._scheduler.first_waiting
        output = None if first is None else self._outputs.get(first.request_id)
        return 0.0 if output is None else self._clock() - output.arrived_s

    def trim_kv(self, num_bytes: int) -> int:
        """Gives up cached prefixes until so many bytes have come back; returns how many did. Engine thread only."""
        return 0 if self.kv_space is None else self.kv_space.trim(num_bytes)

    def submit(self, request: Request, arrived_s: float, outbox: Outbox) -> None:
        """Takes a request; what is wrong with it becomes its last delta."""
        try:
            output = RequestOutput(request, arrived_s, self._tokens)
            self._scheduler.add(request, output.new_stream() if request.beams else None)
        except Exception as exc:
            # The top of a submission: one odd request must not end the loop for all others.
            if not isinstance(exc, NaruError):
                _log.error("a request could not be taken", exc_info=exc)
            error = exc if isinstance(exc, NaruError) else InternalError(f"the request failed ({type(exc).__name__})")
            outbox.append(SequenceDelta(request.request_id, error=error, is_last=True))
            self._count_end("error")
            self.stats.num_taken += 1
            return
        self._outputs[request.request_id] = output
        eos = self._scheduler.config.eos_token_ids
        for sequence in request.sequences:
            self._sampling[sequence] = SequenceSampling(sequence, eos)
        self._refresh_stats()
        self.stats.num_taken += 1

    def cancel(self, request_id: RequestId, error: NaruError | None, outbox: Outbox) -> None:
        """Ends a request, as cancelled or with `error`; an unknown or finished one is ignored."""
        output = self._outputs.get(request_id)
        if output is None:
            return
        output.error = error
        self._deliver(self._scheduler.cancel(request_id), outbox)
        self._drop_held(outbox)
        self._memory_wait.hurry()
        self._refresh_stats()

    def step(self, outbox: Outbox, *, is_alone: bool = True, before_long: Callable[[], object] | None = None) -> None:
        """One step, which may wait for weights where it is alone. A fault ends its requests, and is not raised.

        `before_long` is called before one that does more than decode.

        Raises:
            DeviceFault: nothing more can be computed by this process.
        """
        started_s = self._clock()
        self._is_put_off = not is_alone and not self._runner.is_ready
        if self._is_put_off:
            # Layers computed now would be computed again when the rest is there, at the others' expense.
            self._held_until_s = started_s + PENDING_RETRY_S
            return
        self._runner.max_wait_s = WEIGHTS_WAIT_S
        built, self._held = self._held, None
        is_whole = built is None  # one that was held has waited for weights, and runs in pieces
        if built is None and self.steps_ahead is not None:
            built = self.steps_ahead.take()
        plan = None if built is None else built.plan
        try:
            if plan is None:
                plan = self._scheduler.plan(self._pace(is_alone=is_alone))
                if not plan.is_starved:
                    self._memory_wait.end()
                built = self._build(plan) if plan.rows else None
            if before_long is not None and not plan.is_decode:
                before_long()
            results = self._run(built, is_alone=is_alone) if built else ()
            outputs = [] if plan.is_starved else self._scheduler.commit(plan, results)
        except WeightsPending:
            self._held, self._held_until_s = built, started_s + PENDING_RETRY_S
            self._refresh_stats()
            return
        except DeviceFault:
            raise  # nothing more can be computed here: the loop ends, and the process with it
        except Exception as exc:
            # The top of a step: a fault must cost the requests of this step, not all of them. Should ending them fail
            # as well, that error goes up and ends the loop.
            outputs, is_whole = self._give_up(plan, exc), False
        self._deliver(outputs, outbox)
        if plan is not None and plan.is_starved:
            self._wait_for_memory(outbox)
        else:
            now_s = self._clock()
            self.stats.step_s.observe(now_s - started_s)
            if plan is not None and is_whole:
                self._measure(plan, now_s - started_s)
            if self.kv_space is not None:
                self.kv_space.last_used_s = now_s
        self._refresh_stats()

    def rest(self) -> None:
        """Drops what buffers still hold of ended sequences."""
        self._batches.forget()
        self._samplings.forget()

    def kv_stats(self) -> KVStats:
        """Blocks and slots of this instant; O(blocks in use). Engine thread only."""
        return self._scheduler.kv_stats()

    @property
    def _memory_version(self) -> int:
        return 0 if self.kv_space is None else self.kv_space.memory_version

    def _build(self, plan: StepPlan) -> BuiltStep:
        wanted, indices = wanted_rows(plan, self._sampling)
        sampling = self._samplings.build(wanted)
        masks = None
        if sampling.masks is not None:
            masks = begin_masks(self._masks, matchers_of(wanted), sampling.masks)
        return BuiltStep(plan, wanted, self._batches.build(plan, indices), sampling, masks)

    def _run(self, built: BuiltStep, *, is_alone: bool) -> list[RowResult]:
        if self.steps_ahead is None:
            output = self._runner.run(built.batch, built.sampling)
        else:
            output = self.steps_ahead.run(built, is_alone=is_alone)
        results = row_results(built.plan, built.wanted, output)
        if built.masks is None:
            return results
        is_done = built.masks.is_done
        if not is_done:
            self._samplings.forget()  # its masks are still written to
        return end_masks(built.masks, built.plan, results, is_done=is_done)

    def _drop_held(self, outbox: Outbox) -> None:
        """Gives up a held step when all its requests were cancelled: its weights may never come."""
        if self._held is None:
            return
        plan = self._held.plan
        if all(row.sequence.state is SequenceState.FINISHED for row in plan.rows):
            self._held = None
            self._deliver(self._scheduler.fail_step(plan), outbox)

    def _wait_for_memory(self, outbox: Outbox) -> None:
        """Nothing can run until other models let go of memory; the first request ends when it has waited too long."""
        now_s = self._clock()
        self._memory_wait.begin(now_s, self._memory_version)
        first = self._scheduler.first_waiting
        assert first is not None, "a plan is starved only while somebody waits"
        if self._memory_wait.is_over(now_s, self._outputs[first.request_id].arrived_s):
            error = Overloaded(
                f"other models held the KV memory that this request needs for {self._memory_wait.limit_s:g} s; "
                "try again later"
            )
            self.cancel(first.request_id, error, outbox)

    def _give_up(self, plan: StepPlan | None, exc: Exception) -> list[SequenceOutput]:
        """Ends the requests of a failed step, or all of them when it could not even be planned."""
        self.stats.num_failed_steps += 1
        _log.error("a step failed", exc_info=exc)
        name = type(exc).__name__
        error: NaruError = InternalError(f"a step of the engine failed ({name}); the worker's log has the reason")
        if isinstance(exc, (LoadError, Unavailable)):
            error = exc  # the load died: its own words say why
        self.rest()
        if plan is None:
            hit: Iterable[RequestId] = tuple(self._outputs)
        else:
            hit = dict.fromkeys(row.sequence.request.request_id for row in plan.rows)
        for request_id in hit:
            # A row of a held step may belong to a request that was cancelled meanwhile.
            output = self._outputs.get(request_id)
            if output is not None:
                output.error = error
        return self._scheduler.fail(hit) if plan is None else self._scheduler.fail_step(plan)

    def _deliver(self, outputs: Iterable[SequenceOutput], outbox: Outbox) -> None:
        now_s = self._clock()
        for output in outputs:
            request_id = output.sequence.request.request_id
            request_output = self._outputs.get(request_id)
            if request_output is None:
                continue
            try:
                delta = self._delta(request_output, output, now_s)
            except Exception as exc:
                # The top of one request's output: text that cannot be made must not hit the others of the step.
                _log.error("output of a request failed", exc_info=exc)
                self._scheduler.fail((request_id,))
                delta = request_output.fail(InternalError(f"its output could not be made ({type(exc).__name__})"))
            outbox.append(delta)
            if request_output.is_done:
                self._forget(request_output, delta, now_s)

    def _delta(self, request_output: RequestOutput, output: SequenceOutput, now_s: float) -> SequenceDelta:
        if output.finish_reason is FinishReason.ERROR or request_output.error is not None:
            error = request_output.error or _no_token(request_output.request)
            self._scheduler.fail((request_output.request.request_id,))
            return request_output.fail(error)
        if not request_output.is_begun:
            self.stats.prompt_tokens += output.sequence.num_prompt_tokens
        delta = request_output.push(output)
        if is_stopped_by_text(output, delta):
            num_unseen = len(output.new_token_ids) - len(delta.token_ids)
            self._scheduler.finish_sequence(output.sequence, FinishReason.STOP, num_unseen)
        if delta.token_ids:
            last_s = request_output.last_token_s[delta.index]
            delta.is_first = not last_s
            if last_s:
                if not output.sequence.request.beams:  # its answer comes at once, be it in pieces
                    self.stats.itl_s.observe(now_s - last_s)
            elif delta.index == 0:
                self.stats.ttft_s.observe(now_s - request_output.arrived_s)
            request_output.last_token_s[delta.index] = now_s
        return delta

    def _forget(self, request_output: RequestOutput, delta: SequenceDelta, now_s: float) -> None:
        request = request_output.request
        del self._outputs[request.request_id]
        for sequence in request.sequences:
            del self._sampling[sequence]
        first = request.sequences[0].finish_reason
        self._count_end("error" if delta.error is not None or first is None else first.value)
        self.stats.e2e_s.observe(now_s - request_output.arrived_s)

    def _count_end(self, reason: str) -> None:
        self.stats.finished[reason] = self.stats.finished.get(reason, 0) + 1

    def _pace(self, *, is_alone: bool) -> StepPace:
        return StepPace(self._rates.prefill_tokens_per_s, self._rates.decode_step_s, is_shared=not is_alone)

    def _measure(self, plan: StepPlan, step_s: float) -> None:
        num_prefill, num_decodes = 0, len(plan.rows)
        if not plan.is_decode:
            num_prefill = sum(row.num_tokens for row in plan.rows if row.num_known_tokens > 1 or row.is_prompt)
            num_decodes = sum(1 for row in plan.rows if row.num_known_tokens == 1 and not row.is_prompt)
        self._rates.observe(num_prefill, num_decodes, step_s)
        if self._scheduler.speculation is not None and not num_prefill:
            self._scheduler.speculation.costs.observe(plan.num_tokens, step_s)

    def _refresh_stats(self) -> None:
        """Copies the numbers others may read; a dozen assignments, so that nobody has to ask this thread for them."""
        stats, scheduler, counters = self.stats, self._scheduler, self._scheduler.counters
        stats.num_running = scheduler.num_running
        stats.num_waiting = scheduler.num_waiting
        kv = scheduler.kv
        stats.num_free_blocks = kv.max_usable_blocks - kv.num_usable_blocks + kv.num_free_blocks
        stats.num_steps = counters.num_steps
        stats.num_preemptions = counters.num_preemptions
        stats.prefix_query_tokens = counters.prefix_query_tokens
        stats.prefix_hit_tokens = counters.prefix_hit_tokens
        stats.prefilled_tokens = counters.prefilled_tokens
        stats.generated_tokens = counters.generated_tokens
        stats.drafted_tokens = counters.drafted_tokens
        stats.accepted_tokens = counters.accepted_tokens
        stats.draft_reasons = counters.draft_reasons
        stats.num_waiting_tokens = scheduler.num_waiting_tokens
        stats.prefill_tokens_per_s = self._rates.prefill_tokens_per_s
        stats.decode_step_s = self._rates.decode_step_s
        if kv.cache.marks.has_changes:
            self.key_news.put(kv.cache.marks.take())
        if not scheduler.has_work:
            self._memory_wait.end()
        if self.kv_space is not None:
            self._refresh_space(self.kv_space)

    def _refresh_space(self, space: KVSpace) -> None:
        stats = self.stats
        stats.kv_committed_bytes = space.committed_bytes
        stats.num_kv_grows, stats.num_kv_shrinks = space.num_grows, space.num_shrinks
        space.is_busy = self._scheduler.num_requests > 0
        space.is_frozen = self._held is not None


def _no_token(request: Request) -> NaruError:
    """Why a sequence of a request that went well so far has no next token."""
    for matcher in request.matchers:
        if matcher.failure:
            return InvalidRequest(f"the text cannot go on: {matcher.failure}", param=matcher.param)
    return InternalError("the model gave no token for it; ask again")
