"""Mapped pages brought in and summed by native code."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from naru_proto.errors import LoadError
from naru_worker.adapters.ops.native_memory import CHUNK_BYTES, populate, sum_chunks


def sums_in_python(data: bytes) -> list[int]:
    """The definition, spelt out."""
    sums = []
    for start in range(0, len(data), CHUNK_BYTES):
        chunk = data[start : start + CHUNK_BYTES]
        chunk += bytes(-len(chunk) % 8)
        words = (int.from_bytes(chunk[i : i + 8], "little") for i in range(0, len(chunk), 8))
        sums.append(sum(words) % 2**64)
    return sums


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 255, 257, 4097, 65535, 65536, 65537, 3 * 65536 + 264, 1_200_003])
def test_sums_follow_their_definition(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    assert sum_chunks(data.ctypes.data, size).tolist() == sums_in_python(data.tobytes())


def test_sums_wrap_around() -> None:
    data = np.full(65536, 0xFF, np.uint8)
    assert sum_chunks(data.ctypes.data, 65536).tolist() == [2**64 - 8192]


def test_memory_need_not_be_aligned() -> None:
    data = np.random.default_rng(1).integers(0, 256, 200_001, dtype=np.uint8)
    part = data[13:]
    assert sum_chunks(part.ctypes.data, part.nbytes).tolist() == sums_in_python(part.tobytes())


def resident_pages(address: int) -> int:
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith(f"{address:x}-"):
            inside = True
        elif inside and line.startswith("Rss:"):
            return int(line.split()[1]) // 4
    raise AssertionError("the mapping is not there")


def test_populating_makes_every_page_of_a_file_present(tmp_path: Path) -> None:
    path = tmp_path / "image"
    path.write_bytes(b"x" * (5 * 2**20 + 100))
    with path.open("rb") as file:
        mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
    assert resident_pages(mapped.ctypes.data) == 0
    populate(mapped.ctypes.data, mapped.nbytes)
    assert resident_pages(mapped.ctypes.data) == -(-mapped.nbytes // 4096)
    populate(mapped.ctypes.data, 0)


def test_a_file_cut_short_under_its_mapping_is_an_error_and_no_crash(tmp_path: Path) -> None:
    path = tmp_path / "image"
    path.write_bytes(b"x" * 300_000)
    with path.open("rb") as file:
        mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
    with path.open("r+b") as file:
        file.truncate(100_000)
    with pytest.raises(LoadError, match="cut short"):
        populate(mapped.ctypes.data, mapped.nbytes)
    with pytest.raises(LoadError, match="cut short"):
        sum_chunks(mapped.ctypes.data, mapped.nbytes)
