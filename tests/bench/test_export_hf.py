from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("gguf")

from bench.export_hf import ExportError, hf_tensor_name, to_bfloat16_bits, unpermute_rope


@pytest.mark.parametrize(
    ("gguf_name", "expected"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.12.attn_q.weight", "model.layers.12.self_attn.q_proj.weight"),
        ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
    ],
)
def test_every_tensor_has_its_name_in_the_other_format(gguf_name: str, expected: str) -> None:
    assert hf_tensor_name(gguf_name) == expected


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.0.ssm_in.weight", "rope_freqs.weight", ""])
def test_a_tensor_of_another_architecture_is_refused(name: str) -> None:
    with pytest.raises(ExportError, match="no counterpart"):
        hf_tensor_name(name)


def test_rotary_pairs_become_halves_within_each_head() -> None:
    rows = np.arange(8, dtype=np.float32).reshape(8, 1)  # two heads of four rows: pairs (0, 1), (2, 3) and so on
    assert unpermute_rope(rows, num_heads=2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        pytest.param(1.0, 0x3F80, id="exact"),
        pytest.param(-2.5, 0xC020, id="negative"),
        pytest.param(0.0, 0x0000, id="zero"),
        pytest.param(1.0 + 2**-8, 0x3F80, id="half way goes to even, down"),
        pytest.param(1.0 + 3 * 2**-8, 0x3F82, id="half way goes to even, up"),
        pytest.param(1.0 + 2**-8 + 2**-20, 0x3F81, id="above half way goes up"),
    ],
)
def test_bfloat16_is_rounded_to_nearest_even(value: float, bits: int) -> None:
    assert int(to_bfloat16_bits(np.array([value], dtype=np.float32))[0]) == bits
