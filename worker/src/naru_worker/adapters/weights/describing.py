"""What a model's files say of its shape, without its weights: for those who plan before anything is loaded."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

from naru_proto.errors import LoadError
from naru_proto.shapes import ModelShape
from naru_worker.adapters.weights.gguf_checkpoint import gguf_checkpoint
from naru_worker.adapters.weights.gguf_file import GgufFile
from naru_worker.adapters.weights.model_folder import read_json_object
from naru_worker.adapters.weights.opening import find_gguf
from naru_worker.core.fields import Fields, shown
from naru_worker.core.hf_config import parse_hf_config
from naru_worker.core.model_config import ModelConfig
from naru_worker.core.quantization import parse_quantization
from naru_worker.core.weight_layout import expected_shapes

_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "bf16"}
# GPUs keep 16 bits of what files have 32 of.
_PLAIN = {"f32": "bf16"}


def describe(path: Path) -> dict[str, Any]:
    """Shape, windows, context and format of a model: a GGUF file, or a folder of which config.json is enough.

    Returns:
        ``shape``: the fields of a `ModelShape`; ``windows``: tokens that each layer sees at most, 0 for all;
        ``max_context``: tokens; ``weights``: a name of `naru plan`'s weight formats, empty where it is another one.

    Raises:
        LoadError: no model that is known lies there; names file and field.
    """
    if path.is_dir():
        values = read_json_object(path / "config.json")
        if values is not None:
            return _of_config(path / "config.json", values)
    gguf = find_gguf(path)
    if gguf is None:
        raise LoadError(f"{path}: has no config.json and no GGUF file", param="path")
    return _of_gguf(gguf)


def _of_config(path: Path, values: dict[str, object]) -> dict[str, Any]:
    fields = Fields(str(path), values)
    config = parse_hf_config(fields)
    if fields.has("quantization_config"):
        return _described(config, _quantized(fields))
    dtype = values.get("dtype") or values.get("torch_dtype") or "bfloat16"
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise LoadError(f"{path}: torch_dtype is {shown(dtype)}; known are {', '.join(_DTYPES)}", param="torch_dtype")
    return _described(config, _DTYPES[dtype])


def _quantized(fields: Fields) -> str:
    try:
        quantization = parse_quantization(fields)
    except LoadError:
        # Nothing can be served, but the shape can be planned with weights of another format.
        return ""
    return "fp8" if quantization is not None and quantization.is_float else "int4"


def _of_gguf(path: Path) -> dict[str, Any]:
    checkpoint = gguf_checkpoint(GgufFile(path))
    try:
        weights: Counter[str] = Counter()
        for name, dims in expected_shapes(checkpoint.config).items():
            if name.startswith("layers.") and len(dims) > 1:
                weights[checkpoint.get(name).format] += prod(dims)
        ((most, _),) = weights.most_common(1)
        return _described(checkpoint.config, _PLAIN.get(most, most))
    finally:
        checkpoint.close()


def _experts(config: ModelConfig) -> dict[str, int]:
    experts = config.experts
    if experts is None:
        return {}
    return {
        "num_experts": experts.num_experts,
        "num_chosen_experts": experts.num_chosen,
        "expert_size": experts.inner_size,
        "shared_expert_size": experts.shared_size,
        "num_plain_layers": config.num_layers - len(experts.layers),
    }


def _described(config: ModelConfig, weights: str) -> dict[str, Any]:
    shape = ModelShape(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        mlp="gated" if config.activation == "swiglu" else "plain",
        norm=config.norm,
        is_head_tied=config.tie_word_embeddings,
        has_qkv_bias=config.qkv_bias,
        has_o_bias=config.o_bias,
        has_mlp_bias=config.mlp_bias,
        num_learned_positions=config.max_position_embeddings if config.rope is None else 0,
        has_qk_norm=config.qk_norm,
        **_experts(config),
    )
    return {
        "shape": asdict(shape),
        "windows": [window or 0 for window in config.sliding_windows],
        "max_context": config.max_position_embeddings,
        "weights": weights,
    }
