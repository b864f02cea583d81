"""kill -9 at any moment of packing leaves a whole image or none, and the next one works."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from naru_proto.errors import LoadError
from naru_worker.adapters.images.packing import PackingProcess
from naru_worker.adapters.images.store import ImageStore

WORKER = """
import json, os, signal, sys, threading
from pathlib import Path
from naru_worker.adapters.images import image_folder, packing, store as store_module
from naru_worker.adapters.images.store import ImageStore

folder, source, before, moment = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
die = lambda *args, **names: os.kill(os.getpid(), signal.SIGKILL)
calls = []

def on_progress(done, total):
    calls.append(done)
    if moment == "first progress" or (moment == "last progress" and done == total):
        die()

def after(owner, name):
    real = getattr(owner, name)
    def call(*args, **names):
        real(*args, **names)
        die()
    setattr(owner, name, call)

store = ImageStore(folder, 2**30)
if before:
    store.ensure(Path(before), lambda done, total: None, threading.Event())
{
    "process started": lambda: after(packing.PackingProcess, "__init__"),
    "plan known": lambda: after(packing.PackingProcess, "plan"),
    "space taken": lambda: after(image_folder.ImageFolder, "make_partial"),
    "written": lambda: after(packing.PackingProcess, "write"),
    "renamed": lambda: after(os, "rename"),
    "published": lambda: after(image_folder.ImageFolder, "publish"),
    "record half written": lambda: setattr(os, "replace", die),
}.get(moment, lambda: None)()

if moment == "together":
    print("ready", flush=True)
    sys.stdin.readline()
path = store.ensure(source, on_progress, threading.Event())
print(json.dumps([str(path), len(calls)]))
"""

MOMENTS = (
    "plan known",
    "space taken",
    "first progress",
    "last progress",
    "written",
    "renamed",
    "published",
    "record half written",
)
BUDGET_BYTES = 2**30


def nothing(done: int, total: int) -> None:
    """Progress that nobody watches."""


def start(folder: Path, source: Path, moment: str, before: Path | None = None) -> subprocess.Popen[str]:
    """A worker that packs `before` in peace, and is killed at the moment when it packs the source."""
    command = [sys.executable, "-c", WORKER, str(folder), str(source), str(before or ""), moment]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def packers_of(worker_pid: int) -> list[psutil.Process]:
    """Packing processes that a worker started, be it alive or dead."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if words[-2:] == ["naru_worker.adapters.images.pack", str(worker_pid)]:
            found.append(process)
    return found


def assert_clean(folder: Path, sources: list[Path], go_on: threading.Event) -> None:
    """A restart finds whole images only and serves the sources."""
    store = ImageStore(folder, BUDGET_BYTES)
    assert left_over(folder) == []
    for path in folder.glob("*.naru"):
        image = store.open(path)
        image.make_present(lambda ready: None, True, go_on)
        image.build_tokenizer()
        image.close()
    paths = [store.ensure(source, nothing, go_on) for source in sources]
    assert store.num_images() == len(sources) and store.used_bytes() == sum(path.stat().st_size for path in paths)
    store.close()


@pytest.mark.parametrize(
    ("moment", "is_second"),
    [("process started", False), ("first progress", False), *((moment, True) for moment in MOMENTS)],
)
def test_a_worker_killed_while_packing_leaves_nothing_half_done(
    tmp_path: Path, source: Path, other_source: Path, go_on: threading.Event, moment: str, is_second: bool
) -> None:
    """In the first or the second model that a packing process packs."""
    folder = tmp_path / "images"
    worker = start(folder, source, moment, other_source if is_second else None)
    with worker:
        assert worker.stdout is not None and worker.stdout.read() == ""
    assert worker.returncode == -9
    psutil.wait_procs(packers_of(worker.pid), timeout=20)
    assert packers_of(worker.pid) == [], "the packing process went with its worker"
    num_whole = int(is_second) + (moment in ("renamed", "published", "record half written"))
    assert len(list(folder.glob("*.naru"))) == num_whole
    assert_clean(folder, [source, other_source] if is_second else [source], go_on)


