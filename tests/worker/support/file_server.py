"""A real HTTP server for fetch tests: files with ranges, broken transfers, redirects, and what was asked."""

from __future__ import annotations

import contextlib
import http.server
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


@dataclass
class Served:
    """One path's answer."""

    body: bytes = b""
    content_type: str = "application/octet-stream"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    has_ranges: bool = True
    cuts: list[int] = field(default_factory=list)
    """Bytes after which the next transfers break off, first transfer first; then all arrives."""
    failures: list[int] = field(default_factory=list)
    """Statuses of the next answers, before the ordinary one."""


@dataclass(frozen=True)
class Asked:
    """One request that came."""

    path: str
    headers: dict[str, str]
    """Lower-case names."""


class FileServer:
    """What to serve, and what was asked for. Paths include the query."""

    def __init__(self) -> None:
        self.served: dict[str, Served] = {}
        self.asked: list[Asked] = []
        self.url = ""
        self.gate: Callable[[Asked], Served | None] = lambda asked: None
        """What answers in place of the table, if it is anything."""

    def put(self, path: str, body: bytes, content_type: str = "application/octet-stream") -> Served:
        """Serves a body."""
        self.served[path] = Served(body, content_type)
        return self.served[path]

    def redirect(self, path: str, location: str) -> None:
        """Sends a path elsewhere."""
        self.served[path] = Served(status=302, headers={"Location": location})

    def ranges(self, path: str) -> list[str]:
        """Range headers of the requests for a path; empty where there was none."""
        return [asked.headers.get("range", "") for asked in self.asked if asked.path == path]


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    files: FileServer

    def do_GET(self) -> None:
        """Answers from the table."""
        self.files.asked.append(Asked(self.path, {k.lower(): v for k, v in self.headers.items()}))
        served = self.files.gate(self.files.asked[-1]) or self.files.served.get(self.path)
        if served is None:
            self._send(404, b"nothing here", {})
        elif served.failures:
            self._send(served.failures.pop(0), b"not now", {})
        elif served.status != 200:
            self._send(served.status, served.body, served.headers)
        else:
            self._send_file(served)

    def _send_file(self, served: Served) -> None:
        headers = {"Content-Type": served.content_type, **served.headers}
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not (match and served.has_ranges):
            self._send(200, served.body, headers, served.cuts)
        elif int(match[1]) >= len(served.body):
            self._send(416, b"", headers)
        else:
            start, total = int(match[1]), len(served.body)
            last = min(int(match[2] or total), total - 1)
            headers["Content-Range"] = f"bytes {start}-{last}/{total}"
            self._send(206, served.body[start : last + 1], headers, served.cuts)

    def _send(self, status: int, body: bytes, headers: dict[str, str], cuts: list[int] | None = None) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if cuts:
            self.wfile.write(body[: cuts.pop(0)])
            self.close_connection = True
        else:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that leaves is no news here."""


@contextlib.contextmanager
def file_server() -> Iterator[FileServer]:
    """A server on a free loopback port while the context lasts."""
    files = FileServer()
    handler = type("Handler", (_Handler,), {"files": files})
    server = _Server(("127.0.0.1", 0), handler)
    files.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield files
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
