"""One loaded model's engine: plan, run, commit, and text out. The engine loop owns it and calls it in its thread.

scheduler.plan ─► batch and sampling arrays ─► runner.run (no GIL) ─► scheduler.commit ─► text ─► deltas
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from naru_proto.errors import InternalError, NaruError
from naru_worker.adapters.engine.batch import BatchBuilder
from naru_worker.adapters.engine.deltas import Outbox, SequenceDelta
from naru_worker.adapters.engine.request_output import RequestOutput, is_stopped_by_text
from naru_worker.adapters.engine.sampling_rows import SamplingBuilder, SequenceSampling, row_results, wanted_rows
from naru_worker.adapters.engine.stats import EngineStats
from naru_worker.adapters.engine.token_table import TokenTable
from naru_worker.adapters.ops.protocol import Runner, RunnerOptions
from naru_worker.core.kv_stats import KVStats
from naru_worker.core.request import FinishReason, Request, RequestId, Sequence
from naru_worker.core.scheduler import Scheduler
from naru_worker.core.step import RowResult, SequenceOutput, StepPlan

_log = logging.getLogger(__name__)


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
    ) -> None:
        """`vocab_limit`: ids at or above it are never drawn."""
        self.stats = EngineStats(num_blocks=scheduler.kv.num_usable_blocks)
        self._scheduler = scheduler
        self._runner = runner
        self._tokens = tokens
        self._clock = clock
        self._batches = BatchBuilder(options)
        self._samplings = SamplingBuilder(vocab_limit)
        self._outputs: dict[RequestId, RequestOutput] = {}
        self._sampling: dict[Sequence, SequenceSampling] = {}
        self._refresh_stats()

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self._scheduler.has_work

    def submit(self, request: Request, arrived_s: float, outbox: Outbox) -> None:
        """Takes a request; what is wrong with it becomes its last delta."""
        try:
            output = RequestOutput(request, arrived_s, self._tokens)
            self._scheduler.add(request)
        except Exception as exc:
            # The top of a submission: one odd request must not end the loop for all others.
            if not isinstance(exc, NaruError):
                _log.error("a request could not be taken", exc_info=exc)
            error = exc if isinstance(exc, NaruError) else InternalError(f"the request failed ({type(exc).__name__})")
            outbox.append(SequenceDelta(request.request_id, error=error, is_last=True))
            self._count_end("error")
            return
        self._outputs[request.request_id] = output
        eos = self._scheduler.config.eos_token_ids
        for sequence in request.sequences:
            self._sampling[sequence] = SequenceSampling(sequence, eos)
        self.stats.num_waiting = self._scheduler.num_waiting

    def cancel(self, request_id: RequestId, error: NaruError | None, outbox: Outbox) -> None:
        """Ends a request, as cancelled or with `error`; an unknown or finished one is ignored."""
        output = self._outputs.get(request_id)
        if output is None:
            return
        output.error = error
        self._deliver(self._scheduler.cancel(request_id), outbox)
        self._refresh_stats()

    def step(self, outbox: Outbox) -> None:
        """One step. A fault in it ends the requests of that step, and is not raised."""
        started_s = self._clock()
        plan: StepPlan | None = None
        try:
            plan = self._scheduler.plan()
            outputs = self._scheduler.commit(plan, self._run(plan) if plan.rows else ())
        except Exception as exc:
            # The top of a step: a fault must cost the requests of this step, not all of them. Should ending them fail
            # as well, that error goes up and ends the loop.
            outputs = self._give_up(plan, exc)
        self._deliver(outputs, outbox)
        self._refresh_stats()
        self.stats.step_s.observe(self._clock() - started_s)

    def rest(self) -> None:
        """Drops what buffers still hold of ended sequences."""
        self._batches.forget()
        self._samplings.forget()

    def kv_stats(self) -> KVStats:
        """Blocks and slots of this instant; O(blocks in use). Engine thread only."""
        return self._scheduler.kv_stats()

    def _run(self, plan: StepPlan) -> list[RowResult]:
        wanted, indices = wanted_rows(plan, self._sampling)
        batch = self._batches.build(plan, indices)
        return row_results(plan, wanted, self._runner.run(batch, self._samplings.build(wanted)))

    def _give_up(self, plan: StepPlan | None, exc: Exception) -> list[SequenceOutput]:
        """Ends the requests of a failed step, or all of them when it could not even be planned."""
        self.stats.num_failed_steps += 1
        _log.error("a step failed", exc_info=exc)
        error = InternalError(f"a step of the engine failed ({type(exc).__name__}); the worker's log has the reason")
        self.rest()
        if plan is None:
            hit: Iterable[RequestId] = tuple(self._outputs)
        else:
            hit = dict.fromkeys(row.sequence.request.request_id for row in plan.rows)
        for request_id in hit:
            self._outputs[request_id].error = error
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
            error = request_output.error or InternalError("the model gave no token for it; ask again")
            self._scheduler.fail((request_output.request.request_id,))
            return request_output.fail(error)
        if not request_output.is_begun:
            self.stats.prompt_tokens += output.sequence.num_prompt_tokens
        delta = request_output.push(output)
        if is_stopped_by_text(output, delta):
            self._scheduler.finish_sequence(output.sequence, FinishReason.STOP)
        if delta.token_ids:
            last_s = request_output.last_token_s[delta.index]
            if last_s:
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

    def _refresh_stats(self) -> None:
        """Copies the numbers others may read; a dozen assignments, so that nobody has to ask this thread for them."""
        stats, scheduler, counters = self.stats, self._scheduler, self._scheduler.counters
        stats.num_running = scheduler.num_running
        stats.num_waiting = scheduler.num_waiting
        stats.num_free_blocks = scheduler.kv.num_free_blocks
        stats.num_steps = counters.num_steps
        stats.num_preemptions = counters.num_preemptions
        stats.prefix_query_tokens = counters.prefix_query_tokens
        stats.prefix_hit_tokens = counters.prefix_hit_tokens
        stats.prefilled_tokens = counters.prefilled_tokens
        stats.generated_tokens = counters.generated_tokens
