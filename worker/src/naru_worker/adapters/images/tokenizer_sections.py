"""Tokenizers as they go into images, and the last few of them by what they were built from.

Used by the packing process: the models of a family have the very same tokenizer, and building, checking and measuring
it is most of the work of packing a small one. Not thread-safe, and measures right only while no other thread allocates.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from naru_worker.adapters.images.header import digest_of
from naru_worker.adapters.tokenizer.model_tokenizer import ModelTokenizer
from naru_worker.adapters.tokenizer.serialized import tokenizer_from_bytes, tokenizer_to_bytes

MAX_SECTIONS = 8
MAX_SECTIONS_BYTES = 64 * 2**20
"""Real sections have 1 to 20 MiB."""
_MIB = 2**20
_ESTIMATE_FACTOR, _ESTIMATE_BASE_BYTES = 18, 3 * _MIB
"""Covers all that fresh processes grew by: 2.3 MiB for a section of 0.04, 13.6 for 0.77, 16.1 for 1.1, 28 for 2.8,
46 for 4.4, 96 for 11.5."""


@dataclass(frozen=True, slots=True)
class TokenizerSection:
    """All that an image says of its tokenizer."""

    raw: bytes
    key: str
    """Hash of `raw`, hex."""
    resident_bytes: int
    """Memory that one such tokenizer takes, in whole MiB."""
    eos_token_id: int | None
    vocab_size: int


class TokenizerSections:
    """Keeps what was used last, up to a number and a size."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, TokenizerSection] = OrderedDict()

    def get(self, origin: bytes, build: Callable[[], ModelTokenizer]) -> TokenizerSection:
        """The section of the tokenizer that `build` makes; `origin` stands for everything it is made from.

        Raises:
            LoadError: what `build` raises; nothing is kept then.
        """
        section = self._kept.get(origin)
        if section is None:
            section = self._kept[origin] = tokenizer_section(build())
        self._kept.move_to_end(origin)
        while len(self._kept) > MAX_SECTIONS or sum(len(kept.raw) for kept in self._kept.values()) > MAX_SECTIONS_BYTES:
            self._kept.popitem(last=False)
        return section


def tokenizer_section(tokenizer: ModelTokenizer) -> TokenizerSection:
    """Serializes a tokenizer, builds it again to see that it is the same, and measures what that took."""
    rebuilt: dict[bytes, int] = {}

    def rebuild(raw: bytes, where: str) -> ModelTokenizer:
        before = heap_bytes()
        again = tokenizer_from_bytes(raw, where)
        rebuilt[raw] = heap_bytes() - before
        return again

    raw = tokenizer_to_bytes(tokenizer, rebuild)
    if raw not in rebuilt:
        rebuild(raw, "tokenizer")
    return TokenizerSection(
        raw, digest_of(raw).hex(), resident_bytes(raw, rebuilt[raw]), tokenizer.eos_token_id, tokenizer.vocab_size
    )


def resident_bytes(raw: bytes, grown_bytes: int) -> int:
    """Whole MiB of one tokenizer: what the heap grew by, or where that is not known an estimate on the safe side.

    The growth of RSS is no measure: memory that was freed before is used again, and hides it.
    """
    num_bytes = grown_bytes if grown_bytes > 0 else _ESTIMATE_FACTOR * len(raw) + _ESTIMATE_BASE_BYTES
    return -(-num_bytes // _MIB) * _MIB


class _MallInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def heap_bytes() -> int:
    """What the allocator has given out and not got back (glibc; elsewhere 0): the same in old and new processes."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0
    mallinfo.restype = _MallInfo
    info = mallinfo()
    return int(info.uordblks + info.hblkhd)
