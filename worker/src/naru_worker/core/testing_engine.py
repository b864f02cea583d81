"""An engine loop around the pretend model: one call a step, invariants checked after each.

Used by tests. The real loop does the same with a runner and a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from naru_worker.core.kv_growth import KVGrowth
from naru_worker.core.kv_manager import KVManager
from naru_worker.core.prompt_marks import NO_MARKS, PromptMarks
from naru_worker.core.request import FinishReason, Request, RequestId, Sequence
from naru_worker.core.sampling import SamplingParams
from naru_worker.core.scheduler import Scheduler
from naru_worker.core.scheduler_config import SchedulerConfig
from naru_worker.core.step import PositionLogprobs, SequenceOutput, StepPlan
from naru_worker.core.step_budget import StepPace
from naru_worker.core.testing import PretendModel, solo_outcome


class PretendEngine:
    """Scheduler, KV manager and pretend model of one configuration, and everything that came out."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 32,
        max_model_len: int = 256,
        eos_token_ids: tuple[int, ...] = (),
        vocab_size: int = 50,
        long_prefill_chunk_tokens: int | None = None,
        watermark_ratio: float = 0.01,
        enable_prefix_caching: bool = True,
        revision: str = "a",
        growth: KVGrowth | None = None,
        max_draft_tokens: int = 0,
        num_drawn: int = 0,
    ) -> None:
        """`growth`: its memory comes and goes; the pretend model loses what is given up."""
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            vocab_size=vocab_size,
            long_prefill_chunk_tokens=long_prefill_chunk_tokens,
            watermark_ratio=watermark_ratio,
            max_draft_tokens=max_draft_tokens,
        )
        self.kv = KVManager(
            num_blocks,
            block_size,
            model_revision=revision,
            enable_prefix_caching=enable_prefix_caching,
            growth=growth,
        )
        self.scheduler = Scheduler(self.config, self.kv)
        self.model = PretendModel(block_size, vocab_size, revision, num_drawn)
        self.tokens: dict[Sequence, list[int]] = {}
        self.finished: dict[Sequence, FinishReason] = {}
        self.stop_reasons: dict[Sequence, str] = {}
        self.prompt_logprobs: dict[Sequence, tuple[PositionLogprobs, ...]] = {}
        self.plans: list[StepPlan] = []
        self._arrivals = 0

    def request(
        self,
        prompt: Iterable[int],
        params: SamplingParams | None = None,
        *,
        request_id: str = "",
        priority: int = 0,
        cache_salt: bytes = b"",
        adapter: str = "",
        skip_prefix_cache: bool = False,
        marks: PromptMarks = NO_MARKS,
    ) -> Request:
        """Makes a request and adds it."""
        self._arrivals += 1
        request = Request(
            RequestId(request_id or f"r{self._arrivals}"),
            tuple(prompt),
            params or SamplingParams(max_tokens=8),
            seed=7,
            arrival=self._arrivals,
            priority=priority,
            cache_salt=cache_salt,
            adapter=adapter,
            skip_prefix_cache=skip_prefix_cache,
            marks=marks,
        )
        self.scheduler.add(request)
        return request

    def step(
        self, between: Callable[[], object] | None = None, *, fails: bool = False, pace: StepPace | None = None
    ) -> StepPlan:
        """Plans, calls `between` while the step is in flight, runs, commits (or fails) and checks."""
        had_work = self.scheduler.has_work
        num_running = self.scheduler.num_running
        plan = self.scheduler.plan(pace)
        self.plans.append(plan)
        assert plan.num_tokens <= self.config.max_num_batched_tokens, "the budget is exceeded"
        assert plan.is_starved <= (self.kv.num_usable_blocks < self.kv.max_usable_blocks), "starved with all memory"
        assert bool(plan.rows or plan.ended) == (had_work and not plan.is_starved), "work without progress"
        assert not (plan.is_starved and self.scheduler.num_running), "starved, and memory is held"
        kinds = [(row.is_prompt, row.num_tokens > 1) for row in plan.rows]
        assert kinds == sorted(kinds), "generated tokens come first, and single ones before runs"
        for row in plan.rows:
            last = row.start + row.num_tokens - 1
            assert row.is_prompt == (last < row.sequence.num_prompt_tokens), "a row mixes prompt and generated tokens"
        assert len({row.sequence for row in plan.rows}) == len(plan.rows), "a sequence has two rows"
        if plan.preempted:
            assert self.scheduler.num_running <= num_running - len(plan.preempted), "let in while others had to go"
        results = [] if fails else self.model.run(plan)
        if between is not None:
            between()
        self.take(self.scheduler.fail_step(plan) if fails else self.scheduler.commit(plan, results))
        self.scheduler.check()
        return plan

    def shrink(self, num_chunks: int) -> list[int]:
        """Gives up chunks; what stood in them is gone."""
        assert self.kv.growth is not None, "a fixed pool does not shrink"
        chunks = self.kv.shrink(num_chunks)
        chunk_slots = self.kv.growth.chunk_blocks * self.kv.block_size
        for chunk in chunks:
            for slot in range(chunk * chunk_slots, (chunk + 1) * chunk_slots):
                self.model.slots.pop(slot, None)
        self.scheduler.check()
        return chunks

    def take(self, outputs: list[SequenceOutput]) -> None:
        """Books outputs: each sequence ends once, and gains nothing afterwards."""
        for output in outputs:
            sequence = output.sequence
            assert sequence not in self.finished, "output after the end"
            self.tokens.setdefault(sequence, []).extend(output.new_token_ids)
            if output.prompt_logprobs:
                assert sequence not in self.prompt_logprobs, "prompt logprobs come once"
                self.prompt_logprobs[sequence] = output.prompt_logprobs
            if output.finish_reason is not None:
                self.finished[sequence] = output.finish_reason
                self.stop_reasons[sequence] = output.stop_reason

    def cancel(self, request: Request) -> list[SequenceOutput]:
        """Cancels and books."""
        outputs = self.scheduler.cancel(request.request_id)
        self.take(outputs)
        return outputs

    def drain(self, max_steps: int = 10_000) -> int:
        """Steps until there is no work; all blocks must be back. Returns the number of steps."""
        for num_steps in range(max_steps):
            if not self.scheduler.has_work:
                assert self.kv.num_free_blocks == self.kv.num_usable_blocks, "a block is lost"
                assert self.scheduler.num_requests == 0, "a request is left without work"
                return num_steps
            self.step()
        raise AssertionError(f"work is left after {max_steps} steps")

    def check_solo(self, request: Request) -> None:
        """Every choice of a request must equal its solo run."""
        for sequence in request.sequences:
            expected = solo_outcome(
                self.model,
                request,
                sequence.index,
                max_model_len=self.config.max_model_len,
                eos_token_ids=self.config.eos_token_ids,
            )
            assert (self.tokens.get(sequence, []), self.finished[sequence]) == expected, request.request_id

    def check_solo_after_drain(self, *requests: Request) -> None:
        """Drains, then checks these requests."""
        self.drain()
        for request in requests:
            self.check_solo(request)
