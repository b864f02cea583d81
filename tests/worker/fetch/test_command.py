"""The fetcher as a process: events, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from wheels import GGUF

from naru_worker.adapters.fetch.__main__ import main


def test_events_are_lines_of_json_with_the_path_last(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(GGUF)
    command = [sys.executable, "-m", "naru_worker.adapters.fetch", f"file://{tmp_path}/m.gguf", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ))
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["event"] for event in events] == ["progress", "done"]
    assert events[-1]["path"] == str(tmp_path / "m.gguf")
    assert done.stderr == ""


def test_an_error_is_an_event_and_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ftp://x", "--json"]) == 1
    (event,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert event["event"] == "error"
    assert event["code"] == "model_load_failed"
    assert "ftp://x" in event["message"]


def test_without_json_the_path_is_all_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.gguf").write_bytes(GGUF)
    assert main([f"file://{tmp_path}/m.gguf"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/m.gguf\n"
    assert main(["file:///no/such.gguf"]) == 1
    assert "does not exist" in capsys.readouterr().err
