"""The cache: complete or absent, one fetch at a time, sentences for what disks refuse."""

from __future__ import annotations

import errno
import multiprocessing
import os
import threading
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from naru_proto.errors import LoadError
from naru_worker.adapters.fetch.cache import CacheEntry, cache_entry, default_home, require_space, writing


def fill(entry: CacheEntry, body: bytes = b"weights") -> None:
    entry.staging.mkdir(parents=True, exist_ok=True)
    (entry.staging / "m.gguf").write_bytes(body)


def test_an_entry_is_there_only_after_its_commit(home: Path) -> None:
    entry = cache_entry(home, "hf", "org", "name", "abc")
    fill(entry)
    assert entry.load() is None
    committed = entry.commit(entry="m.gguf", digest="d", revision="r")
    assert committed == entry.load()
    assert committed.path == home / "models" / "hf" / "org" / "name" / "abc" / "m.gguf"
    assert (committed.digest, committed.revision) == ("d", "r")
    assert not entry.staging.exists()


def test_an_entry_for_a_folder_is_the_folder(home: Path) -> None:
    entry = cache_entry(home, "hf", "x")
    fill(entry)
    assert entry.commit(entry="", digest="d", revision="").path == entry.folder


@pytest.mark.parametrize("damage", ["truncated", "missing", "manifest broken", "manifest of another form"])
def test_a_damaged_entry_counts_as_absent_and_is_replaced(home: Path, damage: str) -> None:
    entry = cache_entry(home, "hf", "x")
    fill(entry)
    entry.commit(entry="m.gguf", digest="d", revision="")
    if damage == "truncated":
        os.truncate(entry.folder / "m.gguf", 3)
    elif damage == "missing":
        (entry.folder / "m.gguf").unlink()
    else:
        (entry.folder / "naru.json").write_text("{" if damage == "manifest broken" else "[1]")
    assert entry.load() is None
    fill(entry, b"again")
    assert entry.commit(entry="m.gguf", digest="e", revision="").path.read_bytes() == b"again"
    assert sorted(p.name for p in entry.folder.parent.iterdir()) == ["x", "x.use"]


def test_a_second_fetch_waits_for_the_first(home: Path) -> None:
    entry = cache_entry(home, "hf", "x")
    order: list[str] = []
    waits = threading.Event()

    def on_wait() -> None:
        order.append("waits")
        waits.set()

    def second() -> None:
        with entry.lock(on_wait):
            order.append("second")

    with entry.lock(lambda: None):
        thread = threading.Thread(target=second)
        thread.start()
        assert waits.wait(30)
        order.append("first")
    thread.join(30)
    assert order == ["waits", "first", "second"]


def _hold(home: Path, held: Event) -> None:
    with cache_entry(home, "hf", "x").lock(lambda: None):
        held.set()
        threading.Event().wait()


def test_the_lock_of_a_killed_process_is_free(home: Path) -> None:
    context = multiprocessing.get_context("spawn")
    held = context.Event()
    holder = context.Process(target=_hold, args=(home, held))
    holder.start()
    assert held.wait(60)
    holder.kill()
    holder.join(30)
    waited: list[str] = []
    with cache_entry(home, "hf", "x").lock(lambda: waited.append("waited")):
        pass
    holder.close()


def test_too_little_space_is_a_sentence_with_both_sizes(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"model 'x' needs 1,152,921,504,607 MB on disk .* has [\d,]+ MB free"):
        require_space(tmp_path / "not" / "yet", 1 << 60, "model 'x'")
    require_space(tmp_path / "not" / "yet", 0, "model 'x'")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (errno.ENOSPC, "no space is left"),
        (errno.EROFS, "cannot be written; set NARU_HOME"),
        (errno.EACCES, "cannot be written; set NARU_HOME"),
        (errno.EIO, "check the disk"),
    ],
)
def test_what_the_disk_refuses_is_a_sentence(tmp_path: Path, code: int, message: str) -> None:
    with pytest.raises(LoadError, match=message), writing(tmp_path / "x"):
        raise OSError(code, os.strerror(code))


def test_a_cache_that_is_a_file_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("")
    with pytest.raises(LoadError, match="NARU_HOME"), cache_entry(tmp_path / "home", "hf", "x").lock(lambda: None):
        pass


def test_the_home_is_what_the_user_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NARU_HOME", str(tmp_path))
    assert default_home() == tmp_path
    monkeypatch.delenv("NARU_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_home() == tmp_path / "naru"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_home() == tmp_path / ".cache" / "naru"
