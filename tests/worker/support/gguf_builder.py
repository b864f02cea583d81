"""Writes GGUF files byte by byte: right ones from tiny models, and wrong ones for the tests of the reader."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tiny_models import CHAT_TEMPLATE, TinySpec, byte_alphabet, weights_of

F32, F16, Q4_0, Q4_1, Q5_K, Q8_0, Q4_K, Q6_K, BF16 = 0, 1, 2, 3, 13, 8, 12, 14, 30

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Typed:
    """A metadata value with its type number given, for types the plain Python ones do not say."""

    kind: int
    raw: bytes


@dataclass(frozen=True)
class GgufTensor:
    """One tensor. `offset` None: right after the one before, aligned."""

    name: str
    shape: tuple[int, ...]
    kind: int
    data: bytes
    offset: int | None = None


def string(text: str | bytes) -> bytes:
    """A length-prefixed string."""
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(item: Any) -> bytes:
    """A typed value: type number, then the value."""
    if isinstance(item, Typed):
        return struct.pack("<I", item.kind) + item.raw
    if isinstance(item, list):
        inner = [value(x) for x in item]
        kind = inner[0][:4] if inner else struct.pack("<I", 4)
        return struct.pack("<I", 9) + kind + struct.pack("<Q", len(item)) + b"".join(x[4:] for x in inner)
    if isinstance(item, bool):
        return struct.pack("<I?", 7, item)
    if isinstance(item, int):
        return struct.pack("<Ii", 5, item) if item < 0 else struct.pack("<II", 4, item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    return struct.pack("<I", 8) + string(item)


def build(
    metadata: Mapping[str, Any],
    tensors: Sequence[GgufTensor] = (),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_tensors: int | None = None,
    num_keys: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A whole file; counts may lie."""
    out = magic + struct.pack(
        "<IQQ",
        version,
        len(tensors) if num_tensors is None else num_tensors,
        len(metadata) if num_keys is None else num_keys,
    )
    for key, item in metadata.items():
        out += string(key) + value(item)
    data = b""
    for tensor in tensors:
        data += bytes(-len(data) % alignment)
        offset = len(data) if tensor.offset is None else tensor.offset
        out += string(tensor.name) + struct.pack("<I", len(tensor.shape))
        out += struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape))
        out += struct.pack("<IQ", tensor.kind, offset)
        data += tensor.data
    return out + bytes(-len(out) % alignment) + data


def f32(name: str, values: Array) -> GgufTensor:
    """A float32 tensor."""
    return GgufTensor(name, values.shape, F32, values.astype("<f4").tobytes())


def byte_level_tokenizer(pre: str = "gpt-2") -> dict[str, Any]:
    """The same vocabulary as the tiny folders have."""
    tokens = [*byte_alphabet(), "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [3] * 3,
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 256,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def model_metadata(spec: TinySpec) -> dict[str, Any]:
    """Metadata of a tiny model, tokenizer included."""
    arch = "llama" if spec.model_type == "mistral" else spec.model_type
    metadata: dict[str, Any] = {
        "general.architecture": arch,
        f"{arch}.block_count": spec.num_layers,
        f"{arch}.context_length": spec.max_positions,
        f"{arch}.embedding_length": spec.hidden_size,
        f"{arch}.feed_forward_length": spec.intermediate_size,
        f"{arch}.attention.head_count": spec.num_heads,
    }
    if arch == "gpt2":
        metadata[f"{arch}.attention.layer_norm_epsilon"] = 1e-5
    else:
        metadata |= {
            f"{arch}.attention.head_count_kv": spec.num_kv_heads,
            f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
            f"{arch}.rope.freq_base": 10000.0,
            f"{arch}.attention.key_length": spec.width,
            f"{arch}.attention.value_length": spec.width,
        }
    return metadata | byte_level_tokenizer()


def model_tensors(spec: TinySpec) -> list[GgufTensor]:
    """The tiny model's weights as converters write them: GPT-2 unfused from Conv1D, llama's q and k interleaved."""
    return [f32(_gguf_name(name), _turned(spec, name, array)) for name, array in weights_of(spec).items()]


def interleaved(array: Array, num_heads: int) -> Array:
    """Half-rotation rows to rotary pairs side by side."""
    half = array.shape[0] // num_heads // 2
    return array.reshape(num_heads, 2, half, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def _turned(spec: TinySpec, name: str, array: Array) -> Array:
    if spec.model_type == "gpt2":
        is_conv1d = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        return np.ascontiguousarray(array.T) if is_conv1d else array
    if spec.model_type == "llama" and ".q_proj." in name:
        return interleaved(array, spec.num_heads)
    if spec.model_type == "llama" and ".k_proj." in name:
        return interleaved(array, spec.num_kv_heads)
    return array


_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}


def _gguf_name(name: str) -> str:
    stem, suffix = name.rsplit(".", 1)
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[part]}.{suffix}"


def model_file(spec: TinySpec, extra: Mapping[str, Any] | None = None) -> bytes:
    """A whole tiny model."""
    return build(model_metadata(spec) | dict(extra or {}), model_tensors(spec))
