"""Runners that read their weights where an image has them: the same answers as packed ones, and nothing is believed."""

from __future__ import annotations

from dataclasses import astuple, replace
from typing import Any

import numpy as np
import pytest
from batches import all_logits, batch_of, lanes_for
from memory_image import MemoryImage, image_of
from memory_models import checkpoint_of, config_of
from sampling_batches import sampling_batch

from naru_proto.errors import LoadError
from naru_worker.adapters.ops import cpu
from naru_worker.adapters.ops.protocol import RunnerOptions, TensorFormat
from naru_worker.adapters.ops.weights_image import MatrixPlace
from naru_worker.core.model_config import ModelConfig, RopeConfig

pytestmark = pytest.mark.timeout(600)  # the first use of a variant compiles it

OPTIONS = RunnerOptions(16, 64, 256, 8, 256, num_threads=2, kv_format="f16")
BIASED: dict[str, Any] = {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "norm": "layer"}
MODELS: dict[str, tuple[ModelConfig, dict[str, TensorFormat], TensorFormat]] = {
    "tied": (config_of(tie_word_embeddings=True), {"embed": "q8_0"}, "q4_1"),
    "mixed": (config_of(head_dim=32), {"k": "f16", "lm_head": "q8_0"}, "q4_0"),
    "super-blocks": (
        config_of(hidden_size=256, intermediate_size=256, head_dim=64),
        {"v": "q6_k", "down": "q6_k", "lm_head": "q6_k"},
        "q4_k",
    ),
    "heads normed": (config_of(head_dim=32, qk_norm=True), {}, "q8_0"),
    "biases": (config_of(**BIASED), {}, "bf16"),
    "learned": (config_of(**BIASED, architecture="gpt2", activation="gelu_tanh", rope=None), {}, "f32"),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_samples_equal_those_of_packed_weights(variant: str, name: str) -> None:
    config, formats, default = MODELS[name]
    checkpoint = checkpoint_of(config, formats, default)
    image = image_of(checkpoint)
    packed = cpu.load_runner(checkpoint, OPTIONS, variant)
    pointed = cpu.load_image_runner(image, OPTIONS, variant=variant)
    ids = np.random.default_rng(1).integers(0, config.vocab_size, 90).tolist()
    for chunk, are_generated in ((None, False), (13, False), (1, True)):
        expected = all_logits(packed, ids, chunk, are_generated=are_generated)
        np.testing.assert_array_equal(all_logits(pointed, ids, chunk, are_generated=are_generated), expected)
    batch = batch_of([(lane, 20) for lane in lanes_for([ids[:20], ids[40:60]], 16, 0)], 16)
    sampling = sampling_batch([{"seed": 3, "num_logprobs": 4}, {"top_k": 7, "num_logprobs": 2}], config.vocab_size, 4)
    for expected_column, actual in zip(
        astuple(packed.run(batch, sampling)), astuple(pointed.run(batch, sampling)), strict=True
    ):
        np.testing.assert_array_equal(actual, expected_column)
    packed.close()
    pointed.close()


def test_a_runner_holds_its_image_until_it_is_closed() -> None:
    image = image_of(checkpoint_of(*MODELS["mixed"]))
    runner = cpu.load_image_runner(image, OPTIONS)
    assert runner.weight_bytes == image.num_bytes
    assert runner._image is image
    runner.close()
    assert runner._image is None


def with_segment(image: MemoryImage, names: tuple[str, ...], index: int, **changes: Any) -> None:
    place = image.matrices[names]
    segments = list(place.segments)
    segments[index] = replace(segments[index], **changes)
    image.matrices[names] = replace(place, segments=tuple(segments))


QKV = ("layers.1.q", "layers.1.k", "layers.1.v")
DOWN = ("layers.0.down",)


def _edit_place(image: MemoryImage, names: tuple[str, ...], **changes: Any) -> None:
    image.matrices[names] = replace(image.matrices[names], **changes)


EDITS: dict[str, tuple[Any, str]] = {
    "past the end": (lambda i: with_segment(i, DOWN, 0, offset=i.num_bytes // 64 * 64), "layers.0.down.*lies at"),
    "just past the end": (
        lambda i: with_segment(
            i, DOWN, 0, offset=(i.num_bytes - i.matrices[DOWN].segments[0].num_bytes) // 64 * 64 + 64
        ),
        "layers.0.down.*lies at",
    ),
    "before the start": (lambda i: with_segment(i, DOWN, 0, offset=-64), "layers.0.down.*lies at -64"),
    "far away": (lambda i: with_segment(i, DOWN, 0, offset=2**63), "lies at 9223372036854775808"),
    "not aligned": (lambda i: with_segment(i, DOWN, 0, offset=32), "lies at 32"),
    "too few bytes": (lambda i: with_segment(i, DOWN, 0, num_bytes=64), "has 64 bytes, not"),
    "too many rows": (lambda i: with_segment(i, QKV, 2, num_rows=48), r"layers.1.v.*\(48, 64\).*\(32, 64\) is needed"),
    "no rows": (lambda i: with_segment(i, QKV, 0, num_rows=0), "layers.1.q"),
    "negative rows": (lambda i: with_segment(i, QKV, 0, num_rows=-16), "layers.1.q"),
    "unknown format": (lambda i: with_segment(i, DOWN, 0, format=8), "format 8"),
    "negative format": (lambda i: with_segment(i, DOWN, 0, format=-1), "format -1"),
    "another format": (lambda i: with_segment(i, DOWN, 0, format=0), "bytes, not"),
    "a format whose blocks do not fit": (lambda i: with_segment(i, DOWN, 0, format=6), "format 6"),
    "other columns": (lambda i: _edit_place(i, DOWN, num_columns=128), r"\(64, 128\)"),
    "a part too few": (lambda i: _edit_place(i, QKV, segments=i.matrices[QKV].segments[:2]), "2 parts; 3 are needed"),
    "parts too many": (lambda i: _edit_place(i, DOWN, segments=i.matrices[DOWN].segments * 9), "9 parts; 1 are needed"),
    "no bias": (lambda i: _edit_place(i, QKV, bias_offset=-1), "bias at -1; the config asks for one"),
    "a bias before the start": (lambda i: _edit_place(i, QKV, bias_offset=-128), "bias at -128"),
    "a bias without its padding": (
        lambda i: _edit_place(i, QKV, bias_offset=(i.num_bytes - 4 * 128) // 64 * 64),
        "bias.*lies at",
    ),
    "no matrix": (lambda i: i.matrices.pop(DOWN), "no matrix"),
    "no vector": (lambda i: i.vectors.pop("final_norm"), "no vector 'final_norm'"),
    "a short vector": (lambda i: i.vectors.update(final_norm=(0, 63)), r"final_norm.*\(63,\).*\(64,\) is needed"),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_image_that_lies_is_a_load_error_that_names_the_tensor(name: str) -> None:
    edit, message = EDITS[name]
    image = image_of(checkpoint_of(config_of(qkv_bias=True), {"down": "q4_0", "gate": "q8_0"}, "f16"))
    assert isinstance(image.matrices[QKV], MatrixPlace)
    edit(image)
    with pytest.raises(LoadError, match=message):
        cpu.load_image_runner(image, OPTIONS)


def test_a_bias_that_the_config_does_not_know_is_refused() -> None:
    image = image_of(checkpoint_of(config_of()))
    _edit_place(image, DOWN, bias_offset=0)
    with pytest.raises(LoadError, match="bias at 0; the config asks for none"):
        cpu.load_image_runner(image, OPTIONS)


def test_vectors_must_lie_in_the_image_as_floats() -> None:
    image = image_of(checkpoint_of(config_of()))
    for stranger in (np.ones(64, np.float32), np.ones(64, np.float64), np.ones(128, np.float32)[::2]):
        image.vector = lambda name, stranger=stranger: stranger  # type: ignore[method-assign,misc]
        with pytest.raises(LoadError, match=r"outside the|is needed"):
            cpu.load_image_runner(image, OPTIONS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 3}, "no matrix|no vector"),
        ({"vocab_size": 98}, r"\(97, 64\).*\(98, 64\) is needed"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"vocab_size": 2**32 + 97}, "vocab_size is 4294967393"),
        ({"num_kv_heads": 0}, "num_kv_heads is 0"),
        ({"num_kv_heads": 3}, "num_heads is 4"),
        ({"num_layers": -1}, "num_layers is -1"),
        ({"sliding_windows": (4,)}, "num_layers is 2"),
        ({"sliding_windows": (4, 0)}, "sliding_windows is"),
        ({"rope": RopeConfig(theta=10000.0, rotary_dim=18)}, "rotary_dim is 18"),
        ({"rope": RopeConfig(theta=0.0, rotary_dim=16)}, "give no rotation"),
        ({"rope": RopeConfig(theta=float("nan"), rotary_dim=16)}, "give no rotation"),
        ({"rope": RopeConfig(theta=10000.0, rotary_dim=16, freq_factors=(1.0,))}, "give no rotation"),
        ({"rope": RopeConfig(theta=10000.0, rotary_dim=16, kind="linear", factor=0.0)}, "give no rotation"),
    ],
)
def test_a_config_that_does_not_fit_is_a_load_error(changes: dict[str, Any], message: str) -> None:
    image = image_of(checkpoint_of(config_of()))
    image.config = replace(image.config, **changes)
    with pytest.raises(LoadError, match=message):
        cpu.load_image_runner(image, OPTIONS)


def test_an_image_at_an_odd_address_is_refused() -> None:
    image = image_of(checkpoint_of(config_of()))
    shifted = np.zeros(image.num_bytes + 128, np.uint8)
    start = -shifted.ctypes.data % 64 + 8
    image.data = shifted[start : start + image.num_bytes]
    with pytest.raises(LoadError, match="no multiple of 64"):
        cpu.load_image_runner(image, OPTIONS)
