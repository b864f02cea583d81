"""A real S3 server (moto) on loopback, with counters of what was asked and sent, and faults on demand."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

PUBLIC = {"x-amz-acl": "public-read"}


@dataclass
class Asked:
    """One request that came."""

    method: str
    path: str
    query: str
    range: str
    if_match: str
    authorization: str
    sent_bytes: int = 0
    """Of the body, as far as it was sent."""


Fault = Callable[[Asked], "tuple[str, bytes] | int | None"]
"""Called before a request is answered: a status with a body to answer instead, or after how many bytes to cut."""


@dataclass
class ObjectServer:
    """What was asked, and what goes wrong."""

    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    fault: Fault | None = None
    rot: Callable[[Asked, bytes], bytes] = lambda asked, body: body
    """What is sent in place of a body, of the same length."""
    on_sent: Callable[[int], object] = lambda num_bytes: None
    """Told of all bytes of objects sent so far, before the next piece is sent."""
    sent_bytes: int = 0
    open_ranges: int = 0
    most_open_ranges: int = 0
    """Ranges that were being answered at once."""

    def put(self, path: str, body: bytes, headers: dict[str, str] | None = None) -> httpx.Headers:
        """Uploads an object, or makes a bucket of a path without slash."""
        done = httpx.put(f"{self.url}/{path}", content=body, headers={**PUBLIC, **(headers or {})})
        assert done.status_code == 200, done.text
        return done.headers

    def gets(self, end: str) -> list[Asked]:
        """Requests for the content of objects whose path has this end."""
        return [asked for asked in self.asked if asked.method == "GET" and asked.path.endswith(end)]

    def forget(self) -> None:
        """Counts from here on."""
        self.asked.clear()
        self.sent_bytes = self.most_open_ranges = 0


class _Counted:
    """A WSGI application around moto's."""

    def __init__(self, server: ObjectServer, application: Any) -> None:
        self._server = server
        self._application = application
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        server = self._server
        asked = Asked(
            environ["REQUEST_METHOD"],
            environ["PATH_INFO"],
            environ["QUERY_STRING"],
            environ.get("HTTP_RANGE", ""),
            environ.get("HTTP_IF_MATCH", ""),
            environ.get("HTTP_AUTHORIZATION", ""),
        )
        with self._lock:
            server.asked.append(asked)
            server.open_ranges += bool(asked.range)
            server.most_open_ranges = max(server.most_open_ranges, server.open_ranges)
        fault = server.fault(asked) if server.fault is not None else None
        if isinstance(fault, tuple):
            with self._lock:
                server.open_ranges -= bool(asked.range)
            start_response(fault[0], [("Content-Type", "application/xml"), ("Content-Length", str(len(fault[1])))])
            return [fault[1]]
        body = server.rot(asked, b"".join(self._application(environ, start_response)))
        return self._send(asked, body, fault)

    def _send(self, asked: Asked, body: bytes, cut_at: int | None) -> Iterator[bytes]:
        try:
            yield from self._pieces(asked, body, cut_at)
        finally:
            with self._lock:
                self._server.open_ranges -= bool(asked.range)

    def _pieces(self, asked: Asked, body: bytes, cut_at: int | None) -> Iterator[bytes]:
        for start in range(0, len(body), 1 << 16):
            piece = body[start : start + (1 << 16)]
            if cut_at is not None and start + len(piece) > cut_at:
                yield piece[: max(0, cut_at - start)]
                raise ConnectionAbortedError("cut on demand")
            if asked.method == "GET" and asked.range:
                self._server.on_sent(self._server.sent_bytes)
                with self._lock:
                    self._server.sent_bytes += len(piece)
            asked.sent_bytes += len(piece)
            yield piece


@contextlib.contextmanager
def object_server() -> Iterator[ObjectServer]:
    """A server without objects on a free loopback port while the context lasts."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Handler(WSGIRequestHandler):
        def log(self, type: str, message: str, *args: Any) -> None:
            """Quiet."""

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    server = ObjectServer()
    application = _Counted(server, DomainDispatcherApplication(create_backend_app))
    http = make_server("127.0.0.1", 0, application, threaded=True, request_handler=Handler)
    server.url = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        httpx.post(f"{server.url}/moto-api/reset").raise_for_status()
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
