"""Models in other quantizers' layouts answer as the same models with plain weights do, on every backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backends import BACKENDS, load
from batches import all_logits, greedy
from quantized_models import SCHEMES, SPEC, write_quantized
from safetensors.numpy import save_file
from tiny_models import write_model

transformers = pytest.importorskip("transformers", reason="parity is measured against transformers")
torch = pytest.importorskip("torch", reason="transformers needs torch")

pytestmark = pytest.mark.torch

TOLERANCES = {"ref": 2e-3, "cpu": 0.04}
"""Of the largest logit. Scales and minimums have 16 bits; on the CPU activations have 8, as with any 4-bit weights."""


def plain_twin(folder: Path, weights: dict[str, Any]) -> Path:
    """A folder of plain weights."""
    folder.mkdir()
    write_model(folder, SPEC)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SCHEMES)
def test_logits_are_those_of_the_weights_that_were_meant(tmp_path: Path, backend: str, name: str) -> None:
    twin = plain_twin(tmp_path / "plain", write_quantized(tmp_path / "quantized", SCHEMES[name]))
    ids = np.random.default_rng(3).integers(0, 259, 40).tolist()
    runner, reference = load(backend, tmp_path / "quantized"), load("ref", twin)
    ours, expected = all_logits(runner, ids), all_logits(reference, ids)
    assert np.abs(ours - expected).max() <= TOLERANCES[backend] * np.abs(expected).max()
    runner.close()
    reference.close()


@pytest.mark.parametrize("name", ["gptq, groups of 64 with zeros", "floats, scales of blocks"])
def test_greedy_answers_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    twin = plain_twin(tmp_path / "plain", write_quantized(tmp_path / "quantized", SCHEMES[name]))
    model = transformers.AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32, attn_implementation="eager")
    prompts = [[5, 6, 7, 8], list(range(20, 60))]
    runner = load("ref", tmp_path / "quantized")
    for prompt, answer in zip(prompts, greedy(runner, prompts, 8)[0], strict=True):
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert answer == expected[0, len(prompt) :].tolist()
    runner.close()
