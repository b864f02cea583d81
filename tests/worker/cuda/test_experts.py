"""Mixtures of experts on the backend, under Triton's interpreter, against the reference backend on the same weights."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from batches import all_logits, alone_and_together, batch_of, greedy, lanes_for  # noqa: E402
from gguf_builder import Q4_0  # noqa: E402
from memory_models import MemoryCheckpoint, checkpoint_of, config_of, random_tensor  # noqa: E402
from tiny_experts import expert_gguf  # noqa: E402

from naru_proto.errors import LoadError  # noqa: E402
from naru_worker.adapters.ops import ref  # noqa: E402
from naru_worker.adapters.ops.cuda import backend  # noqa: E402
from naru_worker.adapters.ops.cuda.expert_weights import expert_bytes, pack_experts  # noqa: E402
from naru_worker.adapters.ops.cuda.experts import mix_experts, mixing_bytes  # noqa: E402
from naru_worker.adapters.ops.cuda.kernels.group_layout import GroupRows  # noqa: E402
from naru_worker.adapters.ops.cuda.weights import DenseRows  # noqa: E402
from naru_worker.adapters.ops.protocol import RawTensor, Runner, RunnerOptions, TensorFormat  # noqa: E402
from naru_worker.adapters.ops.ref_dequant import dequantize  # noqa: E402
from naru_worker.adapters.weights.opening import open_checkpoint  # noqa: E402
from naru_worker.core.model_config import ExpertsConfig  # noqa: E402

SLOW = [pytest.mark.gpu_offline]
HIDDEN, INNER = 64, 32
EXPERTS = ExpertsConfig(num_experts=5, num_chosen=2, inner_size=INNER, renormalizes=True, layers=(0,))
OPTIONS = RunnerOptions(16, 40, 256, 16, 256, kv_format="f32")
MODELS: dict[str, MemoryCheckpoint] = {
    "mixtral": checkpoint_of(config_of(architecture="mixtral", num_layers=1, experts=EXPERTS)),
    "mixtral, quantized": checkpoint_of(
        config_of(architecture="mixtral", num_layers=1, experts=EXPERTS), {"down": "q8_0"}, "q4_0"
    ),
    "qwen 3, one plain layer": checkpoint_of(
        config_of(
            architecture="qwen3moe",
            qk_norm=True,
            experts=replace(EXPERTS, renormalizes=False, layers=(1,), num_chosen=3),
        )
    ),
    "qwen 2, one shared, formats mixed": checkpoint_of(
        config_of(architecture="qwen2moe", num_layers=1, qkv_bias=True, experts=replace(EXPERTS, shared_size=96)),
        {"up": "q8_0"},
        "q4_1",
    ),
}


def runners(name: str) -> tuple[Runner, Runner]:
    return backend.load_runner(MODELS[name], OPTIONS), ref.load_runner(MODELS[name], OPTIONS)


def computed(runner: Runner) -> Any:
    """Logits of a chunk of a prompt, then of a generated token beside the rest of it and another prompt."""
    first, second = lanes_for([[5, 6, 7] * 3, list(range(20, 42))], 16, 4)
    found = [runner.logits(batch_of([(first, 9)], 16, every_logit=True)).copy()]
    first.num_computed = 9
    first.token_ids.append(11)
    found.append(runner.logits(batch_of([(first, 1), (second, 22)], 16, every_logit=True)).copy())
    return np.concatenate(found)


@pytest.mark.parametrize("name", [pytest.param(each, marks=SLOW * (each != "mixtral, quantized")) for each in MODELS])
def test_mixed_steps_agree_with_the_reference(name: str) -> None:
    ours, expected = (computed(runner) for runner in runners(name))
    assert np.abs(ours - expected).max() < 2e-3 * np.abs(expected).max()


@pytest.mark.gpu_offline
def test_greedy_answers_are_the_references() -> None:
    ours, expected = (greedy(runner, [[1, 2, 3], [7] * 20], 6)[0] for runner in runners("qwen 3, one plain layer"))
    assert ours == expected


@pytest.mark.gpu_offline
def test_answers_do_not_depend_on_the_batch_where_weights_are_quantized() -> None:
    runner, _ = runners("mixtral, quantized")
    alone, together = alone_and_together(runner, lanes_for([[3] * 15, [4] * 16, [6] * 33], 16, 2), 16)
    assert np.array_equal(alone, together)
    ids = list(range(20))
    assert np.allclose(all_logits(runner, ids), all_logits(runner, ids, chunk=7), atol=1e-5)


@pytest.mark.gpu_offline
def test_a_gguf_files_quantized_experts_answer_as_on_the_reference(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(expert_gguf("qwen3_moe", types={"_exps.weight": Q4_0}))
    ours, expected = (computed(each.load_runner(open_checkpoint(path), OPTIONS)) for each in (backend, ref))
    assert np.abs(ours - expected).max() < 2e-3 * np.abs(expected).max()


def test_bytes_of_all_experts_are_known_before_loading() -> None:
    for name, checkpoint in MODELS.items():
        runner, _ = runners(name)
        space = runner._space  # type: ignore[attr-defined]
        assert runner.weight_bytes == backend.weight_bytes(checkpoint)
        # Gaps between tensors are below 256 bytes each; no layer has more than 40.
        assert 0 <= space._end - runner.weight_bytes < 256 * 40 * (checkpoint.config.num_layers + 1)
    checkpoint = MODELS["mixtral"]
    config, without = checkpoint.config, checkpoint_of(replace(checkpoint.config, experts=None))
    # 256 tokens, two experts each: 8 tiles of 64 rows and one more for each expert but the first.
    more = (8 + 4) * 64 * (3 * INNER + HIDDEN)
    assert mixing_bytes(256, config, 2) == 2 * more and mixing_bytes(256, without.config, 2) == 0
    # The interpreter's activations have four bytes.
    taken = [backend.runner_bytes(each, OPTIONS).workspace_bytes for each in (checkpoint, without)]
    assert taken[0] - taken[1] == 4 * more


def parts_of(tensor_format: TensorFormat = "f32", down: TensorFormat | None = None) -> tuple[Any, Any]:
    """Gate and up, and down, of five experts."""
    rng = np.random.default_rng(0)

    def one(name: str, shape: tuple[int, int], kind: TensorFormat = tensor_format) -> RawTensor:
        return random_tensor(name, kind, shape, rng)[0]

    ups = [[one(f"{e}.gate", (INNER, HIDDEN)), one(f"{e}.up", (INNER, HIDDEN))] for e in range(5)]
    return ups, [[one(f"{e}.down", (HIDDEN, INNER), down or tensor_format)] for e in range(5)]


@pytest.mark.parametrize(("favourites", "regime"), [((2, 4), "generated"), ((1, 0), "prompt")])
def test_all_tokens_may_go_to_the_same_experts(favourites: tuple[int, int], regime: Any) -> None:
    """So that all others are empty."""
    ups, downs = parts_of()
    x = torch.randn(33, HIDDEN)
    router = torch.zeros(5, HIDDEN)
    x[:, 0], router[favourites[0], 0], router[favourites[1], 0] = 9.0, 2.0, 1.9
    up, down = pack_experts(ups, torch.float32), pack_experts(downs, torch.float32)
    residual = torch.randn(33, HIDDEN)
    expected = residual.clone()
    for expert, weight in zip(favourites, torch.tensor([18.0, 17.1]).softmax(-1).tolist(), strict=True):
        gate, high = (x @ torch.from_numpy(dequantize(part)).T for part in ups[expert])
        inner = torch.nn.functional.silu(gate) * high
        expected += weight * (inner @ torch.from_numpy(dequantize(downs[expert][0])).T)
    mix_experts(x, router, up, down, EXPERTS, regime=regime, residual=residual, out=residual)
    torch.testing.assert_close(residual, expected, rtol=1e-4, atol=1e-4)


def test_experts_of_one_format_stay_quantized_and_of_several_are_widened(caplog: pytest.LogCaptureFixture) -> None:
    ups, _ = parts_of("q4_0")
    packed = pack_experts(ups, torch.float32)
    assert isinstance(packed.rows, GroupRows) and packed.rows.num_rows == 5 * 2 * INNER
    assert packed.rows.quants.nbytes + packed.rows.scales.nbytes == expert_bytes(ups, torch.float32)
    assert not caplog.records
    others, _ = parts_of("q8_0")
    ups[3] = others[3]
    with caplog.at_level(logging.WARNING):
        widened = pack_experts(ups, torch.float32)
    assert "(q4_0, q8_0): they are widened to 16 bits" in caplog.text
    assert isinstance(widened.rows, DenseRows) and widened.rows.values.nbytes == expert_bytes(ups, torch.float32)
    values = torch.from_numpy(np.stack([np.concatenate([dequantize(part) for part in parts]) for parts in ups]))
    assert torch.equal(widened.operand, values)


def test_experts_of_different_shapes_are_refused() -> None:
    ups, downs = parts_of()
    ups[1] = [downs[1][0]]
    for work in (pack_experts, expert_bytes):
        with pytest.raises(LoadError, match=r"experts beside '0.gate' have different shapes"):
            work(ups, torch.float32)
