"""Notes of running instances: private, found, and cleared when stale."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from naru_operator.adapters.process_age import own_age_s, process_start
from naru_operator.adapters.run_state import RunState, naru_home, private_folder, running, write_run_state
from naru_proto.errors import Unavailable


def note(pid: int, folder: Path, start: int | None = None) -> RunState:
    begun = process_start(pid) if start is None else start
    return RunState(pid, begun, "http://127.0.0.1:1", "127.0.0.1:2", "redis://:secret@x", str(folder), str(folder))


def dead_pid() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def test_a_running_instance_is_found(home: Path) -> None:
    state = note(os.getpid(), home)
    path = write_run_state(home, state)
    assert running(home) == [state]
    assert path.stat().st_mode & 0o077 == 0
    assert [p.name for p in path.parent.iterdir()] == [f"{os.getpid()}.json"]


def test_the_addresses_of_all_routers_are_found_and_a_note_of_one_router_is_read_as_well(home: Path) -> None:
    state = dataclasses.replace(note(os.getpid(), home), more_http_urls=("http://127.0.0.1:3", "http://127.0.0.1:4"))
    path = write_run_state(home, state)
    assert running(home) == [state]
    older = json.loads(path.read_text())
    del older["more_http_urls"]
    path.write_text(json.dumps(older))
    assert running(home) == [note(os.getpid(), home)]
    for damaged in ("http://x", [5], None):
        path.write_text(json.dumps({**older, "more_http_urls": damaged}))
        assert running(home) == []
    path.write_text("[]")
    assert running(home) == []


def test_a_dead_instance_and_its_folder_are_removed(home: Path) -> None:
    folder = private_folder()
    (folder / "naru.log").write_text("x")
    path = write_run_state(home, note(dead_pid(), folder, start=5))
    assert running(home) == []
    assert not path.exists()
    assert not folder.exists()


def test_another_process_with_the_same_id_is_not_the_instance(home: Path) -> None:
    write_run_state(home, note(os.getpid(), home, start=process_start(os.getpid()) - 1))
    assert running(home) == []


@pytest.mark.parametrize("folder", ["", "..", "keep", "deeper/naru-x"])
def test_a_note_cannot_make_us_remove_another_folder(home: Path, folder: str) -> None:
    target = home / folder
    target.mkdir(parents=True, exist_ok=True)
    (target / "kept").write_text("x")
    write_run_state(home, note(dead_pid(), target, start=5))
    assert running(home) == []
    assert (target / "kept").exists()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"pid": "x"}'])
def test_a_broken_note_is_passed_over(home: Path, text: str) -> None:
    (home / "run").mkdir()
    (home / "run" / "7.json").write_text(text)
    state = note(os.getpid(), home)
    write_run_state(home, state)
    wrong = {**json.loads((home / "run" / f"{os.getpid()}.json").read_text()), "pid": "x"}
    (home / "run" / "8.json").write_text(json.dumps(wrong))
    assert running(home) == [state]


def test_a_home_that_cannot_be_written_is_a_sentence(home: Path) -> None:
    (home / "run").write_text("a file")
    with pytest.raises(Unavailable, match="set NARU_HOME"):
        write_run_state(home, note(os.getpid(), home))


def test_no_room_for_sockets_is_a_sentence(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(home / "missing"))
    with pytest.raises(Unavailable, match="set TMPDIR"):
        private_folder()


def test_the_home_is_what_the_user_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NARU_HOME", str(tmp_path / "x"))
    assert naru_home() == tmp_path / "x"
    monkeypatch.delenv("NARU_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert naru_home() == tmp_path / "naru"


def test_the_age_of_a_process_counts_from_its_start() -> None:
    code = (
        "import time; began = time.clock_gettime(time.CLOCK_BOOTTIME);"
        "from naru_operator.adapters.process_age import own_age_s;"
        "print(own_age_s() - (time.clock_gettime(time.CLOCK_BOOTTIME) - began))"
    )
    before_python_ran = float(subprocess.check_output([sys.executable, "-c", code]))
    # Interpreter start: more than nothing (less one clock tick), and far less than the age of this test run.
    assert -0.02 < before_python_ran < own_age_s() + 5
    assert process_start(2**22 + 1) == 0
