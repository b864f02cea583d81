"""The combined log."""

from __future__ import annotations

from pathlib import Path

import pytest

from naru_operator.adapters import log_file
from naru_operator.adapters.log_file import LogFile
from naru_proto.errors import Unavailable


def test_lines_stand_under_their_part_and_at_once(tmp_path: Path) -> None:
    with LogFile(tmp_path / "logs") as log:
        log.write("router", "hello \u00e9")
        assert (tmp_path / "logs" / "naru.log").read_text() == "router | hello \u00e9\n"
    with LogFile(tmp_path / "logs") as log:
        log.write("redis", "again")
    assert (tmp_path / "logs" / "naru.log").read_text().splitlines()[1] == "redis | again"


def test_a_log_that_is_full_begins_anew_and_keeps_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_file, "_MAX_BYTES", 50)
    with LogFile(tmp_path) as log:
        for number in range(10):
            log.write("a", f"line {number} of some length")
    kept = (tmp_path / "naru.log.1").read_text() + (tmp_path / "naru.log").read_text()
    assert kept.splitlines()[-1] == "a | line 9 of some length"
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 100


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="--log-dir"):
        LogFile(tmp_path / "file")


def test_a_disk_that_refuses_does_not_end_serving(tmp_path: Path) -> None:
    with LogFile(tmp_path) as log:
        log._out.close()
        log._out = open("/dev/full", "w", buffering=1)
        log.write("a", "lost")
