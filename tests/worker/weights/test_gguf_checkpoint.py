"""GGUF metadata becomes the model's config, or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_builder import build, f32, model_file, model_metadata, model_tensors
from tiny_models import TinySpec

from naru_proto.errors import LoadError
from naru_worker.adapters.weights.mapped_checkpoint import MappedCheckpoint
from naru_worker.adapters.weights.opening import open_checkpoint
from naru_worker.core.rope import inverse_frequencies

LLAMA = TinySpec()


def gguf_with(folder: Path, **extra: Any) -> MappedCheckpoint:
    path = folder / "m.gguf"
    keys = {name.replace("__", "."): item for name, item in extra.items()}
    path.write_bytes(model_file(LLAMA, keys))
    return open_checkpoint(path)


@pytest.mark.parametrize(
    ("key", "item"),
    [
        ("general.architecture", "mamba"),
        ("general.architecture", 3),
        ("llama.block_count", 0),
        ("llama.block_count", 2**31),
        ("llama.block_count", 3),
        ("llama.embedding_length", 128),
        ("llama.attention.head_count", 3),
        ("llama.attention.head_count", [4, 2]),
        ("llama.attention.head_count_kv", 3),
        ("llama.attention.value_length", 8),
        ("llama.expert_count", 8),
        ("split.count", 2),
        ("llama.rope.dimension_count", 8),
        ("llama.rope.freq_base", -1.0),
        ("llama.rope.scaling.type", "mystery"),
        ("llama.attention.scale", 0.5),
        ("llama.context_length", 2**31),
        ("tokenizer.ggml.eos_token_id", -1),
    ],
)
def test_gguf_metadata_that_cannot_be_served_is_refused(tmp_path: Path, key: str, item: Any) -> None:
    with pytest.raises(LoadError):
        gguf_with(tmp_path, **{key.replace(".", "__"): item})


def test_gguf_rope_scaling_is_read(tmp_path: Path) -> None:
    scaling = {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 4.0}
    config = gguf_with(tmp_path, **scaling, llama__rope__scaling__original_context_length=64).config
    assert config.rope is not None
    assert (config.rope.kind, config.rope.factor, config.max_position_embeddings) == ("yarn", 4.0, 256)
    linear = gguf_with(tmp_path, llama__rope__scaling__type="linear", llama__rope__scaling__factor=2.0).config.rope
    assert linear is not None and (linear.kind, linear.factor) == ("linear", 2.0)


def test_gguf_frequency_table_divides_the_frequencies(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    path = tmp_path / "m.gguf"
    path.write_bytes(build(model_metadata(LLAMA), [*model_tensors(LLAMA), f32("rope_freqs.weight", factors)]))
    checkpoint = open_checkpoint(path)
    rope = checkpoint.config.rope
    assert rope is not None
    plain = np.array([10000.0 ** (-i / 8) for i in range(8)])
    np.testing.assert_allclose(inverse_frequencies(rope), plain / factors, rtol=1e-6)
    assert checkpoint.ignored_tensors == ()
    path.write_bytes(build(model_metadata(LLAMA), [*model_tensors(LLAMA), f32("rope_freqs.weight", factors[:7])]))
    with pytest.raises(LoadError, match=r"rope_freqs.weight has 7 values; 8 are needed"):
        open_checkpoint(path)


def test_gguf_takes_end_of_turn_control_tokens_as_eos(tmp_path: Path) -> None:
    assert gguf_with(tmp_path).config.eos_token_ids == (256, 258)
    assert gguf_with(tmp_path, tokenizer__ggml__eot_token_id=7).config.eos_token_ids == (7, 256, 258)
