"""Mixtures of experts on the reference backend: logits and greedy answers are transformers', GGUF's are folders'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backends import load
from batches import all_logits, greedy
from tiny_experts import Kind, expert_gguf, write_experts

transformers = pytest.importorskip("transformers", reason="parity is measured against transformers")
torch = pytest.importorskip("torch", reason="transformers needs torch")

pytestmark = pytest.mark.torch

MODELS: dict[str, tuple[Kind, dict[str, Any]]] = {
    "mixtral": ("mixtral", {}),
    "mixtral, one expert of all": ("mixtral", {"num_experts_per_tok": 4}),
    "qwen3, one plain layer": ("qwen3_moe", {"plain_layers": (0,)}),
    "qwen3, weights as they are, biases absent": ("qwen3_moe", {"norm_topk_prob": False, "attention_bias": False}),
    "qwen2, one shared": ("qwen2_moe", {}),
}
IDS = np.random.default_rng(3).integers(0, 256, 70).tolist()


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_answers_are_the_references(name: str, tmp_path: Path) -> None:
    kind, extra = MODELS[name]
    write_experts(tmp_path, kind, **extra)
    reference, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"], "the tiny model is not what transformers reads"
    runner = load("ref", tmp_path)
    with torch.inference_mode():
        expected = reference(torch.tensor([IDS])).logits[0].numpy()
        answer = reference.generate(torch.tensor([IDS[:20]]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    np.testing.assert_allclose(all_logits(runner, IDS), expected, atol=1e-4, rtol=0)
    np.testing.assert_allclose(all_logits(runner, IDS, 13), expected, atol=1e-4, rtol=0)
    assert greedy(runner, [IDS[:20]], 8)[0] == answer[:, 20:].tolist()
    runner.close()


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_gguf_and_folder_give_the_same_logits(kind: Kind, tmp_path: Path) -> None:
    write_experts(tmp_path, kind)
    path = tmp_path / "m.gguf"
    path.write_bytes(expert_gguf(kind))
    folder, file = load("ref", tmp_path), load("ref", path)
    np.testing.assert_allclose(all_logits(file, IDS), all_logits(folder, IDS), atol=1e-5)
