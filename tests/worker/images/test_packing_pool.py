"""Packing processes stay for the next model as long as nothing is wrong with them, and no longer."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from image_bytes import unmeasured
from tiny_models import TinySpec, write_model

from naru_proto.errors import LoadError
from naru_worker.adapters.images import packing, packing_pool
from naru_worker.adapters.images.errors import LoadStopped, StoreFull
from naru_worker.adapters.images.packing import PackingDied
from naru_worker.adapters.images.packing_pool import PackingPool
from naru_worker.adapters.images.store import ImageStore

DEADLINE_S = 20.0


def nothing(done: int, total: int) -> None:
    """Progress that nobody watches."""


_others: set[int] = set()


def packers() -> set[int]:
    """Packing processes that the test has started, dead ones that nobody has waited for included."""
    found: set[int] = set()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() == psutil.STATUS_ZOMBIE or packing.MODULE in child.cmdline():
                found.add(child.pid)
    return found - _others


@pytest.fixture(autouse=True)
def only_mine() -> None:
    """Another test's process may still be idle."""
    _others.clear()
    _others.update(packers())


def wait_until(holds: Callable[[], bool]) -> None:
    """Other processes and timers tell nobody."""
    end = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < end, "waited for too long"
        time.sleep(0.01)


@pytest.fixture
def used(store: ImageStore, other_source: Path, go_on: threading.Event) -> int:
    """The id of the store's one process, which has packed a model and is idle."""
    store.ensure(other_source, nothing, go_on)
    (pid,) = packers()
    return pid


def test_the_next_model_gets_the_same_process_and_the_same_image_as_from_a_new_one(
    store: ImageStore, used: int, source: Path, go_on: threading.Event, tmp_path: Path, pack_here: Any
) -> None:
    path = store.ensure(source, nothing, go_on)
    assert packers() == {used}
    assert unmeasured(path) == unmeasured(pack_here(source, tmp_path))


def test_a_process_is_humble_and_bounded_for_all_its_models(
    store: ImageStore, used: int, source: Path, go_on: threading.Event
) -> None:
    store.ensure(source, nothing, go_on)
    process = psutil.Process(used)
    assert process.nice() >= min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
    assert process.rlimit(psutil.RLIMIT_DATA)[0] <= 4 * 2**30
    assert Path(f"/proc/{used}/oom_score_adj").read_text().strip() == "1000"


def test_two_models_at_once_get_two_processes(
    store: ImageStore, used: int, source: Path, go_on: threading.Event, tmp_path: Path
) -> None:
    third = tmp_path / "third"
    third.mkdir()
    write_model(third, TinySpec(seed=2))
    seen: list[set[int]] = []

    def pack_another(done: int, total: int) -> None:
        if not seen:
            store.ensure(third, nothing, go_on)
            seen.append(packers())

    store.ensure(source, pack_another, go_on)
    assert used in seen[0] and len(seen[0]) == 2 and packers() == seen[0]


