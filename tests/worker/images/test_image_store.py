"""The store packs a source once, finds it again, sees its changes, and keeps its budget."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from image_bytes import unmeasured
from tiny_models import TinySpec, write_model

from naru_proto.errors import LoadError
from naru_worker.adapters.images.errors import ImageDamaged, LoadStopped, StoreFull
from naru_worker.adapters.images.eviction import StoredImage, choose_victims
from naru_worker.adapters.images.packing import PackingProcess, PackPlan
from naru_worker.adapters.images.store import ImageStore


def nothing(done: int, total: int) -> None:
    """Progress that nobody watches."""


def left_over(store_folder: Path) -> list[str]:
    """Files of packing that should not be there."""
    found = [*store_folder.glob("*.partial"), *store_folder.glob("sources/*.tmp"), *store_folder.glob("locks/*")]
    return sorted(path.name for path in found)


@pytest.fixture
def num_packed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one with each source that a packing process reads."""
    read: list[str] = []
    plan = PackingProcess.plan

    def counted(process: PackingProcess, source: Path, destination: Path, should_stop: threading.Event) -> PackPlan:
        read.append(str(source))
        return plan(process, source, destination, should_stop)

    monkeypatch.setattr(PackingProcess, "plan", counted)
    return read


def in_place(pack_here: Callable[[Path, Path], Path], tmp_path: Path, count: int) -> list[Path]:
    """Images of different models, made without the store; each in a folder of its own."""
    paths: list[Path] = []
    for seed in range(count):
        folder = tmp_path / f"model-{seed}"
        folder.mkdir()
        write_model(folder, TinySpec(seed=seed))
        paths.append(pack_here(folder, folder))
    return paths


def test_a_source_is_packed_once_and_found_again(
    store: ImageStore, source: Path, go_on: threading.Event, num_packed: list[str], tmp_path: Path
) -> None:
    assert store.find(source) is None
    progress: list[tuple[int, int]] = []
    path = store.ensure(source, lambda done, total: progress.append((done, total)), go_on)
    size = path.stat().st_size
    assert progress[-1] == (size, size) and [d for d, _ in progress] == sorted(d for d, _ in progress)
    assert {total for _, total in progress} == {size}
    assert (store.used_bytes(), store.num_images()) == (size, 1)
    restarted = ImageStore(tmp_path / "images", 2**30)
    for again in (store, restarted):
        assert again.find(source) == again.ensure(source, nothing, go_on) == path
    assert len(num_packed) == 1 and left_over(path.parent) == []
    image = store.open(path)
    image.make_present(lambda ready: None, True, go_on)
    assert image.weights_key == path.stem and image.config.num_layers == 2
    image.close()


def test_the_packing_process_writes_what_packing_here_gives(
    store: ImageStore, source: Path, go_on: threading.Event, pack_here: Any, tmp_path: Path
) -> None:
    path = store.ensure(source, nothing, go_on)
    here = pack_here(source, tmp_path)
    assert path.name == here.name and unmeasured(path) == unmeasured(here)


def swap_weights(folder: Path, seed: int) -> None:
    """Replaces the weights by a rename, as a download does."""
    other = folder.with_name(f"other-{seed}")
    other.mkdir()
    write_model(other, TinySpec(seed=seed))
    os.replace(other / "model.safetensors", folder / "model.safetensors")
    shutil.rmtree(other)


