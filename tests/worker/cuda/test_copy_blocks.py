"""Copies of KV blocks under Triton's interpreter."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from naru_worker.adapters.ops.cuda.kernels.copy_blocks import WORDS_PER_PROGRAM, copy_blocks  # noqa: E402


@pytest.mark.parametrize("words", [16, WORDS_PER_PROGRAM, WORDS_PER_PROGRAM + 48])
@pytest.mark.parametrize("pairs", [[], [[1, 3]], [[1, 2], [1, 4], [5, 3]]])
def test_blocks_are_copied_whole_and_nothing_else_changes(words: int, pairs: list[list[int]]) -> None:
    blocks = torch.randint(-(2**31), 2**31 - 1, (6, words), dtype=torch.int32)
    expected = blocks.clone()
    for source, destination in pairs:
        expected[destination] = blocks[source]
    copy_blocks(blocks, torch.tensor(pairs, dtype=torch.int32).reshape(-1, 2))
    assert torch.equal(blocks, expected)
