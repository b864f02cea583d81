from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from bench.servers import ServerSpec
from bench.slots import keep, restored, slot_file


@pytest.fixture
def llama(tmp_path: Path) -> Iterator[tuple[int, list[str], list[int]]]:
    """A server that writes a file when asked to save: its port, what it was asked for, and the statuses it gives."""
    asked, statuses = list[str](), [200]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            name = json.loads(self.rfile.read(int(self.headers["content-length"])))["filename"]
            asked.append(self.path)
            if self.path.endswith("save"):
                (tmp_path / name).write_bytes(b"state")
            self.send_response(statuses[0])
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server.server_port, asked, statuses
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_slot_is_kept_once_and_brought_back_for_the_same_prompt_only(
    llama: tuple[int, list[str], list[int]], tmp_path: Path
) -> None:
    port, asked, statuses = llama
    model = tmp_path / "m.gguf"
    model.write_bytes(b"weights")
    argv = ("llama-server", "--model", str(model))
    spec = ServerSpec("llamacpp", argv, port, "/", "m", 1.0, settings="a", version="1", slots_folder=tmp_path)
    assert not restored(spec, "long")
    keep(spec, "long")
    assert slot_file(spec, "long").read_bytes() == b"state"
    assert restored(spec, "long")
    assert not restored(spec, "another")
    assert asked == ["/slots/0?action=save", "/slots/0?action=restore"]
    statuses[0] = 400
    assert not restored(spec, "long")
    assert not slot_file(spec, "long").exists()  # of no use: another try would fail as well
    keep(spec, "long")
    assert not list(tmp_path.glob("*.slot")) + list(tmp_path.glob("*.partial"))


def test_a_server_that_keeps_no_slots_is_not_asked(tmp_path: Path) -> None:
    spec = ServerSpec("vllm", ("vllm",), 1, "/", "m", 1.0)
    assert not restored(spec, "long")
    keep(spec, "long")
