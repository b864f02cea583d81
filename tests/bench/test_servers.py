from __future__ import annotations

import socket
import sys
from pathlib import Path

import psutil
import pytest
from bench.servers import Server, ServerError, ServerSpec, answers, exit_words, free_port

SERVER_WITH_CHILD = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()"])
print(child.pid, flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


def spec(source: str, timeout_s: float = 30) -> ServerSpec:
    port = free_port()
    argv = (sys.executable, "-c", source, str(port))
    return ServerSpec("fake", argv, port, "/", "m", timeout_s, stop_timeout_s=0.2)


def test_leaving_ends_the_server_and_children_that_ignore_the_signal(tmp_path: Path) -> None:
    with Server(spec(SERVER_WITH_CHILD), tmp_path / "log") as server:
        assert answers(server.spec.port, "/")
        assert server.start_s > 0
        assert server.usage().rss_bytes > 0
        child_pid = int((tmp_path / "log").read_text().split()[0])
        assert psutil.pid_exists(child_pid)
        port = server.spec.port
    assert not answers(port, "/")
    gone = not psutil.pid_exists(child_pid) or psutil.Process(child_pid).status() == psutil.STATUS_ZOMBIE
    assert gone


def test_a_server_that_ends_at_once_is_an_error_with_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"fake ended with code 3(.|\n)*no model here"):
        with Server(spec("import sys; print('no model here'); sys.exit(3)"), tmp_path / "log"):
            pytest.fail("it never was ready")


def test_a_server_that_is_never_ready_is_stopped_at_its_deadline(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"not ready within 0\.2 s"):
        with Server(spec("import signal; signal.pause()", timeout_s=0.2), tmp_path / "log"):
            pytest.fail("it never was ready")


def test_a_free_port_can_be_bound() -> None:
    with socket.create_server(("127.0.0.1", free_port())):
        pass


def test_a_return_code_is_told_in_words() -> None:
    assert exit_words(2) == "with code 2"
    assert exit_words(-4) == "by SIGILL"
    assert exit_words(-200) == "by signal 200"
