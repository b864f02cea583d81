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
    MAX_CELLS,
    NOTHING,
    NUM_ROWS,
    DecodeGraphs,
    GraphKey,
    GraphLimits,
    NoGraph,
    graph_key,
    padded,
    rounded_reach,
    rounded_rows,
)
from naru_worker.adapters.ops.cuda.step_tensors import StepTensors, step_arrays  # noqa: E402
from naru_worker.adapters.ops.cuda.streams import InlineStreams  # noqa: E402

BLOCK = 16
LIMITS = GraphLimits(max_rows=16, max_reach=2048)


def decode_step(num_rows: int, length: int = 20) -> BatchInputs:
    """One generated token of each of some sequences that have `length` tokens."""
    lanes = lanes_for([[1] * (length - 1)] * num_rows, BLOCK, 2)
    for lane in lanes:
        lane.num_computed = length - 1
        lane.token_ids.append(5)
    return batch_of([(lane, 1) for lane in lanes], BLOCK)


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
    assert graph_key(step, LIMITS) == GraphKey(4, 256)
    assert graph_key(decode_step(3, 600), LIMITS) == GraphKey(4, 1024)
    assert graph_key(decode_step(17), LIMITS) is NoGraph.TOO_MANY
    assert graph_key(decode_step(1, 2049), LIMITS) is NoGraph.TOO_LONG
    assert graph_key(decode_step(9, 70_000), replace(LIMITS, max_reach=1 << 17)) is NoGraph.TOO_WIDE
    assert graph_key(step, LIMITS, wants_hidden=True) is NoGraph.HIDDEN
    assert graph_key(replace(step, copies=np.array([[1, 2]], np.int32)), LIMITS) is NoGraph.COPIES
    assert graph_key(replace(step, logits_rows=step.logits_rows[1:]), LIMITS) is NoGraph.ROWS
    assert graph_key(replace(step, num_generated_tokens=2), LIMITS) is NoGraph.PROMPTS
    [lane] = lanes_for([[1]], BLOCK, 0)
    assert graph_key(batch_of([(lane, 0)], BLOCK), LIMITS) is NoGraph.PROMPTS


def test_guessed_tokens_are_rows_like_others() -> None:
    [lane] = lanes_for([[1] * 9], BLOCK, 4)
    lane.num_computed = 9
    lane.token_ids += [5, 6, 7]
    assert graph_key(batch_of([(lane, 3)], BLOCK, every_logit=True), LIMITS) == GraphKey(4, 256)


