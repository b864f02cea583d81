"""What an image's index says: config, facts, and where each matrix and vector lies. Pure data, to JSON and back.

Written by the packing process, read at each load. Reading trusts nothing: every offset is checked against the sections
of the file, every shape against the config, so that no kernel is ever sent outside the mapping.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn, TypeGuard

from naru_proto.errors import LoadError
from naru_worker.adapters.images.config_record import config_from_json, config_to_json
from naru_worker.adapters.images.errors import ImageDamaged
from naru_worker.adapters.images.header import ALIGN_BYTES, BIAS_PADDING, PAGE_BYTES
from naru_worker.adapters.ops.cpu_pack import FORMAT_NUMBERS
from naru_worker.adapters.ops.weights_image import MatrixPlace, SegmentPlace
from naru_worker.adapters.weights.model_folder import parse_json_object
from naru_worker.core.fields import Fields, shown
from naru_worker.core.model_config import ModelConfig
from naru_worker.core.weight_layout import expected_shapes

MAX_TOKENIZER_RESIDENT_BYTES = 2**36
_FORMATS = frozenset(FORMAT_NUMBERS.values())

SegmentBytes = Callable[[int, int, int], int]
"""(format, rows, columns) to bytes: `naru_segment_bytes`."""


@dataclass(frozen=True, slots=True)
class IndexedMatrix:
    """A stack of parts: the names they go by, and where it lies."""

    names: tuple[str, ...]
    biases: tuple[str, ...]
    """Of the parts that have one."""
    place: MatrixPlace


@dataclass(frozen=True, slots=True)
class VectorPlace:
    """A float32 vector."""

    offset: int
    """Bytes from the start of the image, a multiple of 64."""
    length: int


@dataclass(frozen=True, slots=True)
class ImageIndex:
    """All an image knows of its model beside the numbers themselves."""

    digest: str
    """Content identity of weights, config, tokenizer and template: what the image was packed from."""
    revision: str
    """The checkpoint's own."""
    config: ModelConfig
    """Its EOS ids include the tokenizer's."""
    chat_template: str
    vocab_limit: int
    tokenizer_key: str
    """Hash of the tokenizer's section, hex."""
    tokenizer_resident_bytes: int
    """What the tokenizer takes in memory once built, measured when the image was packed."""
    stage_ends: tuple[int, ...]
    """Offsets up to which embedding, each layer, and the head need the image."""
    matrices: tuple[IndexedMatrix, ...]
    vectors: Mapping[str, VectorPlace]

    def to_json(self) -> bytes:
        """The section's bytes."""
        value = {
            "digest": self.digest,
            "revision": self.revision,
            "config": config_to_json(self.config),
            "chat_template": self.chat_template,
            "vocab_limit": self.vocab_limit,
            "tokenizer_key": self.tokenizer_key,
            "tokenizer_resident_bytes": self.tokenizer_resident_bytes,
            "stage_ends": self.stage_ends,
            "matrices": [_matrix_json(matrix) for matrix in self.matrices],
            "vectors": {name: [place.offset, place.length] for name, place in self.vectors.items()},
        }
        return json.dumps(value, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, raw: bytes, where: str, weights_end: int, segment_bytes: SegmentBytes) -> ImageIndex:
        """Parses and checks.

        Raises:
            ImageDamaged: a field is missing or of another type, something lies outside the weights, or a tensor that
                the config needs is not there in its shape.
        """
        try:
            return _Reader(where, weights_end, segment_bytes).read(parse_json_object(raw, where))
        except ImageDamaged:
            raise
        except LoadError as e:
            raise ImageDamaged(f"{e.message}; remove the image", param=e.param) from e


def _matrix_json(matrix: IndexedMatrix) -> list[object]:
    place = matrix.place
    segments = [[s.format, s.num_rows, s.offset, s.num_bytes] for s in place.segments]
    return [matrix.names, matrix.biases, place.num_columns, place.bias_offset, segments]


