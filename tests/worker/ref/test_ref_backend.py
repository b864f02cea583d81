"""The oracle itself: what the cache holds, what it does not read, and what it says of its size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backends import load
from batches import all_logits, batch_of, greedy, lanes_for
from gguf_builder import model_file
from tiny_models import TinySpec, weights_of

from naru_proto.errors import InternalError
from naru_worker.adapters.ops.protocol import RunnerOptions
from naru_worker.adapters.weights.opening import open_checkpoint

torch = pytest.importorskip("torch", reason="the ref backend is written in torch")

pytestmark = pytest.mark.torch

LLAMA = TinySpec(tied=True)
IDS = list(range(40, 80))
OPTIONS = RunnerOptions(block_size=16, num_blocks=64, max_num_tokens=512, max_num_seqs=32, max_model_len=1024)


@pytest.fixture
def runner(tiny_model: Callable[[TinySpec], Path]) -> Any:
    return load("ref", tiny_model(LLAMA))


def test_what_was_never_written_is_never_read(runner: Any) -> None:
    clean = all_logits(runner, IDS, chunk=7)
    runner._ops.cache.fill_(float("nan"))
    assert np.array_equal(all_logits(runner, IDS, chunk=7), clean)


def test_sequences_of_one_batch_do_not_see_one_another(runner: Any) -> None:
    prompts = [IDS[:5], IDS[10:13], IDS[20:40]]
    together = lanes_for(prompts, 16, 0)
    logits = runner.logits(batch_of([(lane, len(lane.token_ids)) for lane in together], 16))
    for row, prompt in zip(logits, prompts, strict=True):
        np.testing.assert_allclose(row, all_logits(runner, prompt)[-1], atol=1e-4)


def test_a_copied_block_is_the_block(runner: Any) -> None:
    expected, _ = greedy(runner, [IDS[:20]], 4)
    [lane] = lanes_for([IDS[:20]], 16, 4)
    runner.logits(batch_of([(lane, 19)], 16))
    lane.num_computed = 19
    copy = 60
    batch = batch_of([(lane, 1)], 16)
    moved = replace(
        batch,
        block_table=np.array([[lane.blocks[0], copy]], np.int32),
        slots=np.array([copy * 16 + 3], np.int32),
        copies=np.array([[lane.blocks[1], copy]], np.int32),
    )
    assert int(runner.logits(moved)[0].argmax()) == expected[0][0]


def test_released_blocks_are_empty_and_serve_again(runner: Any) -> None:
    clean = all_logits(runner, IDS)
    runner._ops.cache.fill_(1.0)
    runner.release_blocks(2, 5)
    assert not runner._ops.cache[:, :, 2:7].any()
    assert runner._ops.cache[:, :, [1, 7]].all()
    assert np.array_equal(all_logits(runner, IDS), clean)
    with pytest.raises(InternalError, match="outside the 64"):
        runner.release_blocks(60, 5)


def test_half_precision_keys_stay_close(tiny_model: Callable[[TinySpec], Path]) -> None:
    folder = tiny_model(LLAMA)
    exact, half = load("ref", folder), load("ref", folder, kv_format="f16")
    np.testing.assert_allclose(all_logits(half, IDS), all_logits(exact, IDS), atol=0.1)
    assert half.kv_bytes * 2 == exact.kv_bytes


def test_sizes_are_told_before_loading_and_kept(tiny_model: Callable[[TinySpec], Path]) -> None:
    from naru_worker.adapters.ops import ref

    folder = tiny_model(LLAMA)
    checkpoint = open_checkpoint(folder)
    runner: Any = load("ref", folder)
    assert ref.weight_bytes(checkpoint) == runner.weight_bytes == sum(w.nbytes for w in weights_of(LLAMA).values())
    assert ref.kv_block_bytes(checkpoint.config, OPTIONS) == 16 * 2 * 2 * 2 * 16 * 2
    exact = replace(OPTIONS, kv_format="f32")
    assert runner.kv_bytes == 64 * ref.kv_block_bytes(checkpoint.config, exact) == runner._ops.cache.nbytes
    small: Any = load("ref", folder, kv_format="int8")
    assert small.kv_bytes == small._ops.cache.nbytes + small._ops.scales.nbytes


def test_a_tied_head_shares_the_embedding(runner: Any) -> None:
    assert runner._weights.lm_head.weight.data_ptr() == runner._weights.embed.data_ptr()


@pytest.mark.parametrize(
    "spec",
    [TinySpec(), TinySpec("qwen2"), TinySpec("gpt2", num_kv_heads=4)],
    ids=["llama", "qwen2", "gpt2"],
)
def test_gguf_and_folder_give_the_same_logits(
    tmp_path: Path, tiny_model: Callable[[TinySpec], Path], spec: TinySpec
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(model_file(spec))
    ours, gguf = load("ref", tiny_model(spec)), load("ref", path)
    np.testing.assert_allclose(all_logits(gguf, IDS), all_logits(ours, IDS), atol=1e-5)


def test_a_closed_runner_refuses(runner: Any) -> None:
    [lane] = lanes_for([IDS], 16, 0)
    runner.close()
    with pytest.raises(RuntimeError, match="closed"):
        runner.logits(batch_of([(lane, len(IDS))], 16))
