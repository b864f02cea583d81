"""Block tables on the device: whatever comes and goes, a step finds its own there, and little is sent."""

from __future__ import annotations

from dataclasses import replace

import pytest
from batches import Lane, batch_of, lanes_for
from hypothesis import given, settings
from hypothesis import strategies as st

from naru_proto.errors import InternalError
from naru_worker.adapters.engine.batch import BatchBuilder
from naru_worker.adapters.ops.protocol import BatchInputs, RunnerOptions
from naru_worker.core.request import Request, RequestId, Sequence
from naru_worker.core.sampling import SamplingParams
from naru_worker.core.step import Row, StepPlan

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from fake_cuda_streams import FakeStreams  # noqa: E402

from naru_worker.adapters.ops.cuda.kernels.table_cells import write_cells  # noqa: E402
from naru_worker.adapters.ops.cuda.streams import InlineStreams  # noqa: E402
from naru_worker.adapters.ops.cuda.table_twin import TableTwin  # noqa: E402

CPU = torch.device("cpu")
BLOCK = 4
NUM_LINES, MAX_LEN = 6, 64


def test_cells_are_written_and_no_others() -> None:
    table = torch.zeros(40, 20, dtype=torch.int32)
    cells = torch.stack([torch.arange(1, 800, dtype=torch.int32), torch.arange(799, dtype=torch.int32)])
    write_cells(table, cells)
    assert table.flatten().tolist() == [0, *range(799)]
    write_cells(table, cells[:, :0])
    assert table.flatten().tolist() == [0, *range(799)]


class Tables:
    """Sees of each step what it would read, when it runs."""

    def __init__(self, streams: FakeStreams | InlineStreams) -> None:
        self.twin = TableTwin(CPU, streams, NUM_LINES, MAX_LEN, BLOCK)
        self._streams = streams
        self.expected: list[list[list[int]]] = []
        self.found: list[list[list[int]]] = []

    def take(self, batch: BatchInputs) -> None:
        lines = self.twin.take(batch, len(batch.seq_lens)).tolist()
        assert len(set(lines)) == len(lines)
        counts = (-(-batch.seq_lens // BLOCK)).tolist()
        self.expected.append([row[:n] for row, n in zip(batch.block_table.tolist(), counts, strict=True)])

        def read() -> None:
            rows = zip(lines, counts, strict=True)
            self.found.append([self.twin.tensor[line, :count].tolist() for line, count in rows])

        self._streams.compute.submit(read)


def sequence(number: int, length: int) -> Sequence:
    request = Request(RequestId(str(number)), tuple(range(length)), SamplingParams(), number, number)
    return request.sequences[0]


steps = st.lists(
    st.lists(st.tuples(st.integers(0, 8), st.sampled_from(["go", "go", "go", "preempt", "copy"])),
             min_size=1, max_size=NUM_LINES, unique_by=lambda each: each[0]),
    min_size=1, max_size=14,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(steps, st.integers(0, 99))
def test_each_step_finds_its_tables_however_batches_change(script: list[list[tuple[int, str]]], seed: int) -> None:
    streams = FakeStreams(seed)
    tables = Tables(streams)
    builder = BatchBuilder(RunnerOptions(BLOCK, 1000, 64, NUM_LINES, MAX_LEN))
    sequences = [sequence(number, MAX_LEN) for number in range(9)]
    computed = [7 * number % 50 for number in range(9)]
    for turn, step in enumerate(script):
        rows, copies = [], []
        for number, kind in step:
            item = sequences[number]
            if kind == "preempt":
                item.block_table = []
                item.table_version += 1
            while len(item.block_table) * BLOCK <= computed[number] + turn % 5:  # at times a block ahead
                item.block_table.append(1 + 100 * number + 9 * turn + len(item.block_table))
            if kind == "copy":
                copies.append((item.block_table[-1], 901 + turn))
                item.block_table[-1] = 901 + turn
            rows.append(Row(item, computed[number], 1, True))
            computed[number] = min(computed[number] + 1, MAX_LEN - 1)
        plan = StepPlan(tuple(rows), tuple(copies))
        batch = builder.build(plan, list(range(len(rows))))
        if seed % 5 == 0 and turn % 3 == 2:
            batch = replace(batch, table_lines=None)  # from somebody else
        tables.take(batch)
        if turn % 6 == 5:
            builder.forget()
        if seed % 7 == 0 and turn % 4 == 3:
            builder = BatchBuilder(RunnerOptions(BLOCK, 1000, 64, NUM_LINES, MAX_LEN))
    streams.synchronize()
    assert tables.found == tables.expected


def test_sequences_that_go_on_send_their_new_blocks_alone_even_when_others_end() -> None:
    tables = Tables(InlineStreams())
    builder = BatchBuilder(RunnerOptions(BLOCK, 1000, 64, NUM_LINES, MAX_LEN))
    sequences = [sequence(number, MAX_LEN) for number in range(NUM_LINES)]
    for number, item in enumerate(sequences):
        item.block_table = [1 + 100 * number + i for i in range(8)]
    before = 0
    for start in range(28, 36):
        if start == 30:
            del sequences[1]
        if start == 32:
            for number, item in enumerate(sequences):
                item.block_table.append(700 + number)
        plan = StepPlan(tuple(Row(item, start, 1, True) for item in sequences))
        tables.take(builder.build(plan, list(range(len(sequences)))))
        new, before = tables.twin.num_cells_sent - before, tables.twin.num_cells_sent
        assert new == {28: 8 * NUM_LINES, 32: NUM_LINES - 1}.get(start, 0)
    assert tables.found == tables.expected


def test_tables_that_could_not_be_sent_are_sent_with_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = Tables(InlineStreams())
    batch = batch_of([(lane, 3) for lane in lanes_for([[1] * 9, [1] * 12], BLOCK, 0)], BLOCK)
    with monkeypatch.context() as patch:
        patch.setattr(tables.twin._streams.compute, "submit", lambda work: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tables.twin.take(batch, 2)
    tables.take(batch)
    assert tables.found == tables.expected


def test_a_batch_beyond_the_limits_is_refused() -> None:
    tables = Tables(InlineStreams())
    long = Lane([1] * 70, list(range(1, 19)), num_computed=69, num_prompt_tokens=1)
    with pytest.raises(InternalError, match="18 blocks"):
        tables.take(batch_of([(long, 1)], BLOCK))
    many = [(Lane([1, 1], [1], num_computed=1, num_prompt_tokens=1), 1)] * (NUM_LINES + 1)
    with pytest.raises(InternalError, match="7 sequences"):
        tables.take(batch_of(many, BLOCK))
    with pytest.raises(ValueError, match="too many blocks"):
        TableTwin(CPU, InlineStreams(), 1 << 20, 1 << 20, BLOCK)


def test_lines_are_numbers_of_their_owner_alone() -> None:
    """Stamps of another builder may be the same by chance."""
    tables = Tables(InlineStreams())
    for first in (1, 50):
        builder = BatchBuilder(RunnerOptions(BLOCK, 1000, 64, NUM_LINES, MAX_LEN))
        item = sequence(0, MAX_LEN)
        item.block_table = [first, first + 1]
        tables.take(builder.build(StepPlan((Row(item, 7, 1, True),)), [0]))
    assert tables.found == tables.expected == [[[1, 2]], [[50, 51]]]
