"""The HTTP server: index pages and wheels, the hub's API and files, ranges, faults. Called by the command and by tests.

Threads and blocking writes: a mirror of a test has a handful of clients. It speaks plain HTTP and checks no client.
"""

from __future__ import annotations

import contextlib
import http.server
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from naru_mirror.catalog import Catalog
from naru_mirror.faults import Fault, Faults, Request, RequestLog
from naru_mirror.routes import Answer, Asked, answer

_CHUNK_BYTES = 64 << 10
_MAX_BODY_BYTES = 1 << 20


class Mirror:
    """A running server's address and what it is told."""

    def __init__(self, catalog: Catalog, rate_bytes_per_s: int = 0) -> None:
        """``rate_bytes_per_s`` bounds each body's speed; 0 does not."""
        self.catalog = catalog
        self.faults = Faults()
        self.log = RequestLog()
        self.rate_bytes_per_s = rate_bytes_per_s
        self.url = ""

    @property
    def index_url(self) -> str:
        """For PIP_INDEX_URL."""
        return f"{self.url}/simple"

    @property
    def requests(self) -> list[Request]:
        """What was asked so far."""
        return self.log.all()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60
    mirror: Mirror

    def do_GET(self) -> None:
        """Answers."""
        self._serve()

    def do_HEAD(self) -> None:
        """Answers without a body."""
        self._serve()

    def do_POST(self) -> None:
        """For the control path."""
        self._serve()

    def do_DELETE(self) -> None:
        """For the control path."""
        self._serve()

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length") or "0")
        if not 0 <= length <= _MAX_BODY_BYTES:
            self.close_connection = True
            self.send_error(413)
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        asked = Asked(self.command, self.path, headers, self.rfile.read(length))
        is_control = asked.path.startswith("/_mirror/")
        request = Request(self.command, self.path, headers.get("range", ""), "authorization" in headers)
        if not is_control:
            self.mirror.log.add(request)
        fault = None if is_control else self.mirror.faults.take(self.path)
        if fault is not None and fault.delay_s:
            time.sleep(fault.delay_s)
        if fault is not None and fault.status:
            found = Answer(fault.status, b"told to fail", {"Content-Type": "text/plain"})
        else:
            found = answer(self.mirror.catalog, self.mirror.faults, self.mirror.log, asked)
        self._send(found, request, fault)

    def _send(self, found: Answer, request: Request, fault: Fault | None) -> None:
        request.status = found.status
        self.send_response(found.status)
        for name, value in {**found.headers, "Content-Length": str(found.length_bytes)}.items():
            self.send_header(name, value)
        self.end_headers()
        if request.method != "HEAD":
            self._send_body(found, request, fault)

    def _send_body(self, found: Answer, request: Request, fault: Fault | None) -> None:
        rate = (fault.rate_bytes_per_s if fault else 0) or self.mirror.rate_bytes_per_s
        last = found.length_bytes if fault is None or fault.cut_after_bytes < 0 else fault.cut_after_bytes
        started = time.monotonic()
        for block in _blocks(found, min(last, found.length_bytes)):
            data = bytes(byte ^ 0xFF for byte in block) if fault and fault.wrong_bytes else block
            self.wfile.write(data)
            request.sent_bytes += len(data)
            if rate:
                time.sleep(pause_s(request.sent_bytes, rate, time.monotonic() - started))
        if last < found.length_bytes:
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Quiet: requests are in the log."""


def pause_s(sent_bytes: int, rate_bytes_per_s: int, elapsed_s: float) -> float:
    """How long to wait before the next block of a body."""
    return max(0.0, sent_bytes / rate_bytes_per_s - elapsed_s)


def _blocks(found: Answer, num_bytes: int) -> Iterator[bytes]:
    if isinstance(found.body, Path):
        with found.body.open("rb") as stream:
            stream.seek(found.start)
            left = num_bytes
            while left > 0 and (block := stream.read(min(_CHUNK_BYTES, left))):
                left -= len(block)
                yield block
    elif num_bytes:
        yield found.body[:num_bytes]


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that leaves is no news."""


class _ServerV6(_Server):
    address_family = socket.AF_INET6


def open_server(mirror: Mirror, host: str, port: int) -> http.server.ThreadingHTTPServer:
    """A server that listens and does not answer yet; sets the mirror's URL.

    Raises:
        OSError: the address cannot be had.
    """
    handler = type("Handler", (_Handler,), {"mirror": mirror})
    server = (_ServerV6 if ":" in host else _Server)((host, port), handler)
    shown = f"[{host}]" if ":" in host else host
    mirror.url = f"http://{shown}:{server.server_address[1]}"
    return server


@contextlib.contextmanager
def running_mirror(catalog: Catalog, host: str = "127.0.0.1", *, rate_bytes_per_s: int = 0) -> Iterator[Mirror]:
    """A mirror on a free port while the context lasts."""
    mirror = Mirror(catalog, rate_bytes_per_s)
    server = open_server(mirror, host, 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield mirror
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