def kill_packer(process: PackingProcess) -> None:
    """Returns when it is dead; it is still to be reaped."""
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.parametrize("order", ["source", "write"], ids=["before it has the model", "before it may write"])
@pytest.mark.parametrize("is_second", [False, True], ids=["first model", "second model"])
def test_a_killed_packing_process_is_a_reason_and_leaves_nothing(
    tmp_path: Path,
    source: Path,
    other_source: Path,
    go_on: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    order: str,
    is_second: bool,
) -> None:
    folder = tmp_path / "images"
    store = ImageStore(folder, BUDGET_BYTES)
    if is_second:
        store.ensure(other_source, nothing, go_on)
    killed: list[int] = []
    tell = PackingProcess._tell

    def kill_before(process: PackingProcess, **values: object) -> None:
        if not killed and order in values:
            kill_packer(process)
            killed.append(process.pid)
        tell(process, **values)

    monkeypatch.setattr(PackingProcess, "_tell", kill_before)
    if order == "source" and is_second:
        # It may have ended as an idle one does, and nothing had been done for the model: a new process gets it.
        store.ensure(source, nothing, go_on)
    else:
        with pytest.raises(LoadError, match="was ended by signal SIGKILL"):
            store.ensure(source, nothing, go_on)
        assert store.find(source) is None and store.num_images() == int(is_second)
    assert killed and left_over(folder) == []
    store.close()
    assert_clean(folder, [source, other_source] if is_second else [source], go_on)


@pytest.mark.parametrize("is_second", [False, True], ids=["first model", "second model"])
def test_a_packing_process_killed_while_it_writes_leaves_a_whole_image_or_none(
    tmp_path: Path, source: Path, other_source: Path, go_on: threading.Event, is_second: bool
) -> None:
    folder = tmp_path / "images"
    store = ImageStore(folder, BUDGET_BYTES)
    if is_second:
        store.ensure(other_source, nothing, go_on)

    def kill(done: int, total: int) -> None:
        for process in packers_of(os.getpid()):
            process.kill()

    try:
        store.ensure(source, kill, go_on)
    except LoadError as e:
        assert "was ended by signal SIGKILL" in e.message and store.find(source) is None
    else:
        # It had said that it was done before the signal came.
        assert store.find(source) is not None
    assert left_over(folder) == []
    store.close()
    assert_clean(folder, [source, other_source] if is_second else [source], go_on)


def left_over(folder: Path) -> list[str]:
    """Files of packing that should not be there."""
    found = [*folder.glob("*.partial"), *folder.glob("sources/*.tmp"), *folder.glob("locks/*")]
    return sorted(path.name for path in found)


def test_two_workers_of_a_node_pack_once(tmp_path: Path, source: Path) -> None:
    workers = [start(tmp_path / "images", source, "together") for _ in range(2)]
    for worker in workers:
        assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    answers = [json.loads(worker.communicate(timeout=60)[0]) for worker in workers]
    assert answers[0][0] == answers[1][0]
    assert sorted(bool(calls) for _, calls in answers) == [False, True]


def test_what_dead_workers_left_is_removed_at_the_start(tmp_path: Path, source: Path, go_on: threading.Event) -> None:
    folder = tmp_path / "images"
    store = ImageStore(folder, BUDGET_BYTES)
    path = store.ensure(source, nothing, go_on)
    (record,) = (folder / "sources").iterdir()
    (folder / "dead.partial").write_bytes(bytes(1000))
    (folder / "locks" / "source-dead.lock").touch()
    (folder / f"{'0' * 64}.used").touch()
    (folder / "sources" / "dead.json").write_text(json.dumps({"digest": "0" * 64, "fingerprint": ""}))
    (folder / "sources" / "torn.json").write_text("{")
    ImageStore(folder, BUDGET_BYTES)
    assert sorted(folder.rglob("*")) == sorted(
        [folder / "locks", folder / "sources", path, path.with_suffix(".used"), record]
    )


def test_a_file_that_is_being_packed_is_not_taken_for_a_dead_one(
    tmp_path: Path, source: Path, go_on: threading.Event
) -> None:
    folder = tmp_path / "images"
    store = ImageStore(folder, BUDGET_BYTES)
    seen: list[int] = []

    def start_another(done: int, total: int) -> None:
        if not seen:
            seen.append(ImageStore(folder, BUDGET_BYTES).used_bytes())

    path = store.ensure(source, start_another, go_on)
    assert seen == [path.stat().st_size]


@pytest.mark.parametrize("record", ["", "[]", '{"digest": "../../etc/passwd"}', '{"digest": 5}', "x" * 10_000])
def test_a_record_that_is_not_ours_is_ignored(
    tmp_path: Path, source: Path, go_on: threading.Event, record: str
) -> None:
    folder = tmp_path / "images"
    store = ImageStore(folder, BUDGET_BYTES)
    if not record:
        store.ensure(source, nothing, go_on)
        for path in (folder / "sources").iterdir():
            path.write_text(record)
    else:
        (folder / "sources" / "any.json").write_text(record)
    assert store.find(source) is None
    ImageStore(folder, BUDGET_BYTES)
    assert list((folder / "sources").iterdir()) == []
