"""Reads GGUF files (versions 2 and 3, little-endian): metadata and zero-copy tensors.

Used when a model is opened. The file is untrusted: every length is checked against what is left of the file before it
is used, so that a lying header costs neither memory nor time. Does not interpret the metadata.

Source: the GGUF specification (ggml project, docs/gguf.md).
"""

from __future__ import annotations

import math
from pathlib import Path

from naru_proto.errors import LoadError
from naru_worker.adapters.ops.protocol import RawTensor, TensorFormat
from naru_worker.adapters.weights.gguf_reader import GgufReader
from naru_worker.adapters.weights.mapped_file import MappedFile
from naru_worker.adapters.weights.tensor_format import BLOCKS, tensor_bytes
from naru_worker.core.fields import shown

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 2**16
MAX_KEYS = 2**16
MAX_TENSORS = 2**17
MAX_NAME_BYTES = 2**16 - 1
"""The specification's own limit for keys; generous for tensor names."""
MAX_DIMENSIONS = 4
MAX_ELEMENTS = 2**48

TENSOR_TYPES: dict[int, TensorFormat] = {
    0: "f32",
    1: "f16",
    2: "q4_0",
    3: "q4_1",
    8: "q8_0",
    12: "q4_k",
    14: "q6_k",
    30: "bf16",
}

OTHER_TYPE_NAMES = {
    6: "Q5_0",
    7: "Q5_1",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    13: "Q5_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}
"""Types that exist but are not served: an error can say which."""


class GgufFile:
    """An opened file: `metadata` by key, `tensors` by name (views of the map, valid until `close`)."""

    def __init__(self, path: Path) -> None:
        """Maps and parses the file.

        Raises:
            LoadError: any defect; names the file and the field.
        """
        self.path = path
        self._mapped = MappedFile(path)
        try:
            reader = GgufReader(str(path), self._mapped.view)
            num_tensors, num_keys = _read_header(reader)
            self.metadata = _read_metadata(reader, num_keys)
            self.tensors = _read_tensors(reader, num_tensors, _alignment(reader, self.metadata))
        except LoadError:
            self.close()
            raise

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self._mapped.size

    @property
    def view(self) -> memoryview:
        """The whole file."""
        return self._mapped.view

    def close(self) -> None:
        """Unmaps the file; tensors are dead afterwards."""
        self._mapped.close()


def _read_header(reader: GgufReader) -> tuple[int, int]:
    """Number of tensors and of keys."""
    if bytes(reader.view[:4]) != MAGIC:
        reader.fail("magic", f"is {bytes(reader.view[:4])!r}; a GGUF file starts with {MAGIC!r}")
    reader.position = 4
    version = reader.u32("version")
    if version not in VERSIONS:
        hint = "; it looks big-endian" if version and not version & 0xFFFF else ""
        reader.fail("version", f"is {version}; supported are {VERSIONS[0]} and {VERSIONS[1]}{hint}")
    num_tensors = reader.u64("tensor_count")
    num_keys = reader.u64("metadata_kv_count")
    if num_tensors > MAX_TENSORS:
        reader.fail("tensor_count", f"is {num_tensors}; at most {MAX_TENSORS} are allowed")
    if num_keys > MAX_KEYS:
        reader.fail("metadata_kv_count", f"is {num_keys}; at most {MAX_KEYS} are allowed")
    return num_tensors, num_keys


def _read_metadata(reader: GgufReader, num_keys: int) -> dict[str, object]:
    metadata: dict[str, object] = {}
    for index in range(num_keys):
        key = reader.string(f"metadata key number {index}", MAX_NAME_BYTES)
        if key in metadata:
            reader.fail(shown(key), "is in the metadata twice")
        metadata[key] = reader.value(reader.u32(shown(key)), shown(key))
    return metadata


def _alignment(reader: GgufReader, metadata: dict[str, object]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if isinstance(value, bool) or not isinstance(value, int) or not 8 <= value <= MAX_ALIGNMENT or value & (value - 1):
        reader.fail("general.alignment", f"is {shown(value)}; it must be a power of two in [8, {MAX_ALIGNMENT}]")
    return value


def _read_tensors(reader: GgufReader, num_tensors: int, alignment: int) -> dict[str, RawTensor]:
    infos: dict[str, tuple[TensorFormat, tuple[int, ...], int]] = {}
    for index in range(num_tensors):
        name = reader.string(f"tensor name number {index}", MAX_NAME_BYTES)
        if name in infos:
            reader.fail(f"tensor {shown(name)}", "is listed twice")
        infos[name] = _read_info(reader, f"tensor {shown(name)}", alignment)
    base = (reader.position + alignment - 1) // alignment * alignment
    available = max(len(reader.view) - base, 0)
    tensors: dict[str, RawTensor] = {}
    last_end, last_name = 0, ""
    for name, (tensor_format, shape, offset) in sorted(infos.items(), key=lambda item: item[1][2]):
        size = tensor_bytes(tensor_format, shape)
        if offset + size > available:
            reader.fail(
                f"tensor {shown(name)}",
                f"ends at byte {offset + size} of the data, which has {available}; the file is cut or lying",
            )
        if offset < last_end:
            reader.fail(f"tensor {shown(name)}", f"overlaps tensor {shown(last_name)}")
        last_end, last_name = offset + size, name
        start = base + offset
        tensors[name] = RawTensor(name, tensor_format, shape, reader.view[start : start + size])
    return tensors


def _read_info(reader: GgufReader, field: str, alignment: int) -> tuple[TensorFormat, tuple[int, ...], int]:
    """Format, shape (slowest axis first) and offset into the data."""
    num_dimensions = reader.u32(field)
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        reader.fail(field, f"has {num_dimensions} dimensions; 1 to {MAX_DIMENSIONS} are allowed")
    shape = tuple(reader.u64(field) for _ in range(num_dimensions))[::-1]
    if min(shape) < 1 or math.prod(shape) > MAX_ELEMENTS:
        reader.fail(field, f"has shape {shape}; every axis must be at least 1 and the product at most {MAX_ELEMENTS}")
    kind = reader.u32(field)
    if kind not in TENSOR_TYPES:
        known = ", ".join(TENSOR_TYPES.values())
        reader.fail(field, f"has type {OTHER_TYPE_NAMES.get(kind, 'unknown')} ({kind}); supported are {known}")
    tensor_format = TENSOR_TYPES[kind]
    block = BLOCKS[tensor_format][0]
    if shape[-1] % block:
        reader.fail(field, f"has rows of {shape[-1]} elements; {tensor_format} needs multiples of {block}")
    offset = reader.u64(field)
    if offset % alignment:
        reader.fail(field, f"starts at {offset}, which is not a multiple of the alignment {alignment}")
    return tensor_format, shape, offset
