"""Logits of tiny random models equal transformers', on every backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backends import BACKENDS, load
from batches import all_logits
from tiny_models import TinySpec

transformers = pytest.importorskip("transformers", reason="parity is measured against transformers")
torch = pytest.importorskip("torch", reason="transformers needs torch")

pytestmark = pytest.mark.torch

TOLERANCE = 1e-4
"""Largest difference of a logit, float32 weights and KV. Logits here are of order 1."""

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

SPECS = {
    "llama": TinySpec(),
    "llama one kv head each": TinySpec(num_kv_heads=4),
    "llama 3 q heads a kv head": TinySpec(hidden_size=96, num_heads=6, num_kv_heads=2),
    "llama explicit head_dim": TinySpec(hidden_size=56, num_heads=4, num_kv_heads=2, head_dim=16),
    "mistral head_dim that does not divide": TinySpec(
        "mistral", hidden_size=56, num_heads=6, num_kv_heads=2, head_dim=16
    ),
    "llama all biases": TinySpec(bias=True),
    "llama tied": TinySpec(tied=True),
    "llama rope llama3": TinySpec(extra={"rope_scaling": LLAMA3}),
    "llama rope linear": TinySpec(extra={"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "llama rope yarn": TinySpec(extra={"rope_scaling": YARN}),
    "llama rope yarn tuned": TinySpec(
        extra={"rope_scaling": YARN | {"attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0}}
    ),
    "llama rope yarn mscale": TinySpec(extra={"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}}),
    "llama rope yarn not truncated": TinySpec(extra={"rope_scaling": YARN | {"truncate": False}}),
    "llama rope_parameters": TinySpec(extra={"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}}),
    "qwen2": TinySpec("qwen2"),
    "qwen2 tied": TinySpec("qwen2", tied=True),
    "qwen2 window switched off": TinySpec("qwen2", extra={"use_sliding_window": False, "sliding_window": 32}),
    "qwen2 windows above a layer": TinySpec(
        "qwen2",
        num_layers=3,
        extra={"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen3 tied, heads wider than hidden": TinySpec("qwen3", head_dim=32, tied=True),
    "qwen3 biases, windows above a layer": TinySpec(
        "qwen3",
        num_layers=3,
        bias=True,
        extra={"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "mistral": TinySpec("mistral"),
    "mistral window": TinySpec("mistral", extra={"sliding_window": 32}),
    "gpt2": TinySpec("gpt2", num_kv_heads=4, tied=True),
    "gpt2 exact gelu": TinySpec("gpt2", num_kv_heads=4, tied=True, extra={"activation_function": "gelu"}),
    "gpt2 untied": TinySpec("gpt2", num_kv_heads=4),
}

LENGTHS = (1, 31, 32, 33, 64, 200)


@pytest.fixture(scope="module", params=SPECS, ids=lambda name: name.replace(" ", "_"))
def model(request: pytest.FixtureRequest, tiny_model: Callable[[TinySpec], Path]) -> Path:
    return tiny_model(SPECS[request.param])


@pytest.fixture(scope="module")
def expected(model: Path) -> Callable[[list[int]], Any]:
    reference, info = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"], "the tiny model is not what transformers reads"

    def logits(ids: list[int]) -> Any:
        with torch.inference_mode():
            return reference(torch.tensor([ids])).logits[0].numpy()

    return logits


@pytest.fixture(scope="module", params=BACKENDS)
def runner(request: pytest.FixtureRequest, model: Path) -> Iterator[Any]:
    loaded = load(request.param, model)
    yield loaded
    loaded.close()


def test_logits_equal_the_reference_at_every_length(runner: Any, expected: Callable[[list[int]], Any]) -> None:
    ids = np.random.default_rng(3).integers(0, 259, max(LENGTHS)).tolist()
    for length in LENGTHS:
        np.testing.assert_allclose(all_logits(runner, ids[:length]), expected(ids[:length]), atol=TOLERANCE, rtol=0)


def test_chunks_give_the_same_logits_as_the_whole(runner: Any) -> None:
    ids = np.random.default_rng(4).integers(0, 259, 100).tolist()
    whole = all_logits(runner, ids)
    for chunk in (1, 7, 16, 17):
        np.testing.assert_allclose(all_logits(runner, ids, chunk), whole, atol=TOLERANCE, rtol=0)