def test_a_source_that_cannot_be_served_costs_no_process(
    store: ImageStore, used: int, source: Path, go_on: threading.Event, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_text("no model")
    with pytest.raises(LoadError, match="magic"):
        store.ensure(broken, nothing, go_on)
    store.ensure(source, nothing, go_on)
    assert packers() == {used}


def test_a_model_that_is_not_to_be_written_costs_no_process(
    store: ImageStore, used: int, source: Path, other_source: Path, go_on: threading.Event, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    copy.symlink_to(other_source)
    store.ensure(copy, nothing, go_on)
    assert store.num_images() == 1 and packers() == {used}
    image = store.open(store.find(copy) or tmp_path)
    store._budget_bytes = image.num_bytes + 1000
    with pytest.raises(StoreFull):
        store.ensure(source, nothing, go_on)
    image.close()
    store.ensure(source, nothing, go_on)
    assert packers() == {used}


@pytest.mark.parametrize("how", ["stopped", "stopped in its last step", "unexpected error"])
def test_a_process_that_was_interrupted_is_gone(
    store: ImageStore, used: int, source: Path, go_on: threading.Event, how: str
) -> None:
    should_stop = threading.Event()

    def interrupt(done: int, total: int) -> None:
        if how == "unexpected error":
            raise ZeroDivisionError
        if how == "stopped" or done == total:
            should_stop.set()

    with pytest.raises(ZeroDivisionError if how == "unexpected error" else LoadStopped):
        store.ensure(source, interrupt, should_stop)
    assert packers() == set() and store.num_images() == 1
    store.ensure(source, nothing, go_on)
    assert len(packers()) == 1 and used not in packers()


def test_a_process_that_died_while_idle_is_replaced(
    store: ImageStore, used: int, source: Path, go_on: threading.Event
) -> None:
    psutil.Process(used).kill()
    wait_until(lambda: psutil.Process(used).status() == psutil.STATUS_ZOMBIE)
    store.ensure(source, nothing, go_on)
    assert len(packers()) == 1 and used not in packers()


def test_a_process_outlives_the_thread_that_asked_for_it(
    store: ImageStore, source: Path, other_source: Path, go_on: threading.Event
) -> None:
    """The kernel ends children with the thread that started them."""
    pids: list[set[int]] = []
    for path in (source, other_source):
        thread = threading.Thread(target=store.ensure, args=(path, nothing, go_on))
        thread.start()
        thread.join()
        pids.append(packers())
    assert pids[0] == pids[1] and len(pids[0]) == 1


def test_an_idle_process_is_reaped(
    store: ImageStore, source: Path, go_on: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing_pool, "IDLE_S", 0.05)
    store.ensure(source, nothing, go_on)
    wait_until(lambda: packers() == set())


ALONE = """
import sys
from naru_worker.adapters.images import pack
pack.IDLE_S, pack.MAX_MODELS = float(sys.argv[1]), int(sys.argv[2])
sys.exit(pack.main(int(sys.argv[3])))
"""


def run_alone(idle_s: float, max_models: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", ALONE, str(idle_s), str(max_models), str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_an_idle_process_ends_by_itself() -> None:
    with run_alone(0.0, 64) as process:
        assert process.wait(DEADLINE_S) == 0
        assert process.stdout is not None and process.stdout.read() == b""


def test_a_process_ends_after_so_many_models_and_says_so(source: Path) -> None:
    order = json.dumps({"source": str(source / "missing"), "destination": ""}).encode() + b"\n"
    with run_alone(DEADLINE_S, 2) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(2 * order)
        process.stdin.flush()
        answers = [json.loads(line) for line in process.stdout]
        assert process.wait(DEADLINE_S) == 0
    assert [answer["goes_on"] for answer in answers] == [True, False]


@pytest.mark.parametrize("end", ["closed", "forgotten"])
def test_processes_go_with_their_store(source: Path, go_on: threading.Event, tmp_path: Path, end: str) -> None:
    store = ImageStore(tmp_path / "images", 2**30)
    store.ensure(source, nothing, go_on)
    assert len(packers()) == 1
    if end == "closed":
        store.close()
    del store
    gc.collect()
    assert packers() == set()


ODD = os.fsdecode(b"odd \xff\xfe\xed\xa0\x80 \"quoted\" \\ 'it' \n\t {} \xc5\xbe \xf0\x9f\xa4\x96")


def test_paths_of_any_bytes_are_packed_and_named(go_on: threading.Event, tmp_path: Path) -> None:
    folder = tmp_path / ODD
    folder.mkdir()
    store = ImageStore(folder / "images", 2**30)
    with pytest.raises(LoadError) as caught:
        store.ensure(folder, nothing, go_on)
    assert ODD in caught.value.message
    write_model(folder, TinySpec())
    assert store.ensure(folder, nothing, go_on).parent == folder / "images"
    store.close()


FAKE = """
import json, sys
def say(**values):
    print(json.dumps(values), flush=True)
plan, done = {"digest": "ab", "num_bytes": 9}, {"finished": True, "goes_on": True}
for line in sys.stdin:
    """


@pytest.mark.parametrize(
    ("does", "match"),
    [
        ("print('nonsense', flush=True)", "ended by signal SIGKILL"),
        ("print('x' * 300_000, end='', flush=True); sys.stdin.read()", "ended by signal SIGKILL"),
        ("say(digest='../x', num_bytes=9)", "instead of its plan"),
        ("say(digest='ab', num_bytes=True)", "instead of its plan"),
        ("sys.exit('no more')", "ended with status 1 and said 'no more'"),
        ("say(**plan); sys.exit(3)", "ended with status 3"),
        ("say(message='no', goes_on='yes')", "no"),
        ("say(**plan); sys.stdin.readline(); say(**done, extra=1); say(**done)", None),
        ("say(**plan); sys.stdin.readline(); say(finished=True)", None),
        ("say(**plan); sys.stdin.readline(); say(**done); sys.exit(0)", None),
    ],
)
def test_a_process_that_breaks_the_protocol_is_not_used_again(
    tmp_path: Path, go_on: threading.Event, monkeypatch: pytest.MonkeyPatch, does: str, match: str | None
) -> None:
    (tmp_path / "fake_packer.py").write_text(FAKE + does)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(packing, "MODULE", "fake_packer")
    pool = PackingPool()
    pids: list[int] = []
    for _ in range(2):
        try:
            with pool.planned(tmp_path, tmp_path, go_on) as (process, _plan):
                pids.append(process.pid)
                process.write(nothing)
                if match is None:
                    # What it says or does behind its end arrives before it is looked at.
                    wait_until(lambda process=process: not process.is_fit())  # type: ignore[misc]
            assert match is None
        except LoadError as e:
            assert match is not None and match in e.message, e.message
            assert isinstance(e, PackingDied) == ("ended" in match)
        assert packers() == set()
    assert len(set(pids)) == len(pids)
    pool.close()


def test_fifty_models_leave_memory_and_descriptors_as_they_were(
    store: ImageStore, source: Path, go_on: threading.Event
) -> None:
    """Every second one with a tokenizer of its own."""
    tokenizer = source / "tokenizer.json"
    text = tokenizer.read_text()
    seen: list[tuple[int, int, int]] = []
    for number in range(50):
        if number % 2:
            tokenizer.write_text(text.replace("<|im_end|>", f"<|im_end_{number}|>"))
        store.remove(store.ensure(source, nothing, go_on))
        (pid,) = packers()
        child = psutil.Process(pid)
        seen.append((child.memory_info().rss, child.num_fds(), psutil.Process().num_fds()))
    rss, child_fds, fds = zip(*seen, strict=True)
    assert max(rss[25:]) - rss[10] < 4 * 2**20, [num_bytes >> 20 for num_bytes in rss]
    assert len(set(child_fds)) == 1 and len(set(fds)) == 1
