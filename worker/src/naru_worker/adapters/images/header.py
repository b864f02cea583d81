"""The format of an image file, and its first page. Written by `writer`, read by `mapped_image`; see `image_index`.

An image holds a whole model: a load maps it and reads no other file. All numbers are little-endian.

    0         header       one page: magic, version, where the parts lie, hashes; zeros up to 4096
    4096      vectors      float32, each 64-byte aligned
              matrices     in the order in which a step reads them: embedding, layers, head. Each stage begins on a
                           page, each segment and bias on 64 bytes. A segment is a part of a stack (q, k, v; gate, up)
                           as `naru_pack_segment` writes it, a bias float32 with 16 zeros behind it
              tokenizer    begins on a page: see `adapters/tokenizer/serialized.py`
              sums         of each 64 KiB of vectors and matrices, the 64-bit sum of its 64-bit words
              index        JSON: config, chat template, where each matrix and vector lies

Vectors and matrices are one range of whole pages, so that a model can start while its last layers are still being read.
Nothing in the file escapes a check: the header has its own hash, and holds those of sums and index; the index has the
tokenizer's; the sums cover the rest, padding included. Sums are fast, not secure: they find damage. What makes an image
trusted is that only this node's workers write the folder it lies in.

Every change to the layout, to what the index must hold or to what `naru_pack_segment` writes raises VERSION; images of
another version are packed anew.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from naru_worker.adapters.images.errors import ImageDamaged

MAGIC = b"NARUIMG\n"
VERSION = 2
PAGE_BYTES = 4096
ALIGN_BYTES = 64
CHUNK_BYTES = 64 * 1024
BIAS_PADDING = 16
"""Zeros behind each bias: kernels read whole registers."""
HASH_BYTES = 32
MAX_INDEX_BYTES = 64 * 2**20
"""Real ones stay below 1 MiB beside the chat template; the limit bounds what parsing may cost."""

_LAYOUT = struct.Struct("<8sIIQQQQQQQ32s32s")
"""magic, version, page, file, weights end, tokenizer (offset, bytes), sums (offset, bytes), index bytes, hashes."""


def digest_of(data: bytes | memoryview) -> bytes:
    """The hash used all over the format."""
    return hashlib.blake2b(data, digest_size=HASH_BYTES).digest()


def round_up(num_bytes: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-num_bytes // step) * step


def sums_bytes(weights_end: int) -> int:
    """Bytes of the section of sums."""
    return -(-(weights_end - PAGE_BYTES) // CHUNK_BYTES) * 8


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """The first page. Sections follow one another without a gap, but for the tokenizer's page."""

    weights_end: int
    """Vectors and matrices lie in [PAGE_BYTES, weights_end), whole pages."""
    tokenizer_bytes: int
    index_bytes: int
    sums_hash: bytes
    index_hash: bytes

    @property
    def sums_offset(self) -> int:
        """Right behind the tokenizer."""
        return self.weights_end + self.tokenizer_bytes

    @property
    def index_offset(self) -> int:
        """Right behind the sums."""
        return self.sums_offset + sums_bytes(self.weights_end)

    @property
    def file_bytes(self) -> int:
        """Of the whole image."""
        return self.index_offset + self.index_bytes

    def to_page(self) -> bytes:
        """The page, zeros at its end."""
        fields = _LAYOUT.pack(
            MAGIC,
            VERSION,
            PAGE_BYTES,
            self.file_bytes,
            self.weights_end,
            self.weights_end,
            self.tokenizer_bytes,
            self.sums_offset,
            sums_bytes(self.weights_end),
            self.index_bytes,
            self.sums_hash,
            self.index_hash,
        )
        return (fields + digest_of(fields)).ljust(PAGE_BYTES, b"\0")

    @classmethod
    def from_page(cls, page: bytes, file_bytes: int, where: str) -> ImageHeader:
        """Checks everything that can be checked without reading on; `file_bytes` is the file's real size.

        Raises:
            ImageDamaged: it is no image, of another version, damaged, or the file is cut.
        """
        if len(page) < PAGE_BYTES or page[: len(MAGIC)] != MAGIC:
            raise ImageDamaged(f"{where}: is no packed image (it begins with {page[: len(MAGIC)]!r}); remove it")
        version = int.from_bytes(page[8:12], "little")
        if version != VERSION:
            raise ImageDamaged(f"{where}: is of layout version {version}; this worker reads {VERSION}; remove it")
        size = _LAYOUT.size
        if digest_of(page[:size]) != page[size : size + HASH_BYTES] or any(page[size + HASH_BYTES : PAGE_BYTES]):
            raise ImageDamaged(f"{where}: the header is damaged; remove it")
        _, _, _, _, weights_end, _, tokenizer, _, _, index, sums_hash, index_hash = _LAYOUT.unpack_from(page)
        header = cls(weights_end, tokenizer, index, sums_hash, index_hash)
        if weights_end % PAGE_BYTES or weights_end < PAGE_BYTES or not 0 < index <= MAX_INDEX_BYTES:
            raise ImageDamaged(f"{where}: has weights up to {weights_end} and {index} bytes of index; remove it")
        if header.to_page() != page or header.file_bytes != file_bytes:
            raise ImageDamaged(f"{where}: has {file_bytes} bytes; {header.file_bytes} are needed; remove it")
        return header
