"""Any interleaving of arrival, fork, preemption, cancel, stop, failure and prefix hits in a tiny pool.

The pool has all its memory, or is given it and gives it up at the whim of others.

After each step all invariants of blocks and queues hold; at the end every request ended once, all blocks are back, and
every choice that was left alone equals its solo run, beams those of a plain search.
"""

from __future__ import annotations

from growth import Grants
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from solo_beams import solo_beams

from naru_proto.errors import ContextLengthExceeded, InvalidRequest
from naru_worker.core.prompt_marks import PromptMarks
from naru_worker.core.request import FinishReason, Request, Sequence
from naru_worker.core.request_check import max_beam_tokens
from naru_worker.core.sampling import SamplingParams
from naru_worker.core.testing import solo_outcome
from naru_worker.core.testing_engine import PretendEngine

TEXT = tuple(index * 7 % 11 for index in range(40))
"""All prompts are cut from it, so that many share a beginning."""


class SchedulerMachine(RuleBasedStateMachine):
    """One engine; rules are what clients, runner and detokenizer may do between and during steps."""

    @initialize(
        num_blocks=st.integers(6, 24),
        block_size=st.sampled_from([1, 2, 3, 4]),
        max_num_seqs=st.integers(1, 6),
        extra_tokens=st.integers(0, 12),
        max_model_len=st.sampled_from([9, 16, 30]),
        chunk=st.sampled_from([None, 1, 3, 50]),
        watermark_ratio=st.sampled_from([0.0, 0.1]),
        enable_prefix_caching=st.booleans(),
        chunk_blocks=st.sampled_from([None, None, 2, 3, 5]),
        floor_chunks=st.integers(1, 2),
        max_draft_tokens=st.sampled_from([0, 1, 5]),
        num_drawn=st.sampled_from([2, 4, 11]),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        extra_tokens: int,
        max_model_len: int,
        chunk: int | None,
        watermark_ratio: float,
        enable_prefix_caching: bool,
        chunk_blocks: int | None,
        floor_chunks: int,
        max_draft_tokens: int,
        num_drawn: int,
    ) -> None:
        self.growth = None if chunk_blocks is None else Grants(chunk_blocks, floor_chunks)
        self.engine = PretendEngine(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_tokens,
            max_model_len=max_model_len,
            long_prefill_chunk_tokens=chunk,
            watermark_ratio=watermark_ratio,
            enable_prefix_caching=enable_prefix_caching,
            vocab_size=11,
            eos_token_ids=(3,),
            growth=self.growth,
            max_draft_tokens=max_draft_tokens,
            num_drawn=num_drawn,
        )
        self.requests: list[Request] = []
        self.disturbed: set[Sequence] = set()

    @rule(
        begin=st.sampled_from([0, 0, 0, 1]),
        length=st.integers(1, 14),
        max_tokens=st.sampled_from([None, 0, 1, 4, 9]),
        n=st.sampled_from([1, 1, 2, 3]),
        priority=st.sampled_from([0, 0, -1, 1]),
        cache_salt=st.sampled_from([b"", b"", b"t"]),
        ignore_eos=st.booleans(),
        prompt_logprobs=st.sampled_from([None, None, 1]),
        skip_prefix_cache=st.sampled_from([False, False, True]),
        num_shared_blocks=st.sampled_from([0, 0, 1, 2]),
        beam_width=st.sampled_from([None, None, 1, 3, 4]),
    )
    def arrive(
        self,
        begin: int,
        length: int,
        max_tokens: int | None,
        n: int,
        priority: int,
        cache_salt: bytes,
        ignore_eos: bool,
        prompt_logprobs: int | None,
        skip_prefix_cache: bool,
        num_shared_blocks: int,
        beam_width: int | None,
    ) -> None:
        prompt = TEXT[begin : begin + length]
        num_full = length // self.engine.kv.block_size
        keys = {index: (f"{cache_salt!r} {prompt[: index + 1]}".encode(),) for index in range(num_full)}
        if beam_width is not None:
            n, max_tokens = min(n, beam_width), 3 if max_tokens == 0 else max_tokens
        params = SamplingParams(
            max_tokens=max_tokens, n=n, ignore_eos=ignore_eos, prompt_logprobs=prompt_logprobs, beam_width=beam_width
        )
        try:
            request = self.engine.request(
                prompt,
                params,
                priority=priority,
                cache_salt=cache_salt,
                skip_prefix_cache=skip_prefix_cache,
                marks=PromptMarks(keys, min(num_shared_blocks, num_full)),
            )
        except (ContextLengthExceeded, InvalidRequest):
            return  # too long for the pool, or more beams than sequences may run
        self.requests.append(request)

    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.engine.step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), in_flight=st.booleans())
    def cancel(self, data: st.DataObject, in_flight: bool) -> None:
        request = data.draw(st.sampled_from(self.requests))
        self.disturbed.update(s for s in _choices(request) if s not in self.engine.finished)
        if in_flight:
            self.engine.step(between=lambda: self.engine.cancel(request))
        else:
            self.engine.cancel(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def stop_string(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        sequence = data.draw(st.sampled_from(request.sequences))
        # A stop string needs text; a sequence without output cannot have one.
        if sequence.num_output_tokens and self.engine.scheduler.finish_sequence(sequence, FinishReason.STOP):
            self.engine.finished[sequence] = FinishReason.STOP
            self.disturbed.add(sequence)

    @rule()
    def fail_step(self) -> None:
        plan = self.engine.step(fails=True)
        self.disturbed.update(s for row in plan.rows for s in row.sequence.request.sequences)

    @precondition(lambda self: self.growth is not None)
    @rule(plenty=st.integers(0, 3), extra=st.integers(0, 3))
    def memory_changes(self, plenty: int, extra: int) -> None:
        assert self.growth is not None
        self.growth.plenty, self.growth.most = plenty, plenty + extra

    @precondition(lambda self: self.growth is not None)
    @rule(num_chunks=st.integers(1, 3))
    def shrink(self, num_chunks: int) -> None:
        gone = self.engine.shrink(num_chunks)
        assert 0 not in gone
        assert len(gone) <= num_chunks

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        if self.growth is not None:
            self.growth.plenty = self.growth.most = 100
        self.engine.drain()
        stats = self.engine.scheduler.kv_stats()
        assert (stats.num_used_blocks, stats.num_wasted_slots) == (0, 0)
        assert self.engine.kv.cache.hashes() == () or self.engine.kv.num_free_blocks
        for request in self.requests:
            if request.beams:
                self.check_beams(request)
            for sequence in () if request.beams else request.sequences:
                self.check_outcome(request, sequence)

    def check_beams(self, request: Request) -> None:
        engine = self.engine
        if self.disturbed & set(request.sequences):
            assert all(sequence in engine.finished for sequence in _choices(request))
            assert not any(engine.tokens.get(sequence) for sequence in _choices(request))
            return
        most = max_beam_tokens(request, engine.config, engine.kv) - len(request.prompt_token_ids)
        if request.params.max_tokens is not None:
            most = min(most, request.params.max_tokens)
        expected = solo_beams(engine.model, request, max_tokens=most, eos_token_ids=(3,))
        assert [(tuple(engine.tokens[s]), engine.finished[s]) for s in _choices(request)] == expected

    def check_outcome(self, request: Request, sequence: Sequence) -> None:
        engine = self.engine
        pool_tokens = engine.kv.max_usable_blocks * engine.kv.block_size
        length = min(engine.config.max_model_len, pool_tokens + 1)
        expected, reason = solo_outcome(engine.model, request, sequence.index, max_model_len=length, eos_token_ids=(3,))
        output = engine.tokens.get(sequence, [])
        if sequence in self.disturbed:
            assert output == expected[: len(output)]
        else:
            assert (output, engine.finished[sequence]) == (expected, reason)
        logprobs = engine.prompt_logprobs.get(sequence)
        if logprobs is not None:
            ids = [item.chosen.token_id if item.chosen else None for item in logprobs]
            assert ids == [None, *request.prompt_token_ids[1:]]


def _choices(request: Request) -> list[Sequence]:
    return request.sequences[: request.params.n]


SchedulerMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestSchedulerMachine = SchedulerMachine.TestCase
