"""Writes a GGUF model as a Hugging Face folder in bfloat16, so that a peer without GGUF serves the very same weights.

Called by `bench.engines` before vLLM starts, or by hand: ``python -m bench.export_hf MODEL.gguf FOLDER``. It covers
Llama models with a byte-level BPE tokenizer, which is what the benchmark's model is, and refuses the rest by name.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

TOKEN_TYPE_CONTROL = 3
"""GGUF's mark of special tokens."""

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class ExportError(Exception):
    """The GGUF file is not one this exporter covers."""


def hf_tensor_name(gguf_name: str) -> str:
    """``blk.3.attn_q.weight`` → ``model.layers.3.self_attn.q_proj.weight``.

    Raises:
        ExportError: not a tensor of a Llama model.
    """
    stem, _, kind = gguf_name.rpartition(".")
    if kind == "weight" and stem in _TOP_TENSORS:
        return f"{_TOP_TENSORS[stem]}.weight"
    parts = stem.split(".")
    if kind == "weight" and len(parts) == 3 and parts[0] == "blk" and parts[2] in _LAYER_TENSORS:
        return f"model.layers.{int(parts[1])}.{_LAYER_TENSORS[parts[2]]}.weight"
    raise ExportError(f"tensor {gguf_name!r} has no counterpart in a Llama checkpoint")


def unpermute_rope(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Rows of a q or k projection from GGUF's interleaved rotary pairs to Hugging Face's halves. Shape is kept."""
    out_features, in_features = weight.shape
    half = out_features // num_heads // 2
    return weight.reshape(num_heads, half, 2, in_features).swapaxes(1, 2).reshape(out_features, in_features)


def to_bfloat16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper halves of float32, rounded to nearest even. NaN is not expected in weights and not kept as such."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def export_hf(gguf_path: Path, folder: Path) -> Path:
    """Writes config, weights, tokenizer and chat template into `folder`; keeps a folder it finished before as it is.

    Raises:
        ExportError: not a Llama GGUF with a byte-level BPE tokenizer.
    """
    marker = folder / "exported.json"
    stamp = {"source": str(gguf_path), "bytes": gguf_path.stat().st_size, "dtype": "bfloat16", "format": 1}
    if marker.is_file() and json.loads(marker.read_text()) == stamp:
        return folder
    reader = gguf.GGUFReader(gguf_path)
    metadata = {name: field for name, field in reader.fields.items()}
    architecture = _value(metadata, "general.architecture")
    if architecture != "llama":
        raise ExportError(f"architecture {architecture!r} cannot be exported, only 'llama'")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(metadata, tied="output.weight" not in tensors)
    _write_json(folder / "config.json", config)
    _write_safetensors(folder / "model.safetensors", tensors, config)
    _write_tokenizer(folder, metadata)
    _write_json(marker, stamp)
    return folder


def _value(metadata: dict[str, Any], key: str, default: Any = None) -> Any:
    field = metadata.get(key)
    if field is None:
        if default is None:
            raise ExportError(f"the GGUF file has no field {key!r}")
        return default
    return field.contents()


def _config(metadata: dict[str, Any], tied: bool) -> dict[str, Any]:
    num_heads = _value(metadata, "llama.attention.head_count")
    hidden_size = _value(metadata, "llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"].data),
        "hidden_size": hidden_size,
        "intermediate_size": _value(metadata, "llama.feed_forward_length"),
        "num_hidden_layers": _value(metadata, "llama.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _value(metadata, "llama.attention.head_count_kv", num_heads),
        "head_dim": _value(metadata, "llama.attention.key_length", hidden_size // num_heads),
        "max_position_embeddings": _value(metadata, "llama.context_length"),
        "rms_norm_eps": float(_value(metadata, "llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": float(_value(metadata, "llama.rope.freq_base", 10000.0)),
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": _value(metadata, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _value(metadata, "tokenizer.ggml.eos_token_id"),
    }


def _write_safetensors(path: Path, tensors: dict[str, Any], config: dict[str, Any]) -> None:
    """Dequantizes tensor by tensor: never more than one of them in float32 at a time."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, tensor in tensors.items():
        shape = [int(size) for size in reversed(tensor.shape)]
        num_bytes = 2 * int(np.prod(shape))
        header[hf_tensor_name(name)] = {
            "dtype": "BF16",
            "shape": shape,
            "data_offsets": [position, position + num_bytes],
        }
        position += num_bytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for name, tensor in tensors.items():
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            kind = name.split(".")[-2]
            if kind in heads:
                values = unpermute_rope(values, heads[kind])
            file.write(to_bfloat16_bits(values).tobytes())


def byte_level_tokenizer(gguf_path: Path) -> Any:
    """The GGUF file's tokenizer, as one of the package `tokenizers`.

    Raises:
        ExportError: it has another kind of tokenizer.
    """
    return _tokenizer(dict(gguf.GGUFReader(gguf_path).fields))


def _tokenizer(metadata: dict[str, Any]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # a slow import

    model, pre = _value(metadata, "tokenizer.ggml.model"), _value(metadata, "tokenizer.ggml.pre")
    if (model, pre) != ("gpt2", "smollm"):
        raise ExportError(
            f"tokenizer {model!r} with pre-tokenizer {pre!r} cannot be exported, only 'gpt2' with 'smollm'"
        )
    tokens: list[str] = _value(metadata, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _value(metadata, "tokenizer.ggml.merges")]
    types = _value(metadata, "tokenizer.ggml.token_type")
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == TOKEN_TYPE_CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def _write_tokenizer(folder: Path, metadata: dict[str, Any]) -> None:
    _tokenizer(metadata).save(str(folder / "tokenizer.json"))
    tokens: list[str] = _value(metadata, "tokenizer.ggml.tokens")
    named = {
        role: tokens[_value(metadata, f"tokenizer.ggml.{key}_token_id")]
        for role, key in (
            ("bos_token", "bos"),
            ("eos_token", "eos"),
            ("unk_token", "unknown"),
            ("pad_token", "padding"),
        )
        if f"tokenizer.ggml.{key}_token_id" in metadata
    }
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": _value(metadata, "llama.context_length"),
            "clean_up_tokenization_spaces": False,
            "chat_template": _value(metadata, "tokenizer.chat_template", ""),
            **named,
        },
    )


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(argv: list[str]) -> int:
    """The command: a GGUF file and the folder to write."""
    if len(argv) != 2:
        print("usage: python -m bench.export_hf MODEL.gguf FOLDER", file=sys.stderr)
        return 2
    try:
        print(export_hf(Path(argv[0]), Path(argv[1])))
    except (ExportError, OSError) as exc:
        print(f"cannot export {argv[0]}: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
