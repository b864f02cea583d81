"""`naru status`: the tables, and what it says when nothing runs."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from naru_operator.adapters.process_age import process_start
from naru_operator.adapters.route_map import Board, RouteMap
from naru_operator.adapters.run_state import RunState, write_run_state
from naru_operator.cli.status import render, run_status
from naru_operator.cli.text import human_bytes
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
        "MODEL  ALIASES  STATE  COPIES  BYTES  URI\n"
        "m      x, y     ready  1/2     -      pypi://m\n"
        "\n"
        "WORKER  POOL     STATE    ADDRESS  RUNNING  WAITING  USED/BUDGET  KNOWN  MODELS\n"
        "w-0     default  serving  h:0      0        0        -            0      m\n"
        "w-1     default  serving  h:1      1        0        -            0      m"
    )


def test_bytes_and_counts_are_for_people() -> None:
    held = {f"m{index:02}": ResidentRecord("ready", num_bytes=3 << 20) for index in range(11)}
    worker = WorkerRecord("w", "h:1", "e", held, num_known=300, budget_bytes=3 << 30, used_bytes=1536 << 20)
    records = {name: ModelRecord(name, "pypi://m", 1, on_demand=name == "m00") for name in held}
    text = render(Board(records, {"w": worker, "v": WorkerRecord("v", "h:2", "e", dict(held))}))
    rows = [line.split("  ") for line in text.splitlines()]
    assert [cell.strip() for cell in rows[1] if cell.strip()] == ["m00", "-", "ready", "2", "6.0 MiB", "pypi://m"]
    assert [cell.strip() for cell in rows[2] if cell.strip()] == ["m01", "-", "ready", "2/1", "6.0 MiB", "pypi://m"]
    assert "1.5 GiB / 3.0 GiB  300    m00, m01, m02, m03, m04, m05, m06, m07 and 3 more" in text.splitlines()[-1]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (98_412_000, "94 MiB"), (1 << 30, "1.0 GiB"), (-5, "0 B")],
)
def test_amounts_are_in_binary_units(num_bytes: int, text: str) -> None:
    assert human_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("residents", "state"),
    [
        ([], "not loaded"),
        ([ResidentRecord("cold")], "not loaded"),
        ([ResidentRecord("host")], "host"),
        ([ResidentRecord("loading", bytes_done=1, bytes_total=4)], "loading 25 %"),
        ([ResidentRecord("fetching", bytes_done=1, bytes_total=4, eta_s=2.2)], "fetching 25 %, 3 s left"),
        ([ResidentRecord("loading", eta_s=math.inf), ResidentRecord("host")], "loading"),
        ([ResidentRecord("loading"), ResidentRecord("loading", bytes_done=1, bytes_total=2)], "loading 50 %"),
        ([ResidentRecord("fetching")], "fetching"),
        ([ResidentRecord("failed", error="no file")], "failed: no file"),
        ([ResidentRecord("failed", error="no file"), ResidentRecord("loading")], "loading"),
        ([ResidentRecord("from a later version")], "from a later version"),
    ],
)
def test_the_state_of_a_model_is_that_of_its_best_copy(residents: list[ResidentRecord], state: str) -> None:
    assert f"  {state}  " in render(board(*residents)).splitlines()[1]


@pytest.mark.parametrize("residents", [[], [ResidentRecord("cold")]])
def test_a_model_on_demand_says_so_while_nobody_holds_it(residents: list[ResidentRecord]) -> None:
    shown = board(*residents)
    text = render(Board({"m": ModelRecord("m", "pypi://m", 1, on_demand=True)}, shown.workers))
    assert text.splitlines()[1].split() == ["m", "-", "on", "demand", "0", "-", "pypi://m"]


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
