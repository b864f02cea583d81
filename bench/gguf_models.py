"""Writes GGUF files for the benchmark: one model in other weight formats, and a larger one with random weights.

Called by `bench.accuracy` and `bench.engine`. Files are written under another name and then renamed, so that a killed
run leaves none half done.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Kind = gguf.GGMLQuantizationType
Packed = npt.NDArray[np.generic]
Made = tuple[Packed, gguf.GGMLQuantizationType]
Maker = Callable[[], Made]
"""Gives a tensor's data, as bytes of blocks or as floats, when it is written."""

FORMATS: Mapping[str, gguf.GGMLQuantizationType] = {
    name: gguf.GGMLQuantizationType[name.upper()]
    for name in ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q6_k", "q4_k")
}
"""Weight formats that the engine serves, by its own names."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama model's sizes."""

    name: str
    hidden: int
    inner: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context: int

    def matrices(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """(name, (outputs, columns)) of all matrices but the embedding, in file order."""
        q_rows, kv_rows = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        sizes = {
            "attn_q": (q_rows, self.hidden),
            "attn_k": (kv_rows, self.hidden),
            "attn_v": (kv_rows, self.hidden),
            "attn_output": (self.hidden, q_rows),
            "ffn_gate": (self.inner, self.hidden),
            "ffn_up": (self.inner, self.hidden),
            "ffn_down": (self.hidden, self.inner),
        }
        for layer in range(self.num_layers):
            for name, size in sizes.items():
                yield f"blk.{layer}.{name}.weight", size


LARGER = Shape("random-515M", 1280, 3840, 24, 20, 5, 64, 8192)
"""About half a billion parameters, groups of 4 heads."""


def write_requantized(source: Path, target: Path, weights: str, embedding: str | None = None) -> Path:
    """The source's model with all matrices in format `weights`; keeps a file that is there and newer.

    The embedding, which is the head too, has a format of its own when one is given. Norms stay float32. K-quants cannot
    be written by the `gguf` package: `bench.llama_logits.quantize` has them.
    """
    if target.is_file() and target.stat().st_mtime >= source.stat().st_mtime:
        return target
    reader = gguf.GGUFReader(source)
    tensors: dict[str, tuple[tuple[int, ...], Maker]] = {}
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        wanted = (embedding or weights) if tensor.name == "token_embd.weight" else weights
        kind = FORMATS[wanted] if len(shape) == 2 else Kind.F32
        tensors[tensor.name] = (shape, partial(_converted, tensor, kind))
    return _write(target, reader, {}, tensors, [*FORMATS].index(weights))


def write_random(shape: Shape, tokenizer_from: Path, target: Path, seed: int = 0) -> Path:
    """A model of this shape with random Q4_1 matrices and a Q8_0 head; keeps a file that is there."""
    if target.is_file():
        return target
    reader = gguf.GGUFReader(tokenizer_from)
    vocab = len(reader.fields["tokenizer.ggml.tokens"].data)
    rng = np.random.default_rng(seed)
    tensors: dict[str, tuple[tuple[int, ...], Maker]] = {
        "token_embd.weight": ((vocab, shape.hidden), partial(_random_q8_0, rng, vocab, shape.hidden)),
        "output_norm.weight": ((shape.hidden,), partial(_ones, shape.hidden)),
    }
    for layer in range(shape.num_layers):
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{layer}.{name}.weight"] = ((shape.hidden,), partial(_ones, shape.hidden))
    for name, (rows, columns) in shape.matrices():
        tensors[name] = ((rows, columns), partial(_random_q4_1, rng, rows, columns, shape.num_layers))
    changes = {
        "general.name": shape.name,
        "general.basename": shape.name,
        "general.size_label": shape.name.rpartition("-")[2],
        "llama.block_count": shape.num_layers,
        "llama.context_length": shape.context,
        "llama.embedding_length": shape.hidden,
        "llama.feed_forward_length": shape.inner,
        "llama.attention.head_count": shape.num_heads,
        "llama.attention.head_count_kv": shape.num_kv_heads,
        "llama.rope.dimension_count": shape.head_dim,
    }
    return _write(target, reader, changes, tensors, None)


def _write(
    target: Path,
    reader: gguf.GGUFReader,
    changes: Mapping[str, Any],
    tensors: Mapping[str, tuple[tuple[int, ...], Maker]],
    file_type: int | None,
) -> Path:
    """All metadata of `reader` but what `changes` says, and the tensors, made one at a time where they are small."""
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(".partial")
    writer = gguf.GGUFWriter(unfinished, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        is_array = field.types[0] == gguf.GGUFValueType.ARRAY
        value = changes.get(name, field.contents())
        writer.add_key_value(name, value, field.types[0], field.types[-1] if is_array else None)
    for name, (_, make) in tensors.items():
        data, kind = make()
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(unfinished, target)
    return target


def _converted(tensor: Any, kind: gguf.GGMLQuantizationType) -> Made:
    if tensor.tensor_type == kind:
        return np.array(tensor.data), kind
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    return (values if kind == Kind.F32 else gguf.quants.quantize(values, kind)), kind


def _ones(size: int) -> Made:
    return np.ones(size, np.float32), Kind.F32


def _random_q4_1(rng: np.random.Generator, rows: int, columns: int, num_layers: int) -> Made:
    """Blocks of 16 evenly spread levels around zero; their spread keeps activations of all layers in the same range."""
    blocks = rng.integers(0, 256, (rows, columns // 32, 20), dtype=np.uint8)
    step = (rng.uniform(0.8, 1.2, blocks.shape[:2]) / (4.61 * np.sqrt(columns * 2 * num_layers) / 4)).astype(np.float16)
    blocks[..., 0:2] = step[..., None].view(np.uint8)
    blocks[..., 2:4] = (step * np.float16(-7.5))[..., None].view(np.uint8)
    return blocks.reshape(rows, -1), Kind.Q4_1


def _random_q8_0(rng: np.random.Generator, rows: int, columns: int) -> Made:
    blocks = rng.integers(0, 256, (rows, columns // 32, 34), dtype=np.uint8)
    step = (rng.uniform(0.8, 1.2, blocks.shape[:2]) / (74.0 * np.sqrt(columns))).astype(np.float16)
    blocks[..., 0:2] = step[..., None].view(np.uint8)
    return blocks.reshape(rows, -1), Kind.Q8_0
