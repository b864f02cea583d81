"""Which server program is taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from naru_operator.adapters.redis_server import find_redis_server, redis_process, redis_url
from naru_proto.errors import Unavailable


def test_the_one_of_the_package_is_found() -> None:
    assert find_redis_server().name == "redis-server"


def test_else_the_one_of_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        Unavailable, match=r"install naru\[local\] .* or give the address of a running one with --redis-url"
    ):
        find_redis_server()
    program = tmp_path / "redis-server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert find_redis_server() == program


def test_it_takes_no_port_and_writes_no_data(tmp_path: Path) -> None:
    argv = redis_process(Path("redis-server"), tmp_path).argv
    assert argv[argv.index("--port") + 1] == "0"
    assert argv[argv.index("--save") + 1] == ""
    assert argv[argv.index("--unixsocketperm") + 1] == "700"
    assert redis_url(tmp_path) == f"unix://{tmp_path}/redis.sock"