class _Reader:
    """Reads one index. `weights_end`: all vectors and matrices lie below."""

    def __init__(self, where: str, weights_end: int, segment_bytes: SegmentBytes) -> None:
        self._where = where
        self._end = weights_end
        self._segment_bytes = segment_bytes
        self._position = PAGE_BYTES

    def read(self, values: Mapping[str, object]) -> ImageIndex:
        fields = Fields(self._where, values)
        config = config_from_json(self._where, values.get("config"))
        vectors = self._vectors(fields)
        matrices = tuple(self._matrix(entry) for entry in self._list(values.get("matrices"), "matrices"))
        self._check_shapes(config, matrices, vectors)
        return ImageIndex(
            digest=fields.text("digest", ""),
            revision=fields.text("revision", ""),
            config=config,
            chat_template=fields.text("chat_template", ""),
            vocab_limit=fields.integer("vocab_limit", 1, config.vocab_size),
            tokenizer_key=fields.text("tokenizer_key", ""),
            tokenizer_resident_bytes=fields.integer("tokenizer_resident_bytes", 0, MAX_TOKENIZER_RESIDENT_BYTES),
            stage_ends=self._stage_ends(values.get("stage_ends"), config),
            matrices=matrices,
            vectors=vectors,
        )

    def _fail(self, field: str, problem: str) -> NoReturn:
        raise ImageDamaged(f"{self._where}: {field} {problem}; remove the image", param=field)

    def _list(self, value: object, field: str) -> list[object]:
        if not isinstance(value, list):
            self._fail(field, f"is {shown(value)}; a list is needed")
        return value

    def _take(self, offset: int, num_bytes: int, field: str) -> None:
        """Everything lies in order, aligned, and inside."""
        if offset % ALIGN_BYTES or offset < self._position or offset + num_bytes > self._end:
            self._fail(
                field, f"lies at {offset} with {num_bytes} bytes; free for it is [{self._position}, {self._end})"
            )
        self._position = offset + num_bytes

    def _vectors(self, fields: Fields) -> dict[str, VectorPlace]:
        vectors: dict[str, VectorPlace] = {}
        for name, entry in fields.table("vectors").items():
            if not _are_counts(entry) or len(entry) != 2 or entry[1] < 1:
                self._fail(f"vector {shown(name)}", f"is {shown(entry)}; offset and length are needed")
            self._take(entry[0], entry[1] * 4, f"vector {shown(name)}")
            vectors[name] = VectorPlace(entry[0], entry[1])
        return vectors

    def _matrix(self, entry: object) -> IndexedMatrix:
        field = f"matrix {shown(entry)}"
        if not isinstance(entry, list) or len(entry) != 5:
            self._fail(field, "must have names, biases, columns, bias offset and segments")
        names, biases, columns, bias_offset, segments = entry
        if not _are_names(names) or not _are_names(biases) or len(biases) > len(names):
            self._fail(field, "has no proper names")
        if not _are_counts([columns]) or columns < 1 or not isinstance(segments, list) or len(segments) != len(names):
            self._fail(field, "has no columns, or not one segment for each name")
        parts = tuple(self._segment(segment, columns, field) for segment in segments)
        if biases:
            if not _are_counts([bias_offset]):
                self._fail(field, "has no offset for its bias")
            self._take(bias_offset, (sum(part.num_rows for part in parts) + BIAS_PADDING) * 4, field)
        elif bias_offset != -1:
            self._fail(field, f"has a bias at {shown(bias_offset)} without a name")
        return IndexedMatrix(tuple(names), tuple(biases), MatrixPlace(columns, parts, bias_offset))

    def _segment(self, entry: object, columns: int, field: str) -> SegmentPlace:
        if not _are_counts(entry) or len(entry) != 4 or entry[0] not in _FORMATS:
            self._fail(field, f"has segment {shown(entry)}; format, rows, offset and bytes are needed")
        number, rows, offset, num_bytes = entry
        if rows < 1 or rows * columns >= 2**31 or num_bytes != self._segment_bytes(number, rows, columns):
            self._fail(field, f"has a segment of {rows} rows and {columns} columns in {num_bytes} bytes")
        self._take(offset, num_bytes, field)
        return SegmentPlace(number, rows, offset, num_bytes)

    def _stage_ends(self, value: object, config: ModelConfig) -> tuple[int, ...]:
        """Embedding, layers, head: ascending, the last one at the end."""
        needed = config.num_layers + 2
        if not _are_counts(value) or len(value) != needed or sorted(value) != value or value[-1] != self._end:
            self._fail("stage_ends", f"must be {needed} ascending offsets up to {self._end}")
        return tuple(value)

    def _check_shapes(
        self, config: ModelConfig, matrices: tuple[IndexedMatrix, ...], vectors: Mapping[str, VectorPlace]
    ) -> None:
        found: dict[str, tuple[int, ...]] = {name: (place.length,) for name, place in vectors.items()}
        num_names = len(found)
        for matrix in matrices:
            for name, segment in zip(matrix.names, matrix.place.segments, strict=True):
                found[name] = (segment.num_rows, matrix.place.num_columns)
                if f"{name}_bias" in matrix.biases:
                    found[f"{name}_bias"] = (segment.num_rows,)
            num_names += len(matrix.names) + len(matrix.biases)
        expected = expected_shapes(config)
        if found != expected or num_names != len(expected):
            wrong = sorted(name for name in {**found, **expected} if found.get(name) != expected.get(name))
            self._fail("tensors", f"do not fit the config: {shown(wrong)}")


def _are_counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**62 for item in value)


def _are_names(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
