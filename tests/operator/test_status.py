"""`naru status`: the tables, and what it says when nothing runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from naru_operator.adapters.process_age import process_start
from naru_operator.adapters.route_map import Board, RouteMap
from naru_operator.adapters.run_state import RunState, write_run_state
from naru_operator.cli.status import render, run_status
from naru_proto.registry import ModelRecord, ResidentRecord, WorkerRecord


def board(*residents: ResidentRecord) -> Board:
    workers = {
        f"w-{index}": WorkerRecord(f"w-{index}", f"h:{index}", "e", {"m": resident}, num_running=index)
        for index, resident in enumerate(residents)
    }
    return Board({"m": ModelRecord("m", "pypi://m", 1, aliases=("x", "y"), min_replicas=2)}, workers)


def cells(text: str) -> list[list[str]]:
    return [line.split("  ") for line in text.splitlines() if line]


def test_models_and_workers_are_two_tables() -> None:
    assert render(board(ResidentRecord("ready"), ResidentRecord("loading", bytes_done=1, bytes_total=4))) == (
        "MODEL  ALIASES  STATE  COPIES  URI\n"
        "m      x, y     ready  1/2     pypi://m\n"
        "\n"
        "WORKER  POOL     STATE    ADDRESS  RUNNING  WAITING  MODELS\n"
        "w-0     default  serving  h:0      0        0        m\n"
        "w-1     default  serving  h:1      1        0        m"
    )


@pytest.mark.parametrize(
    ("residents", "state"),
    [
        ([], "waiting"),
        ([ResidentRecord("loading", bytes_done=1, bytes_total=4)], "loading 25 %"),
        ([ResidentRecord("fetching")], "fetching"),
        ([ResidentRecord("failed", error="no file")], "failed: no file"),
        ([ResidentRecord("failed", error="no file"), ResidentRecord("loading")], "loading"),
        ([ResidentRecord("from a later version")], "from a later version"),
    ],
)
def test_the_state_of_a_model_is_that_of_its_best_copy(residents: list[ResidentRecord], state: str) -> None:
    assert state in render(board(*residents)).splitlines()[1]


def test_nothing_running_is_a_sentence_and_an_exit_code(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_status(None) == 1
    assert "start with `naru up PATH`" in capsys.readouterr().err


def test_a_running_instance_is_shown(
    home: Path, redis_server_url: str, route_map: RouteMap, capsys: pytest.CaptureFixture[str]
) -> None:
    pid = os.getpid()
    write_run_state(home, RunState(pid, process_start(pid), "http://h:1", "h:2", redis_server_url, "f", "/logs"))
    assert run_status(None) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"http://h:1 \u00b7 gRPC h:2 \u00b7 process {pid} \u00b7 logs /logs\n\nMODEL")
    assert run_status(redis_server_url) == 0
    assert capsys.readouterr().out.startswith("MODEL")