def edit_weights(folder: Path) -> None:
    """Writes into the file, size and modification time as before."""
    path = folder / "model.safetensors"
    before = path.stat()
    with open(path, "r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(np.float32(7.0).tobytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("change", [lambda folder: swap_weights(folder, 1), edit_weights], ids=["replaced", "edited"])
def test_a_changed_source_is_packed_anew(
    store: ImageStore, source: Path, go_on: threading.Event, change: Callable[[Path], None]
) -> None:
    first = store.ensure(source, nothing, go_on)
    change(source)
    assert store.find(source) is None
    second = store.ensure(source, nothing, go_on)
    assert second != first and store.find(source) == second and first.exists()


def test_a_source_replaced_while_it_is_packed_gives_the_new_image(
    store: ImageStore, source: Path, go_on: threading.Event, num_packed: list[str], pack_here: Any, tmp_path: Path
) -> None:
    def replace_once(done: int, total: int) -> None:
        if not (source / "swapped").exists():
            swap_weights(source, 5)
            (source / "swapped").touch()

    path = store.ensure(source, replace_once, go_on)
    assert len(num_packed) == 2 and store.num_images() == 1
    assert path.name == pack_here(source, tmp_path).name and left_over(path.parent) == []


def test_a_source_that_never_rests_is_refused(
    store: ImageStore, source: Path, go_on: threading.Event, num_packed: list[str], tmp_path: Path
) -> None:
    def touch(done: int, total: int) -> None:
        (source / "config.json").touch()

    with pytest.raises(LoadError, match="changed 3 times while it was packed"):
        store.ensure(source, touch, go_on)
    assert len(num_packed) == 3 and store.used_bytes() == 0 and left_over(tmp_path / "images") == []


def test_equal_sources_are_one_file(store: ImageStore, source: Path, go_on: threading.Event, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    link = tmp_path / "link"
    link.symlink_to(source)
    paths = {store.ensure(path, nothing, go_on) for path in (source, copy, link)}
    assert len(paths) == 1 and store.num_images() == 1
    assert {store.find(path) for path in (source, copy, link)} == paths


def test_two_threads_pack_once(store: ImageStore, source: Path, go_on: threading.Event, num_packed: list[str]) -> None:
    with ThreadPoolExecutor(2) as pool:
        paths = {future.result() for future in [pool.submit(store.ensure, source, nothing, go_on) for _ in range(2)]}
    assert len(paths) == 1 and len(num_packed) == 1


def test_two_sources_of_one_content_at_once_write_one_file(
    store: ImageStore, source: Path, go_on: threading.Event, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    written: dict[Path, int] = {source: 0, copy: 0}

    def ensure(path: Path) -> Path:
        def count(done: int, total: int) -> None:
            written[path] += 1

        return store.ensure(path, count, go_on)

    with ThreadPoolExecutor(2) as pool:
        assert len(set(pool.map(ensure, written))) == 1
    assert sorted(map(bool, written.values())) == [False, True]


@pytest.mark.parametrize(
    ("path", "match"),
    [("missing", "cannot be looked at"), ("empty", "has no weights"), ("notes.gguf", "magic"), ("m.bin", "pickle")],
)
def test_a_source_that_cannot_be_served_says_why(
    store: ImageStore, go_on: threading.Event, tmp_path: Path, path: str, match: str
) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("notes.gguf", "m.bin"):
        (tmp_path / name).write_text("no model")
    with pytest.raises(LoadError, match=match):
        store.ensure(tmp_path / path, nothing, go_on)
    assert store.find(tmp_path / path) is None
    assert store.used_bytes() == 0 and left_over(tmp_path / "images") == []


def test_a_process_that_cannot_run_is_a_reason(
    store: ImageStore, source: Path, go_on: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("naru_worker.adapters.images.packing.MODULE", "naru_worker.no_such_module")
    with pytest.raises(LoadError, match=r"ended with status 1 and said .*no_such_module"):
        store.ensure(source, nothing, go_on)
    monkeypatch.setattr("naru_worker.adapters.images.packing.sys.executable", "/no/such/python")
    with pytest.raises(LoadError, match="no process to pack it can be started"):
        store.ensure(source, nothing, go_on)


def test_stopping_kills_the_process_and_leaves_nothing(store: ImageStore, source: Path, tmp_path: Path) -> None:
    others = set(psutil.Process().children())
    for moment in ("before", "waiting", "writing"):
        should_stop = threading.Event()
        timer = threading.Timer(0.05, should_stop.set)
        if moment == "before":
            should_stop.set()
        elif moment == "waiting":
            timer.start()

        def stop(done: int, total: int, event: threading.Event = should_stop) -> None:
            event.set()

        with pytest.raises(LoadStopped):
            store.ensure(source, stop, should_stop)
        timer.cancel()
        assert set(psutil.Process().children()) <= others
        assert store.used_bytes() == 0 and left_over(tmp_path / "images") == []


def test_waiting_for_another_s_packing_can_be_stopped(store: ImageStore, source: Path, go_on: threading.Event) -> None:
    should_stop = threading.Event()
    outcome: list[BaseException] = []

    def wait() -> None:
        try:
            store.ensure(source, nothing, should_stop)
        except LoadStopped as e:
            outcome.append(e)

    waiting = threading.Thread(target=wait)

    def meanwhile(done: int, total: int) -> None:
        if not waiting.is_alive() and not outcome:
            waiting.start()
            should_stop.set()
            waiting.join()

    store.ensure(source, meanwhile, go_on)
    assert len(outcome) == 1


# --- budget ----------------------------------------------------------------------------------------------------


def put(store_folder: Path, images: list[Path]) -> list[Path]:
    """Lays packed images into a store's folder, the first one used longest ago."""
    placed = []
    for age, image in enumerate(images):
        placed.append(store_folder / image.name)
        os.replace(image, placed[-1])
        stamp = placed[-1].with_suffix(".used")
        stamp.touch()
        os.utime(stamp, (1_000_000 + age, 1_000_000 + age))
    return placed


def test_the_least_recently_used_image_makes_room(
    source: Path, go_on: threading.Event, pack_here: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "images"
    images = in_place(pack_here, tmp_path, 4)[1:]
    size = images[0].stat().st_size
    folder.mkdir()
    oldest, middle, newest = put(folder, images)
    store = ImageStore(folder, 3 * size + 100)
    store.open(oldest).close()  # a use: now the middle one is the oldest

    def within(done: int, total: int) -> None:
        assert store.used_bytes() <= store.budget_bytes

    path = store.ensure(source, within, go_on)
    assert not middle.exists() and oldest.exists() and newest.exists() and path.exists()
    assert store.num_images() == 3 and store.used_bytes() <= store.budget_bytes


def test_images_in_use_are_not_evicted(source: Path, go_on: threading.Event, pack_here: Any, tmp_path: Path) -> None:
    folder = tmp_path / "images"
    images = in_place(pack_here, tmp_path, 3)[1:]
    size = images[0].stat().st_size
    folder.mkdir()
    oldest, newest = put(folder, images)
    store = ImageStore(folder, 2 * size + 100)
    image = store.open(oldest)
    store.pin(newest)
    with pytest.raises(StoreFull, match=f"needs {size} bytes; of the budget of {2 * size + 100} bytes {2 * size} are"):
        store.ensure(source, nothing, go_on)
    assert oldest.exists() and newest.exists() and left_over(folder) == []
    store.unpin(newest)
    path = store.ensure(source, nothing, go_on)
    assert oldest.exists() and not newest.exists()
    image.close()
    assert store.num_images() == 2 and path.exists()


def test_an_image_above_the_budget_is_refused_and_evicts_nobody(
    source: Path, go_on: threading.Event, pack_here: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "images"
    (image,) = in_place(pack_here, tmp_path, 2)[1:]
    size = image.stat().st_size
    folder.mkdir()
    (placed,) = put(folder, [image])
    store = ImageStore(folder, size - 1)
    with pytest.raises(LoadError, match=f"needs {size} bytes on disk, but the budget for all images is {size - 1}"):
        store.ensure(source, nothing, go_on)
    assert placed.exists() and left_over(folder) == []


def test_a_removed_image_lives_on_where_it_is_mapped(store: ImageStore, source: Path, go_on: threading.Event) -> None:
    path = store.ensure(source, nothing, go_on)
    image = store.open(path)
    store.remove(path)
    assert store.find(source) is None and store.used_bytes() == 0
    image.make_present(lambda ready: None, True, go_on)
    image.close()
    with pytest.raises(ImageDamaged, match="cannot be opened"):
        store.open(path)
    assert store.ensure(source, nothing, go_on) == path


def test_a_damaged_image_is_packed_again(store: ImageStore, source: Path, go_on: threading.Event) -> None:
    path = store.ensure(source, nothing, go_on)
    whole = path.read_bytes()
    copy = source.with_name("copy")
    shutil.copytree(source, copy)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ImageDamaged):
        store.open(path)
    # Found by another source: what stands there is looked at, not trusted.
    assert store.ensure(copy, nothing, go_on) == path and path.read_bytes() == whole


def test_victims_are_the_fewest_of_the_oldest() -> None:
    images = [StoredImage("c", 5, 3), StoredImage("a", 10, 1), StoredImage("b", 20, 2)]

    def names(needed_bytes: int, *in_use: str) -> str | None:
        victims = choose_victims(images, needed_bytes, in_use)
        return None if victims is None else "".join(victim.digest for victim in victims)

    assert [names(n) for n in (0, 1, 10, 11, 30, 31, 35, 36)] == ["", "a", "a", "ab", "ab", "abc", "abc", None]
    assert (names(10, "a"), names(21, "a"), names(26, "a")) == ("b", "bc", None)


# --- a full disk -----------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_a_reason_with_numbers(
    small_disk: Path, source: Path, go_on: threading.Event, tmp_path: Path
) -> None:
    store = ImageStore(small_disk / "images", 2**30)
    (small_disk / "ballast").write_bytes(bytes(100_000))
    with pytest.raises(StoreFull, match=r"needs \d+ bytes.*the disk has \d+ free"):
        store.ensure(source, nothing, go_on)
    assert store.used_bytes() == 0 and left_over(small_disk / "images") == []


def test_a_disk_that_refuses_the_space_leaves_nothing(
    store: ImageStore, source: Path, go_on: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free space is a guess: another program may be faster."""

    def refuse(descriptor: int, offset: int, num_bytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(StoreFull, match=r"the disk is full: the packed model needs \d+ bytes, \d+ are free"):
        store.ensure(source, nothing, go_on)
    assert store.used_bytes() == 0 and left_over(tmp_path / "images") == []


def test_a_folder_that_cannot_be_used_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LoadError, match="cannot be written"):
        ImageStore(tmp_path / "file" / "images", 2**30)
