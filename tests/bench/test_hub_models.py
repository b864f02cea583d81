from __future__ import annotations

import fcntl
import os
from pathlib import Path

import gguf
import numpy as np
import pytest
from bench.hub_models import (
    GB,
    LOW_BITS,
    CopyError,
    ModelCopy,
    WorkFolder,
    image_budget,
    make_copies,
    patches,
    quant_tensors,
    read_through,
)

NUM_BLOCKS = 200
BLOCK_BYTES = {"Q4_1": 20, "Q8_0": 34}


def write_model(path: Path, kinds: tuple[str, ...] = ("Q4_1", "Q8_0")) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    rng = np.random.default_rng(1)
    writer.add_tensor("norm", np.ones(64, dtype=np.float32))
    for kind in kinds:
        blocks = rng.integers(0, 256, (NUM_BLOCKS, BLOCK_BYTES[kind]), dtype=np.uint8)
        writer.add_tensor(kind, blocks, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_model(tmp_path / "source.gguf")


def copies(source: Path, folder: Path, count: int) -> tuple[ModelCopy, ...]:
    folder.mkdir()
    return make_copies(source, folder, count, lambda done: None)


def test_copies_differ_from_the_source_and_from_each_other_in_every_tensor(source: Path, tmp_path: Path) -> None:
    files = [source, *(copy.path for copy in copies(source, tmp_path / "copies", 3))]
    tensors = [{t.name: t.data.tobytes() for t in gguf.GGUFReader(file).tensors} for file in files]
    for name in ("Q4_1", "Q8_0"):
        assert len({values[name] for values in tensors}) == 4
    assert len({values["norm"] for values in tensors}) == 1
    assert len({file.stat().st_size for file in files}) == 1


def test_only_low_bits_of_quants_change_and_no_scale(source: Path, tmp_path: Path) -> None:
    (copy,) = copies(source, tmp_path / "copies", 1)
    before, after = (np.frombuffer(path.read_bytes(), np.uint8) for path in (source, copy.path))
    changed = np.bitwise_xor(before, after)
    for tensor in quant_tensors(source):
        num_bytes = tensor.num_blocks * tensor.block_bytes
        blocks = changed[tensor.offset : tensor.offset + num_bytes].reshape(tensor.num_blocks, tensor.block_bytes)
        num_scale_bytes = 4 if tensor.format == "Q4_1" else 2
        assert not blocks[:, :num_scale_bytes].any()
        assert not (blocks & ~np.uint8(LOW_BITS[tensor.format])).any()
        assert blocks.any()
        changed[tensor.offset : tensor.offset + num_bytes] = 0
    assert not changed.any()


def test_a_copy_is_the_same_in_every_run(source: Path, tmp_path: Path) -> None:
    first, again = (copies(source, tmp_path / name, 2) for name in ("first", "again"))
    assert [copy.path.read_bytes() for copy in first] == [copy.path.read_bytes() for copy in again]
    assert [copy.name for copy in first] == ["m000", "m001"]


def test_a_tensor_smaller_than_a_run_of_blocks_is_patched_whole(source: Path) -> None:
    (tensor, _) = quant_tensors(source)
    small = [type(tensor)(tensor.name, tensor.format, 0, 3, tensor.block_bytes)]
    (patch,) = patches(small, 0, lambda offset, size: bytes(size))
    assert (patch.offset, len(patch.data)) == (0, 3 * tensor.block_bytes)


def test_a_file_without_known_quants_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CopyError, match="no tensor in Q4_0, Q4_1, Q8_0"):
        quant_tensors(write_model(tmp_path / "plain.gguf", kinds=()))


def test_a_copy_that_cannot_be_written_is_an_error_with_its_number(source: Path, tmp_path: Path) -> None:
    (tmp_path / "copies").mkdir()
    (tmp_path / "copies" / "m001.gguf").touch()
    with pytest.raises(CopyError, match="copy 2 of 3 was not written"):
        make_copies(source, tmp_path / "copies", 3, lambda done: None)


def test_images_get_what_is_wanted_or_what_is_left() -> None:
    assert image_budget(60 * GB, 30 * GB, 10 * GB, 15 * GB) == 10 * GB
    assert image_budget(50 * GB, 30 * GB, 10 * GB, 15 * GB) == 5 * GB


def test_a_disk_with_no_room_for_images_is_refused_with_the_numbers() -> None:
    with pytest.raises(CopyError, match=r"46\.0 GB are free; 30\.0 GB of copies and a reserve of 15\.0 GB"):
        image_budget(46 * GB, 30 * GB, 10 * GB, 15 * GB)


def test_a_work_folder_is_gone_afterwards_also_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), WorkFolder(tmp_path / "work") as work:
        (work.path / "models").mkdir()
        (work.path / "models" / "m000.gguf").write_bytes(b"x")
        raise KeyboardInterrupt
    assert list((tmp_path / "work").iterdir()) == []


def test_folders_of_killed_runs_are_removed_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    killed, living = tmp_path / "run-killed", tmp_path / "run-living"
    for folder in (killed, living):
        folder.mkdir()
        (folder / "lock").touch()
    lock = os.open(living / "lock", os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with WorkFolder(tmp_path):
            assert not killed.exists()
            assert living.exists()
    finally:
        os.close(lock)


def test_reading_through_counts_all_files_below(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one").write_bytes(bytes(3 * 2**20))
    (tmp_path / "two").write_bytes(b"12345")
    assert read_through(tmp_path) == 3 * 2**20 + 5
