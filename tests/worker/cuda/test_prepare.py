"""Decode steps out of the table of requests, under Triton's interpreter."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from naru_worker.adapters.ops.cuda.kernels.prepare import (  # noqa: E402
    BLOCKS_PER_TURN,
    RequestTable,
    advance,
    prepare_decode,
)


def test_a_row_feeds_its_last_token_at_its_position_and_padding_writes_nowhere() -> None:
    width = BLOCKS_PER_TURN + 2
    table = RequestTable.make(5, width, "cpu")
    table.block_table.copy_(1 + torch.arange(5 * width).view(5, width))
    table.last_token.copy_(torch.tensor([100, 101, 102, 103, 104]))
    # The start of a sequence, the ends of blocks, the last token there is room for, and one more.
    table.num_computed.copy_(torch.tensor([0, 15, 16, 16 * width - 1, 16 * width]))
    lines = torch.tensor([3, -1, 0, 2, 1, 4], dtype=torch.int32)
    outputs = [torch.full((6,), 99, dtype=torch.int32) for _ in range(4)]
    rows = torch.full((6, width + 3), 7, dtype=torch.int32)
    prepare_decode(table, lines, 16, outputs[0], outputs[1], outputs[2], outputs[3], rows)
    token_ids, positions, slots, seq_lens = (output.tolist() for output in outputs)
    assert token_ids == [103, 0, 100, 102, 101, 0]
    assert positions == [16 * width - 1, 0, 0, 16, 15, 0]
    first = table.block_table[:, 0].tolist()
    assert slots == [16 * 4 * width + 15, -1, 16 * first[0], 16 * (first[2] + 1), 16 * first[1] + 15, -1]
    assert seq_lens == [16 * width, 0, 1, 17, 16, 0]
    for row, (line, length) in enumerate(zip(lines.tolist(), seq_lens, strict=True)):
        count = -(-length // 16)
        assert torch.equal(rows[row, :count], table.block_table[line, :count])
        assert (rows[row, count:] == 7).all()


def test_sampled_tokens_are_fed_next_and_others_stay() -> None:
    table = RequestTable.make(4, 1, "cpu")
    table.num_computed.copy_(torch.tensor([5, 6, 7, 8]))
    advance(table, torch.tensor([2, -1, 0], dtype=torch.int32), torch.tensor([50, 51, 52], dtype=torch.int32))
    assert table.last_token.tolist() == [52, 0, 50, 0]
    assert table.num_computed.tolist() == [6, 6, 8, 8]
    nothing = torch.empty(0, dtype=torch.int32)
    advance(table, nothing, nothing)
    rows = torch.empty(0, 1, dtype=torch.int32)
    prepare_decode(table, nothing, 16, nothing, nothing, nothing, nothing, rows)
