"""Whole steps of the backend under Triton's interpreter, against the reference backend on the same weights."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from batches import Lane, all_logits, alone_and_together, batch_of, greedy, lanes_for  # noqa: E402
from memory_models import LEARNED, MemoryCheckpoint, checkpoint_of, config_of  # noqa: E402
from sampling_batches import greedy_batch  # noqa: E402

from naru_proto.errors import InternalError  # noqa: E402
from naru_worker.adapters.ops import ref  # noqa: E402
from naru_worker.adapters.ops.cuda import backend  # noqa: E402
from naru_worker.adapters.ops.cuda.runner import CudaRunner  # noqa: E402
from naru_worker.adapters.ops.protocol import KVFormat, Runner, RunnerOptions  # noqa: E402
from naru_worker.core.model_config import RopeConfig  # noqa: E402

MODELS: dict[str, tuple[MemoryCheckpoint, KVFormat]] = {
    "floats": (checkpoint_of(config_of(num_layers=1, num_heads=6, num_kv_heads=2, tie_word_embeddings=True)), "f32"),
    "quantized": (
        checkpoint_of(
            config_of(num_layers=1, hidden_size=256, intermediate_size=256, num_heads=8, head_dim=32),
            {"v": "q6_k", "embed": "q8_0"},
            "q4_k",
        ),
        "f32",
    ),
    "learned positions": (checkpoint_of(config_of(**LEARNED, num_layers=1)), "f32"),
    "heads normed": (checkpoint_of(config_of(num_layers=1, head_dim=32, qk_norm=True)), "f32"),
    "windows": (checkpoint_of(config_of(num_layers=2, sliding_windows=(8, None))), "f32"),
    "half a head rotated, bytes": (
        checkpoint_of(
            config_of(num_layers=1, head_dim=32, rope=RopeConfig(theta=1e4, rotary_dim=16), qkv_bias=True),
            default="q4_1",
        ),
        "int8",
    ),
}


SLOW = [pytest.mark.gpu_offline]


def runners(name: str) -> tuple[CudaRunner, Runner]:
    checkpoint, kv_format = MODELS[name]
    options = RunnerOptions(16, 40, 256, 16, 256, kv_format=kv_format)
    return backend.load_runner(checkpoint, options), ref.load_runner(checkpoint, options)


def computed(runner: Runner) -> list[list[float]]:
    """Logits of chunks of prompts, alone and together, then of generated tokens beside a chunk."""
    first, second, third = lanes_for([[5, 6, 7] * 3, [9] * 17, list(range(20, 42))], 16, 4)
    found: list[list[float]] = []

    def step(*rows: tuple[Lane, int]) -> None:
        found.extend(runner.logits(batch_of(rows, 16, every_logit=True)).tolist())
        for lane, count in rows:
            lane.num_computed += count

    step((first, 9))
    step((second, 16), (third, 15))
    step((second, 1))
    for lane in (first, second):
        lane.token_ids += [11, 12]
    step((first, 2), (second, 1), (third, 7))
    return found


@pytest.mark.parametrize("name", [pytest.param(each, marks=SLOW * (each != "quantized")) for each in MODELS])
def test_chunks_and_mixed_steps_agree_with_the_reference(name: str) -> None:
    ours, expected = (np.array(computed(runner)) for runner in runners(name))
    assert np.abs(ours - expected).max() < 2e-3 * np.abs(expected).max()


@pytest.mark.gpu_offline
@pytest.mark.parametrize("name", ["floats", "quantized", "heads normed"])
def test_greedy_answers_are_the_references(name: str) -> None:
    prompts = [[1, 2, 3], [7] * 20]
    ours, expected = (greedy(runner, prompts, 6)[0] for runner in runners(name))
    assert ours == expected


@pytest.mark.gpu_offline
def test_a_quantized_models_answers_do_not_depend_on_the_batch() -> None:
    runner, _ = runners("quantized")
    lanes = lanes_for([[3] * 15, [4] * 16, [6] * 33], 16, 2)
    alone, together = alone_and_together(runner, lanes, 16)
    assert np.array_equal(alone, together)
    ids = list(range(20))
    # The interpreter's products are numpy's, whose bits may depend on a row's place in its tile.
    assert np.allclose(all_logits(runner, ids), all_logits(runner, ids, chunk=7), atol=1e-5)


def test_a_step_samples_and_gives_hidden_states() -> None:
    found = []
    for runner in runners("floats"):
        [lane] = lanes_for([[5, 6, 7]], 16, 1)
        batch = batch_of([(lane, 3)], 16)
        output = runner.run(batch, replace(greedy_batch(1, 97), wants_hidden=True))
        assert output.hidden is not None
        assert output.token_ids.tolist() == runner.logits(batch).argmax(1).tolist()
        found.append(output.hidden.copy())
    assert np.allclose(found[0], found[1], atol=1e-4)


@pytest.mark.parametrize("copies", [[[1, 3]], [[1, 3], [3, 4]], [[3, 5], [1, 3]], [[1, 3], [2, 3]]])
def test_copies_are_made_in_their_order(copies: list[list[int]]) -> None:
    runner, _ = runners("floats")
    runner._words[:] = torch.randint(0, 2**31 - 1, runner._words.shape, dtype=torch.int32)
    expected = runner._words.clone()
    for source, destination in copies:
        expected[destination] = expected[source]
    [lane] = lanes_for([[5]], 16, 0)
    lane.blocks = [30]
    runner.logits(replace(batch_of([(lane, 1)], 16), copies=np.array(copies, np.int32)))
    assert torch.equal(runner._words[:30], expected[:30])


def test_bytes_are_known_before_loading() -> None:
    for name, (checkpoint, kv_format) in MODELS.items():
        options = RunnerOptions(16, 40, 256, 16, 256, kv_format=kv_format)
        runner, _ = runners(name)
        assert runner.weight_bytes == backend.weight_bytes(checkpoint) == held_bytes(runner._weights)
        assert runner.kv_bytes == 40 * backend.kv_block_bytes(checkpoint.config, options) == runner._words.nbytes


def held_bytes(weights: Any, seen: set[int] | None = None) -> int:
    """Bytes of all tensors somewhere in a structure, each once."""
    seen = set() if seen is None else seen
    if isinstance(weights, torch.Tensor):
        is_new = weights.data_ptr() not in seen
        seen.add(weights.data_ptr())
        return weights.nbytes if is_new else 0
    if is_dataclass(weights):
        return sum(held_bytes(getattr(weights, each.name), seen) for each in fields(weights))
    return sum(held_bytes(each, seen) for each in weights) if isinstance(weights, tuple) else 0


def test_a_closed_runner_and_blocks_outside_the_cache_are_refused() -> None:
    runner, _ = runners("floats")
    with pytest.raises(InternalError, match="lie outside the 40"):
        runner.release_blocks(39, 2)
    runner.release_blocks(38, 2)
    runner.close()
    [lane] = lanes_for([[5]], 16, 0)
    with pytest.raises(InternalError, match="closed"):
        runner.logits(batch_of([(lane, 1)], 16))
    with pytest.raises(InternalError, match="closed"):
        runner.release_blocks(0, 1)