@given(st.integers(1, 16), st.integers(2, 300))
def test_rows_too_many_write_nowhere_and_see_nothing(num_rows: int, length: int) -> None:
    batch = decode_step(num_rows, length)
    key = graph_key(batch, LIMITS)
    assert isinstance(key, GraphKey)
    step = step_arrays(batch)
    arrays = padded(step, key, BLOCK).arrays
    for name, rest in {"token_ids": 0, "positions": 0, "slots": -1, "generated_lens": 0}.items():
        assert arrays[name][:num_rows].tolist() == step.arrays[name].tolist()
        assert arrays[name][num_rows:].tolist() == [rest] * (key.num_rows - num_rows)
    table = arrays["generated_table"]
    width = -(-length // BLOCK)
    assert table.shape == (key.num_rows, key.reach // BLOCK)
    assert table[:num_rows, :width].tolist() == batch.block_table[:, :width].tolist()
    assert not table[num_rows:].any()
    assert not table[:, batch.block_table.shape[1] :].any(), "block 0 always has memory"


def sums(step: StepTensors) -> Tensor:
    """Stands for a forward pass: numbers that depend on a row and its table alone."""
    seen = step.generated_table.sum(1) + step.generated_lens
    return (1000 * step.token_ids + 10 * step.positions + seen)[:, None].clone()


@pytest.mark.parametrize("limits", [LIMITS, GraphLimits(256, 1 << 17), GraphLimits(7, 1 << 20), GraphLimits(256, 300)])
def test_inputs_of_any_graph_stay_where_they_are(limits: GraphLimits) -> None:
    graphs = graphs_on(InlineStreams(), limits)
    place = graphs._place()
    size = len(place._twin)
    for num_rows in range(1, limits.max_rows + 1, 5):
        for longest in (1, 257, 3000, 5000, 100_000, limits.max_reach):
            key = GraphKey(rounded_rows(num_rows, limits.max_rows), rounded_reach(longest, limits.max_reach))
            if longest <= limits.max_reach and key.num_rows * key.reach <= MAX_CELLS:
                place.put(padded(NOTHING, key, BLOCK).arrays)
    assert len(place._twin) == size


def graphs_on(streams: FakeStreams | InlineStreams, limits: GraphLimits = LIMITS) -> DecodeGraphs:
    return DecodeGraphs(torch.device("cpu"), streams, BLOCK, limits, sums)


def results(graphs: DecodeGraphs, streams: FakeStreams | InlineStreams, batches: list[BatchInputs]) -> list[list[int]]:
    """Of all steps, launched one behind the other before anybody waits."""
    kept: list[list[int]] = []
    for batch in batches:
        key = graph_key(batch, graphs.limits)
        assert isinstance(key, GraphKey)
        logits, _ = graphs.launch(step_arrays(batch), key)
        num_rows = len(batch.token_ids)

        def read(logits: object = logits, num_rows: int = num_rows) -> None:
            kept.append(logits()[:num_rows, 0].tolist())  # type: ignore[operator]

        streams.compute.submit(read)
    streams.synchronize()
    return kept


STEPS = [(3, 20), (3, 21), (4, 22), (1, 300), (16, 30), (2, 300), (15, 31), (3, 20), (1, 301), (1, 400), (3, 20)]


@pytest.mark.parametrize("seed", range(8))
def test_graphs_change_no_result_and_are_made_for_what_comes_twice(seed: int) -> None:
    batches = [decode_step(*each) for each in STEPS]
    streams = FakeStreams(seed)
    graphs = graphs_on(streams)
    assert results(graphs, streams, batches) == results(graphs_on(InlineStreams()), InlineStreams(), batches)
    assert (graphs.num_graphs, streams.num_captures) == (3, 3)
    assert graphs.num_replays == streams.num_replays == len(STEPS) - 4
    assert graphs.num_bytes == 3000
    assert not graphs.failure


def test_a_capture_that_fails_is_said_once_and_steps_go_on(caplog: pytest.LogCaptureFixture) -> None:
    batches = [decode_step(*each) for each in STEPS]
    streams = FakeStreams()
    streams.capture_error = RuntimeError("operation not permitted when stream is capturing")
    graphs = graphs_on(streams)
    with caplog.at_level(logging.WARNING):
        found = results(graphs, streams, batches)
    assert found == results(graphs_on(InlineStreams()), InlineStreams(), batches)
    assert graphs.num_graphs == 0
    assert "not permitted" in graphs.failure
    assert len(caplog.records) == 1


def test_graphs_are_few_and_the_one_used_least_lately_goes() -> None:
    streams = FakeStreams()
    graphs = graphs_on(streams, replace(LIMITS, max_graphs=2))
    shapes = [(1, 20), (1, 20), (2, 20), (2, 20), (1, 20), (4, 20), (4, 20), (1, 20), (2, 20)]
    batches = [decode_step(*each) for each in shapes]
    assert results(graphs, streams, batches) == results(graphs_on(InlineStreams()), InlineStreams(), batches)
    assert graphs.num_graphs == 2
    assert streams.num_captures == 4, "only the graph of two rows was made twice"


def test_no_more_graphs_are_made_when_their_memory_is_used_up() -> None:
    streams = FakeStreams()
    graphs = graphs_on(streams, replace(LIMITS, max_bytes=1500))
    shapes = [(1, 20), (1, 20), (2, 20), (2, 20), (4, 20), (4, 20), (2, 20)]
    batches = [decode_step(*each) for each in shapes]
    assert results(graphs, streams, batches) == results(graphs_on(InlineStreams()), InlineStreams(), batches)
    assert graphs.num_graphs == 2, "those that are there go on"
    assert "2000 bytes" in graphs.failure
