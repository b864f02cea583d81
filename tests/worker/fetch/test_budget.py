"""The cache's budget: who leaves for whom, and who never does."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
from file_server import FileServer

from naru_proto.errors import LoadError
from naru_worker.adapters.fetch import FetchProgress, budget, fetch
from naru_worker.adapters.fetch.budget import CacheBudget
from naru_worker.adapters.fetch.cache import SPARE_BYTES, CacheEntry, cache_entry
from naru_worker.settings import FetchSettings

SIZE = 100_000


def silent() -> None:
    """Nobody is told that it waits."""


def fill(home: Path, name: str, used_at_s: float, size: int = SIZE) -> CacheEntry:
    """A whole entry, last used at a time."""
    entry = cache_entry(home, "hf", name)
    entry.staging.mkdir(parents=True)
    (entry.staging / "m.gguf").write_bytes(bytes(size))
    entry.commit(entry="m.gguf", digest="d", revision="").release()
    os.utime(entry.folder.with_name(f"{name}.use"), (used_at_s, used_at_s))
    return entry


def reserve(home: Path, limit_bytes: int, needed_bytes: int = SIZE, name: str = "new") -> CacheEntry:
    entry = cache_entry(home, "hf", name)
    with entry.lock(silent):
        CacheBudget(home, limit_bytes).reserve(entry, needed_bytes, "model 'new'", silent)
    return entry


def there(*entries: CacheEntry) -> list[str]:
    return [entry.folder.name for entry in entries if entry.load() is not None]


def test_the_least_recently_used_leave_and_no_more_of_them_than_needed(home: Path) -> None:
    entries = [fill(home, name, at) for name, at in (("b", 200.0), ("a", 100.0), ("c", 300.0))]
    reserve(home, 3 * SIZE + 5000)
    assert there(*entries) == ["b", "c"]
    assert {path.name for path in (home / "models" / "hf").iterdir()} == {
        "b", "b.use", "c", "c.use", "new.partial", "new.lock",
    }  # fmt: skip


def test_an_entry_in_use_never_leaves(home: Path) -> None:
    a, b = fill(home, "a", 100.0), fill(home, "b", 200.0)
    used = a.open()
    assert used is not None
    os.utime(a.folder.with_name("a.use"), (100.0, 100.0))
    reserve(home, 2 * SIZE + 5000)
    assert there(a, b) == ["a"]
    fill(home, "c", 300.0)
    with pytest.raises(LoadError, match=r"model 'new' needs 0 MB on disk: .* in use or being fetched"):
        reserve(home, 2 * SIZE + 5000, 2 * SIZE)
    assert there(a) == ["a"]
    used.release()
    reserve(home, 2 * SIZE + 5000, 2 * SIZE)
    assert there(a) == []


def test_a_use_ends_when_nobody_knows_it_any_more(home: Path) -> None:
    entry = fill(home, "a", 100.0)
    used = entry.open()
    assert entry.is_busy
    del used
    assert not entry.is_busy


def _use(home: Path, name: str, held: Event) -> None:
    used = cache_entry(home, "hf", name).open()
    assert used is not None
    held.set()
    threading.Event().wait()


def test_what_another_process_uses_never_leaves_until_it_dies(home: Path) -> None:
    entry = fill(home, "a", 100.0)
    context = multiprocessing.get_context("spawn")
    held = context.Event()
    holder = context.Process(target=_use, args=(home, "a", held))
    holder.start()
    try:
        assert held.wait(60)
        with pytest.raises(LoadError, match="in use or being fetched"):
            reserve(home, SIZE + 5000)
        assert there(entry) == ["a"]
    finally:
        holder.kill()
        holder.join(30)
        holder.close()
    reserve(home, SIZE + 5000)
    assert there(entry) == []


def test_a_model_above_the_whole_budget_is_refused_and_nobody_leaves_for_it(home: Path) -> None:
    entry = fill(home, "a", 100.0)
    with pytest.raises(LoadError, match=r"needs 10 MB on disk, more than the 1 MB .* raise .*cache_budget_bytes"):
        reserve(home, 1_000_000, 10_000_000)
    assert there(entry) == ["a"]


def test_downloads_under_way_are_counted_in_full(home: Path) -> None:
    running = cache_entry(home, "hf", "running")
    with running.lock(silent):
        CacheBudget(home, 10 * SIZE).reserve(running, 8 * SIZE, "model 'running'", silent)
        with pytest.raises(LoadError, match="in use or being fetched"):
            reserve(home, 10 * SIZE, 3 * SIZE)
    # Its fetch was given up: what is on disk counts, and that may go.
    reserve(home, 10 * SIZE, 3 * SIZE)


def test_interrupted_downloads_leave_in_their_turn(home: Path) -> None:
    partial = cache_entry(home, "hf", "partial")
    partial.staging.mkdir(parents=True)
    (partial.staging / "m.gguf.part").write_bytes(bytes(SIZE))
    os.utime(partial.staging / "m.gguf.part")
    old = fill(home, "old", 100.0)
    reserve(home, 3 * SIZE)
    assert partial.staging.exists()
    reserve(home, 2 * SIZE)
    assert there(old) == []
    assert partial.staging.exists()
    reserve(home, 2 * SIZE - 5000)
    assert not partial.staging.exists()


def test_interrupted_downloads_and_broken_entries_expire(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for suffix in (".partial", ".broken"):
        folder = home / "models" / "hf" / f"gone{suffix}"
        folder.mkdir(parents=True)
        (folder / "m.gguf.part").write_bytes(bytes(10))
        os.utime(folder / "m.gguf.part", (100.0, 100.0))
    fresh = home / "models" / "hf" / "fresh.partial"
    fresh.mkdir()
    (fresh / "m.gguf.part").write_bytes(bytes(10))
    reserve(home, 10 * SIZE)
    assert sorted(path.name for path in (home / "models" / "hf").iterdir() if path.is_dir()) == [
        "fresh.partial", "new.partial",
    ]  # fmt: skip


def test_a_full_disk_makes_room_too_and_says_both_sizes(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = fill(home, "a", 100.0)
    monkeypatch.setattr(budget, "free_bytes", lambda folder: SPARE_BYTES + SIZE // 2)
    reserve(home, 1 << 40)
    assert there(entry) == []
    with pytest.raises(LoadError, match=r"needs 500 MB on disk: .* has 67 MB free; .*free disk space"):
        reserve(home, 1 << 40, 500_000_000)


def test_without_a_budget_half_of_the_disk_is_one(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(home, "a", 100.0, 40_000_000)
    free = 200_000_000
    monkeypatch.setattr(budget, "free_bytes", lambda folder: free)
    reserve(home, -1, 119_000_000)
    assert there(cache_entry(home, "hf", "a")) == []


def test_everything_of_a_home_is_counted(home: Path) -> None:
    fill(home, "a", 100.0)
    entry = cache_entry(home, "with", "secret", "s3", "bucket", "b")
    entry.staging.mkdir(parents=True)
    (entry.staging / "m.gguf.part").write_bytes(bytes(SIZE))
    (home / "models" / "hf" / "refs").mkdir()
    (home / "models" / "hf" / "refs" / "main").write_text("x")
    assert 2 * SIZE < CacheBudget(home, -1).used_bytes() < 2 * SIZE + 2000


# --- with real fetches ------------------------------------------------------------------------------------------------


def offer(server: FileServer, name: str, body: bytes, commit: str = "c" * 40) -> str:
    import hashlib

    item = {"type": "file", "path": "m.gguf", "oid": "x", "size": len(body)}
    item["lfs"] = {"oid": hashlib.sha256(body).hexdigest(), "size": len(body)}
    server.put(f"/api/models/org/{name}/revision/main", json.dumps({"sha": commit}).encode())
    server.put(f"/api/models/org/{name}/tree/{commit}?recursive=true", json.dumps([item]).encode())
    server.put(f"/org/{name}/resolve/{commit}/m.gguf", body)
    return f"/org/{name}/resolve/{commit}/m.gguf"


@pytest.fixture
def hub(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> FileServer:
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    return server


def test_fetches_stay_within_the_budget_and_an_evicted_model_comes_again(hub: FileServer, home: Path) -> None:
    settings = FetchSettings(cache_budget_bytes=3 * SIZE)
    for turn in range(2):
        for number in range(5):
            body = b"GGUF" + bytes([number]) * SIZE
            offer(hub, f"m{number}", body)
            found = fetch(f"hf://org/m{number}", home=home, settings=settings)
            assert found.path.read_bytes() == body, turn
            found.release()
            assert CacheBudget(home, -1).used_bytes() <= settings.cache_budget_bytes


def test_a_loading_models_files_stay_while_others_want_room(hub: FileServer, home: Path) -> None:
    settings = FetchSettings(cache_budget_bytes=2 * SIZE)
    offer(hub, "first", b"GGUF" + b"1" * SIZE)
    offer(hub, "second", b"GGUF" + b"2" * SIZE)
    first = fetch("hf://org/first", home=home, settings=settings)
    with pytest.raises(LoadError, match="in use or being fetched"):
        fetch("hf://org/second", home=home, settings=settings)
    assert first.path.exists()
    first.release()
    fetch("hf://org/second", home=home, settings=settings)
    assert not first.path.exists()


def test_two_processes_that_want_the_same_model_download_once(hub: FileServer, home: Path) -> None:
    body = b"GGUF" + b"x" * 3_000_000
    path = offer(hub, "same", body)
    both = threading.Barrier(2)
    code = (
        "import sys; from pathlib import Path; from naru_worker.adapters.fetch import fetch;"
        "print(fetch('hf://org/same', home=Path(sys.argv[1])).digest)"
    )
    outputs: list[str] = []

    def run() -> None:
        both.wait(30)
        done = subprocess.run([sys.executable, "-c", code, str(home)], capture_output=True, text=True, check=True)
        outputs.append(done.stdout)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(outputs) == 2
    assert len(set(outputs)) == 1
    assert hub.ranges(path) == [""]


def test_who_waits_for_a_download_sees_how_far_it_is_and_can_be_stopped(hub: FileServer, home: Path) -> None:
    body = b"GGUF" + b"x" * SIZE
    offer(hub, "busy", body)
    entry = cache_entry(home, "hf", "org", "busy", "c" * 40)
    entry.staging.mkdir(parents=True)
    (entry.staging / "m.gguf.part").write_bytes(body[:1234])

    class Stop(Exception):
        pass

    seen: list[FetchProgress] = []

    def stop(progress: FetchProgress) -> None:
        seen.append(progress)
        if progress.phase == "waiting":
            raise Stop

    with entry.lock(silent), pytest.raises(Stop):
        fetch("hf://org/busy", home=home, on_progress=stop)
    assert (seen[-1].phase, seen[-1].bytes_done) == ("waiting", 1234)


@pytest.mark.parametrize("at", ["half", "whole"])
def test_a_killed_fetch_leaves_no_entry_and_the_next_one_goes_on(hub: FileServer, home: Path, at: str) -> None:
    body = b"GGUF" + os.urandom(2_000_000)
    path = offer(hub, "killed", body)
    code = (
        "import os, sys; from pathlib import Path; from naru_worker.adapters.fetch import fetch, cache;\n"
        "def kill(p):\n"
        "    if p.phase == 'downloading' and p.bytes_done > 1000000 and sys.argv[2] == 'half':\n"
        "        os.kill(os.getpid(), 9)\n"
        "if sys.argv[2] == 'whole':\n"
        "    cache.CacheEntry.commit = lambda *args, **kinds: os.kill(os.getpid(), 9)\n"
        "fetch('hf://org/killed', home=Path(sys.argv[1]), on_progress=kill)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(home), at], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [found for found in home.rglob("naru.json")] == []
    assert fetch("hf://org/killed", home=home).path.read_bytes() == body
    again = hub.ranges(path)[1:]
    if at == "whole":
        assert again == []
    else:
        assert len(again) == 1
        start = int(again[0].removeprefix("bytes=").split("-")[0])
        assert 1_000_000 < start < len(body)
