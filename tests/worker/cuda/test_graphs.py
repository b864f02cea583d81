"""Which graph a step takes, and what a graph may never change; on streams that do nothing before their time."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from batches import batch_of, lanes_for
from hypothesis import given
from hypothesis import strategies as st

from naru_worker.adapters.ops.protocol import BatchInputs

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from fake_cuda_streams import FakeStreams  # noqa: E402

from naru_worker.adapters.ops.cuda.graphs import (  # noqa: E402
    FIRST_REACH,
    NUM_ROWS,
    DecodeGraphs,
    GraphKey,
    GraphLimits,
    NoGraph,
    fill_padded,
    graph_key,
    input_bytes,
    rounded_reach,
    rounded_rows,
    staged_words,
)
from naru_worker.adapters.ops.cuda.step_tensors import (  # noqa: E402
    StepArrays,
    StepTensors,
    num_generated_sequences,
    step_arrays,
)
from naru_worker.adapters.ops.cuda.streams import InlineStreams  # noqa: E402
from naru_worker.adapters.ops.cuda.table_twin import TableTwin  # noqa: E402

BLOCK = 16
LIMITS = GraphLimits(max_rows=16, max_reach=2048)
GROUP = 4


def decode_step(num_rows: int, length: int = 20) -> BatchInputs:
    """One generated token of each of some sequences that have `length` tokens."""
    lanes = lanes_for([[1] * (length - 1)] * num_rows, BLOCK, 2)
    for lane in lanes:
        lane.num_computed = length - 1
        lane.token_ids.append(5)
    return batch_of([(lane, 1) for lane in lanes], BLOCK)


def arrays_of(batch: BatchInputs) -> StepArrays:
    return step_arrays(batch, np.arange(num_generated_sequences(batch), dtype=np.int32), GROUP, BLOCK)


def key_of(batch: BatchInputs, limits: GraphLimits = LIMITS, *, wants_hidden: bool = False) -> GraphKey | NoGraph:
    return graph_key(batch, arrays_of(batch), limits, wants_hidden=wants_hidden)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 70_000), st.integers(256, 70_000))
def test_a_step_is_padded_to_the_next_size_and_never_by_much(
    num_rows: int, max_rows: int, longest: int, max_reach: int
) -> None:
    num_rows, longest = min(num_rows, max_rows), min(longest, max_reach)
    rows, reach = rounded_rows(num_rows, max_rows), rounded_reach(longest, max_reach)
    assert num_rows <= rows <= max_rows
    assert longest <= reach <= max_reach
    assert rows < 2 * num_rows or (num_rows > NUM_ROWS[-1] and rows == max_rows)
    assert reach < 2 * longest or reach == FIRST_REACH
    assert rounded_rows(rows, max_rows) == rows, "a graph's own size is a size"


def test_a_step_takes_a_graph_or_says_why_not() -> None:
    step = decode_step(3)
    assert key_of(step) == GraphKey(4, 256, 4)
    assert key_of(decode_step(3, 600)) == GraphKey(4, 1024, 4)
    assert key_of(decode_step(17)) is NoGraph.TOO_MANY
    assert key_of(decode_step(1, 2049)) is NoGraph.TOO_LONG
    assert key_of(decode_step(9, 70_000), replace(LIMITS, max_reach=1 << 17)) is NoGraph.TOO_WIDE
    assert key_of(step, wants_hidden=True) is NoGraph.HIDDEN
    assert key_of(replace(step, copies=np.array([[1, 2]], np.int32))) is NoGraph.COPIES
    assert key_of(replace(step, logits_rows=step.logits_rows[1:])) is NoGraph.ROWS
    assert key_of(replace(step, num_generated_tokens=2)) is NoGraph.PROMPTS
    [lane] = lanes_for([[1]], BLOCK, 0)
    assert key_of(batch_of([(lane, 0)], BLOCK)) is NoGraph.PROMPTS


def test_guessed_tokens_are_rows_like_others_until_the_tile_is_full() -> None:
    [lane] = lanes_for([[1] * 9], BLOCK, 8)
    lane.num_computed = 9
    lane.token_ids += [5, 6, 7, 8, 9]
    assert key_of(batch_of([(lane, 3)], BLOCK, every_logit=True)) == GraphKey(4, 256, 4)
    assert key_of(batch_of([(lane, 5)], BLOCK, every_logit=True)) == GraphKey(8, 256, 8)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(2, 300))
def test_rows_too_many_write_nowhere_and_see_nothing(drawn: list[int], length: int) -> None:
    lanes = lanes_for([[1] * length] * len(drawn), BLOCK, 6)
    for lane in lanes:
        lane.num_computed = length
        lane.token_ids += [5] * 5
    step = arrays_of(batch_of(list(zip(lanes, drawn, strict=True)), BLOCK, every_logit=True))
    num_rows, count = rounded_rows(sum(drawn), 48), sum(drawn)
    words = np.full((6, staged_words(num_rows)), 99, np.int32)
    fill_padded(words, step, num_rows)
    rests = {"token_ids": 0, "positions": 0, "slots": -1, "generated_lens": 0}
    for values, (name, rest) in zip(words, rests.items(), strict=False):
        assert values[:count].tolist() == step.arrays[name].tolist()
        assert values[count:num_rows].tolist() == [rest] * (num_rows - count)
    starts, lines = words[4, : num_rows + 1], words[5, :num_rows]
    assert np.diff(starts)[: len(drawn)].tolist() == drawn
    assert sorted(np.diff(starts)[len(drawn) :], reverse=True)[: num_rows - count] == [1] * (num_rows - count)
    assert (starts[0], starts[num_rows]) == (0, num_rows)
    assert set(np.diff(starts)[len(drawn) :]) <= {0, 1}
    assert lines[: len(drawn)].tolist() == list(range(len(drawn)))
    assert not lines[len(drawn) :].any()


def sums(step: StepTensors) -> Tensor:
    """Stands for a forward pass: numbers that depend on a row and its table alone."""
    runs = torch.repeat_interleave(step.run_lines.long(), step.run_start.diff())
    tables = step.generated_table[runs]
    there = torch.arange(tables.shape[1]) * BLOCK < step.generated_lens[:, None]
    seen = (tables * there).sum(1) + step.generated_lens
    numbers: Tensor = (1000 * step.token_ids + 10 * step.positions + seen)[:, None].clone()
    return numbers


@pytest.mark.parametrize("limits", [LIMITS, GraphLimits(256, 1 << 17), GraphLimits(7, 1 << 20), GraphLimits(256, 300)])
def test_inputs_of_any_graph_stay_where_they_are(limits: GraphLimits) -> None:
    graphs = DecodeGraphs(torch.device("cpu"), InlineStreams(), torch.zeros(1, 1), limits, sums)
    size = len(graphs._staging._twin)
    for num_rows in range(1, limits.max_rows + 1, 5):
        graphs._staging.begin(input_bytes(rounded_rows(num_rows, limits.max_rows)))
    assert len(graphs._staging._twin) == size


def graphs_on(streams: FakeStreams | InlineStreams, limits: GraphLimits = LIMITS) -> tuple[DecodeGraphs, TableTwin]:
    table = TableTwin(torch.device("cpu"), streams, limits.max_rows, limits.max_reach, BLOCK)
    return DecodeGraphs(torch.device("cpu"), streams, table.tensor, limits, sums), table


def results(
    both: tuple[DecodeGraphs, TableTwin], streams: FakeStreams | InlineStreams, batches: list[BatchInputs]
) -> list[list[int]]:
    """Of all steps, launched one behind the other before anybody waits."""
    graphs, table = both
    kept: list[list[int]] = []
    for batch in batches:
        step = step_arrays(batch, table.take(batch, len(batch.seq_lens)), GROUP, BLOCK)
        key = graph_key(batch, step, graphs.limits)
        assert isinstance(key, GraphKey)
        logits, _ = graphs.launch(step, key)
        num_rows = len(batch.token_ids)

        def read(logits: object = logits, num_rows: int = num_rows) -> None:
            kept.append(logits()[:num_rows, 0].tolist())  # type: ignore[operator]

        streams.compute.submit(read)
    streams.synchronize()
    return kept


def plainly(batches: list[BatchInputs]) -> list[list[int]]:
    streams = InlineStreams()
    return results(graphs_on(streams), streams, batches)


STEPS = [(3, 20), (3, 21), (4, 22), (1, 300), (16, 30), (2, 300), (15, 31), (3, 20), (1, 301), (1, 400), (3, 20)]


@pytest.mark.parametrize("seed", range(8))
def test_graphs_change_no_result_and_are_made_for_what_comes_twice(seed: int) -> None:
    batches = [decode_step(*each) for each in STEPS]
    streams = FakeStreams(seed)
    graphs, table = graphs_on(streams)
    assert results((graphs, table), streams, batches) == plainly(batches)
    assert (graphs.num_graphs, streams.num_captures) == (3, 3)
    assert graphs.num_replays == streams.num_replays == len(STEPS) - 4
    assert graphs.num_bytes == 3000
    assert not graphs.failure


def test_a_capture_that_fails_is_said_once_and_steps_go_on(caplog: pytest.LogCaptureFixture) -> None:
    batches = [decode_step(*each) for each in STEPS]
    streams = FakeStreams()
    streams.capture_error = RuntimeError("operation not permitted when stream is capturing")
    graphs, table = graphs_on(streams)
    with caplog.at_level(logging.WARNING):
        found = results((graphs, table), streams, batches)
    assert found == plainly(batches)
    assert graphs.num_graphs == 0
    assert "not permitted" in graphs.failure
    assert len(caplog.records) == 1


def test_graphs_are_few_and_the_one_used_least_lately_goes() -> None:
    streams = FakeStreams()
    graphs, table = graphs_on(streams, replace(LIMITS, max_graphs=2))
    shapes = [(1, 20), (1, 20), (2, 20), (2, 20), (1, 20), (4, 20), (4, 20), (1, 20), (2, 20)]
    batches = [decode_step(*each) for each in shapes]
    assert results((graphs, table), streams, batches) == plainly(batches)
    assert graphs.num_graphs == 2
    assert streams.num_captures == 4, "only the graph of two rows was made twice"


def test_no_more_graphs_are_made_when_their_memory_is_used_up() -> None:
    streams = FakeStreams()
    graphs, table = graphs_on(streams, replace(LIMITS, max_bytes=1500))
    shapes = [(1, 20), (1, 20), (2, 20), (2, 20), (4, 20), (4, 20), (2, 20)]
    batches = [decode_step(*each) for each in shapes]
    assert results((graphs, table), streams, batches) == plainly(batches)
    assert graphs.num_graphs == 2, "those that are there go on"
    assert "2000 bytes" in graphs.failure
