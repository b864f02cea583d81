"""Models in other quantizers' layouts under Triton's interpreter, against the reference backend on the same folders."""

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

from batches import Lane, batch_of  # noqa: E402
from quantized_models import SCHEMES, write_quantized  # noqa: E402

from naru_worker.adapters.models.decoder import load_weights  # noqa: E402
from naru_worker.adapters.ops import ref  # noqa: E402
from naru_worker.adapters.ops.cuda import backend  # noqa: E402
from naru_worker.adapters.ops.cuda.checkpoint_weights import DeviceWeights, WeightSizer  # noqa: E402
from naru_worker.adapters.ops.cuda.device import open_gpu  # noqa: E402
from naru_worker.adapters.ops.cuda.kernels import fp8_linear  # noqa: E402
from naru_worker.adapters.ops.cuda.runner import CudaRunner  # noqa: E402
from naru_worker.adapters.ops.cuda.weights import LinearWeight  # noqa: E402
from naru_worker.adapters.ops.protocol import FloatArray, Runner, RunnerOptions  # noqa: E402
from naru_worker.adapters.weights.opening import open_checkpoint  # noqa: E402

OPTIONS = RunnerOptions(16, 16, 64, 4, 128, kv_format="f32")
HOPPER = replace(open_gpu(), capability=(9, 0))
"""The interpreter as a GPU that multiplies 8-bit floats."""
QUICK = ("gptq, groups of 128", "awq, groups of 64", "floats, scales of blocks")


def computed(runner: Runner) -> FloatArray:
    """Logits of a prompt, and of a token behind it."""
    lane = Lane([5, 6, 7, 8, 9, 10], [2])
    found = [runner.logits(batch_of([(lane, 5)], 16, every_logit=True)).copy()]
    lane.num_computed, lane.num_prompt_tokens = 5, 5
    found.append(runner.logits(batch_of([(lane, 1)], 16)).copy())
    runner.close()
    return np.concatenate(found)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.gpu_offline] * (each not in QUICK)) for each in SCHEMES]
)
def test_logits_are_the_references(tmp_path: Path, name: str) -> None:
    write_quantized(tmp_path, SCHEMES[name])
    ours = computed(backend.load_runner(open_checkpoint(tmp_path), OPTIONS))
    expected = computed(ref.load_runner(open_checkpoint(tmp_path), OPTIONS))
    assert np.abs(ours - expected).max() < 2e-3 * np.abs(expected).max()


@pytest.mark.parametrize(
    "name", ["floats, scales of rows", pytest.param("floats, one scale", marks=pytest.mark.gpu_offline)]
)
def test_8_bit_floats_on_both_sides_where_a_gpu_multiplies_them(tmp_path: Path, name: str) -> None:
    write_quantized(tmp_path, SCHEMES[name])
    checkpoint = open_checkpoint(tmp_path)
    ours = computed(CudaRunner(HOPPER, checkpoint, OPTIONS, _num_bytes((9, 0), tmp_path)))
    expected = computed(ref.load_runner(open_checkpoint(tmp_path), OPTIONS))
    # Activations have 8 bits, three of mantissa.
    assert np.abs(ours - expected).max() < 0.05 * np.abs(expected).max()


def test_norms_and_activations_round_for_the_product_behind_them_and_change_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_quantized(tmp_path, SCHEMES["floats, scales of rows"])
    passes: list[int] = []

    def counted(x: Any) -> Any:
        passes.append(len(x))
        return quantize_rows(x)

    quantize_rows = fp8_linear.quantize_rows
    monkeypatch.setattr(fp8_linear, "quantize_rows", counted)
    num_layers, found = open_checkpoint(tmp_path).config.num_layers, {}
    for rounds in (True, False):
        if not rounds:
            monkeypatch.setattr(LinearWeight, "takes_fp8", False)
        passes.clear()
        logits = computed(CudaRunner(HOPPER, open_checkpoint(tmp_path), OPTIONS, _num_bytes((9, 0), tmp_path)))
        found[rounds] = (logits, len(passes))
    np.testing.assert_array_equal(found[True][0], found[False][0])
    # In two steps: what attention gives, before `o`; else what goes into `qkv`, `up` and `down`, too.
    assert [number for _, number in found.values()] == [2 * num_layers, 8 * num_layers]


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize("name", SCHEMES)
def test_what_is_loaded_takes_the_bytes_that_were_counted(
    tmp_path: Path, name: str, capability: tuple[int, int]
) -> None:
    write_quantized(tmp_path, SCHEMES[name])
    placed: list[int] = []

    def place(tensor: Any) -> Any:
        placed.append(tensor.nbytes)
        return tensor

    packing = DeviceWeights(replace(open_gpu(), capability=capability), place)
    load_weights(packing, open_checkpoint(tmp_path))  # type: ignore[arg-type]  # the weight half of the protocol
    assert sum(placed) == _num_bytes(capability, tmp_path)
    assert packing.products == _sized(capability, tmp_path).products


def test_the_log_says_once_why_8_bit_floats_are_multiplied_otherwise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    found = {}
    for name, gpu in (
        ("floats, scales of rows", open_gpu()),
        ("floats, scales of rows", HOPPER),
        ("floats, scales of blocks", HOPPER),
        ("gptq, groups of 128", open_gpu()),
    ):
        write_quantized(tmp_path, SCHEMES[name])
        CudaRunner(gpu, open_checkpoint(tmp_path), OPTIONS, _num_bytes(gpu.capability, tmp_path)).close()
        found[name, gpu.capability] = [r.getMessage() for r in caplog.records if "FP8" in r.getMessage()]
        caplog.clear()
    assert list(found.values()) == [
        [
            "compute capability 8.0 has no tensor cores for 8-bit floats (8.9 and newer have): FP8 weights are "
            "multiplied with 16-bit activations (7 matrices)"
        ],
        [],
        ["scales of blocks of columns: FP8 weights are multiplied with 16-bit activations (7 matrices)"],
        [],
    ]


def _num_bytes(capability: tuple[int, int], folder: Path) -> int:
    return _sized(capability, folder).num_bytes


def _sized(capability: tuple[int, int], folder: Path) -> WeightSizer:
    sizer = WeightSizer(torch.float32, capability)
    load_weights(sizer, open_checkpoint(folder))  # type: ignore[arg-type]  # the weight half of the protocol
    return sizer
