"""The arrays of a step against a plain rendering of the plan, over batches that change from step to step."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_model import toy_engine

from naru_worker.adapters.engine.batch import BatchBuilder
from naru_worker.adapters.engine.penalties import TokenCounts
from naru_worker.adapters.engine.sampling_rows import SamplingBuilder, SequenceSampling, wanted_rows
from naru_worker.adapters.ops.protocol import BatchInputs, RunnerOptions
from naru_worker.core.request import Request, RequestId, Sequence
from naru_worker.core.sampling import SamplingParams
from naru_worker.core.step import Row, StepPlan
from naru_worker.core.step_budget import StepPace

BLOCK_SIZE = 4
OPTIONS = RunnerOptions(BLOCK_SIZE, 1000, 64, 6, 64)


def sequence(number: int, length: int, **params: object) -> Sequence:
    prompt = tuple((number * 31 + i) % 250 for i in range(length))
    request = Request(RequestId(str(number)), prompt, SamplingParams(**params), number, number)  # type: ignore[arg-type]
    return request.sequences[0]


def give_blocks(item: Sequence, num_tokens: int, first: int) -> None:
    while len(item.block_table) * BLOCK_SIZE < num_tokens:
        item.block_table.append(first + len(item.block_table) * 7)


def plain(plan: StepPlan) -> dict[str, list[int]]:
    """What the arrays must hold, spelt out."""
    out: dict[str, list[int]] = {"token_ids": [], "positions": [], "slots": [], "query_start": [0], "seq_lens": []}
    for row in plan.rows:
        for position in range(row.start, row.start + row.num_tokens):
            block = row.sequence.block_table[position // BLOCK_SIZE]
            out["token_ids"].append(row.sequence.token_ids[position])
            out["positions"].append(position)
            out["slots"].append(block * BLOCK_SIZE + position % BLOCK_SIZE)
        out["query_start"].append(len(out["token_ids"]))
        out["seq_lens"].append(row.start + row.num_tokens)
    return out


def assert_is(batch: BatchInputs, plan: StepPlan) -> None:
    for name, values in plain(plan).items():
        assert getattr(batch, name).tolist() == values, name
    for i, row in enumerate(plan.rows):
        table = batch.block_table[i].tolist()
        count = len(row.sequence.block_table)
        assert table[:count] == row.sequence.block_table
        assert set(table[count:]) <= {0}


steps = st.lists(
    st.lists(
        st.tuples(
            st.integers(0, 7),
            st.integers(1, 9),
            st.sampled_from(["run", "run", "run", "preempt", "copy"]),
        ),
        min_size=1,
        max_size=6,
        unique_by=lambda item: item[0],
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=120, deadline=None)
@given(steps)
def test_arrays_equal_the_plan_however_batches_change(script: list[list[tuple[int, int, str]]]) -> None:
    builder = BatchBuilder(OPTIONS)
    sequences = [sequence(number, 12 + number) for number in range(8)]
    computed = [0] * 8
    seen: dict[tuple[int, int], list[int]] = {}
    for turn, step in enumerate(script):
        rows: list[Row] = []
        copies: list[tuple[int, int]] = []
        for number, wanted, kind in step:
            item = sequences[number]
            if kind == "preempt":
                item.block_table, computed[number] = [], 0
                item.table_version += 1
            count = min(wanted, len(item.token_ids) - computed[number])
            give_blocks(item, computed[number] + count, 1 + number * 100 + turn)
            if kind == "copy":
                old = item.block_table[-1]
                item.block_table[-1] = 900 + number
                copies.append((old, 900 + number))
            rows.append(Row(item, computed[number], count, computed[number] + count == len(item.token_ids)))
            computed[number] += count
            if computed[number] == len(item.token_ids):
                item.token_ids.append(turn)
        rows.sort(key=lambda row: row.num_tokens > 1)
        plan = StepPlan(tuple(rows), tuple(copies))
        ends = [end - 1 for end in plain(plan)["query_start"][1:]]
        batch = builder.build(plan, ends)
        assert_is(batch, plan)
        assert batch.table_lines is not None
        lines, stamps = batch.table_lines.lines.tolist(), batch.table_lines.stamps.tolist()
        assert len(set(lines)) == len(lines) and all(0 <= line < OPTIONS.max_num_seqs for line in lines)
        for line, stamp, table in zip(lines, stamps, batch.block_table.tolist(), strict=True):
            assert stamp >= 1 and seen.setdefault((line, stamp), table) == table, "an old stamp on new numbers"
        assert batch.logits_rows.tolist() == ends
        assert batch.copies.tolist() == [list(pair) for pair in copies]


def test_a_batch_of_decodes_is_one_object_with_new_contents() -> None:
    builder = BatchBuilder(OPTIONS)
    items = [sequence(number, 5) for number in range(3)]
    for item in items:
        give_blocks(item, 20, 1 + item.request.arrival * 50)
    seen = []
    for position in range(4):
        plan = StepPlan(tuple(Row(item, position, 1, True) for item in items))
        seen.append(builder.build(plan, [0, 1, 2]))
        assert_is(seen[-1], plan)
    assert len({id(batch) for batch in seen}) == 1


def test_sampling_arrays_follow_rows_and_are_kept_while_nothing_changes() -> None:
    builder = SamplingBuilder(250)
    params: list[dict[str, object]] = [
        {"temperature": 0.7, "top_k": 5, "seed": 1},
        {"temperature": 0.0, "logit_bias": ((3, 2.0), (9, -1.0))},
    ]
    items = [sequence(i, 4, **p) for i, p in enumerate(params)]
    states = {item: SequenceSampling(item, (200,)) for item in items}
    plan = StepPlan(tuple(Row(item, 3, 1, True) for item in items))
    wanted, indices = wanted_rows(plan, states)
    first = builder.build(wanted)
    assert indices == [0, 1]
    assert first.temperature.tolist() == [np.float32(0.7), 0.0]
    assert first.top_k.tolist() == [5, 0]
    assert (first.bias_start.tolist(), first.bias_ids.tolist()) == ([0, 0, 2], [3, 9])
    assert first.target.tolist() == first.num_logprobs.tolist() == [-1, -1]
    assert first.counter.tolist() == [0, 0]
    for item in items:
        item.token_ids.append(7)
    again = builder.build(wanted_rows(plan, states)[0])
    assert again is first
    assert again.counter.tolist() == [1, 1]
    swapped = StepPlan(tuple(reversed(plan.rows)))
    other = builder.build(wanted_rows(swapped, states)[0])
    assert other.top_k.tolist() == [0, 5]


def test_a_choice_has_random_numbers_of_its_own() -> None:
    request = Request(RequestId("r"), (1, 2, 3), SamplingParams(n=3, seed=5), 5, 0)
    bases = [SequenceSampling(s, ()).counter_base for s in request.sequences]
    assert bases == [0, 1 << 32, 2 << 32]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=30),
    st.lists(st.lists(st.integers(0, 200), max_size=40), max_size=6),
    st.booleans(),
)
def test_token_counts_are_those_of_the_output(prompt: list[int], outputs: list[list[int]], with_prompt: bool) -> None:
    item = Request(RequestId("r"), tuple(prompt), SamplingParams(), 0, 0).sequences[0]
    counts = TokenCounts(item, with_prompt=with_prompt)
    for chunk in outputs:
        item.token_ids.extend(chunk)
        ids, values = counts.refresh()
        output = item.token_ids[len(prompt) :]
        expected = {i: output.count(i) for i in {*output, *(prompt if with_prompt else ())}}
        assert dict(zip(ids.tolist(), values.tolist(), strict=True)) == expected


def test_the_engine_builds_what_its_runner_gets() -> None:
    """The plan of a real scheduler, over prefill, decode and preemption, in one check of every batch."""
    engine, runner, scheduler = toy_engine(num_blocks=40, max_num_seqs=6, max_num_batched_tokens=20)
    plans: list[StepPlan] = []
    make_plan = scheduler.plan

    def plan(pace: StepPace | None = None) -> StepPlan:
        plans.append(make_plan(pace))
        return plans[-1]

    scheduler.plan = plan  # type: ignore[method-assign]
    runner.before_step = lambda batch: assert_is(batch, plans[-1])
    for i in range(8):
        request = Request(
            RequestId(str(i)), tuple(range(10 + 3 * i)), SamplingParams(max_tokens=30, ignore_eos=True), i, i
        )
        engine.submit(request, 0.0, [])
    while engine.has_work:
        engine.step([])
    assert engine.stats.num_failed_steps == 0
    assert engine.stats.num_preemptions > 0
