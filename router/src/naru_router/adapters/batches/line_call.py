"""Runs one line of a batch through the very endpoint that serves it over the network: same checks, same answers.

The endpoint gets a request and a reply that no connection stands behind. Whose request it is stands in a header that
no client can send to it: these endpoints are reached from here alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from naru_proto.names import HEADER_PRIORITY
from naru_router.adapters.http.application import Endpoint
from naru_router.adapters.http.messages import Headers, HttpRequest, Reply
from naru_router.core.caller import Caller

PRIORITY = 10
"""Of a batch's requests: after all live ones that do not ask for less; they are refused where the wait for a turn is
above a sixth of what live ones may wait."""
TENANT_HEADER = b"x-naru-batch-tenant"


@dataclass(slots=True)
class LineReply:
    """What an endpoint has answered."""

    status: int = 0
    """0: nothing."""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytearray = field(default_factory=bytearray)

    @property
    def retry_after_s(self) -> float:
        """When it may be worth to ask again; 0: not told."""
        told = dict(self.headers).get(b"retry-after", b"")
        return float(told) if told.isdigit() else 0.0


class _NoWire:
    """What a kept reply would write to."""

    def write(self, data: bytes) -> None:
        """Nobody is there."""

    def reply_head(self) -> bytes:
        """No head is written."""
        return b""

    async def drained(self) -> None:
        """Nothing waits."""

    def reply_ended(self, *, keeps_open: bool) -> None:
        """No connection goes on."""


class KeptReply(Reply):
    """A reply that is kept in place of being sent."""

    __slots__ = ("kept",)

    def __init__(self) -> None:
        super().__init__(_NoWire(), is_head=False, is_http_10=False, keeps_open=True)
        self.kept = LineReply()

    def send(self, status: int, headers: Headers, body: bytes) -> None:
        """Keeps the whole reply."""
        self.begin(status, headers)
        self.write(body)
        self.end()

    def begin(self, status: int, headers: Headers, length: int | None = None) -> None:
        """Keeps the head."""
        self.has_started = True
        self.kept = LineReply(status, list(headers))

    def write(self, data: bytes) -> None:
        """Keeps some of the body."""
        self.kept.body += data

    def end(self) -> None:
        """The reply is whole."""
        self.is_over = True


class LineCaller:
    """Calls endpoints."""

    def __init__(self, endpoints: Mapping[str, Endpoint]) -> None:
        """`endpoints`: by path; made with an edge whose `caller_of` is `batch_callers`."""
        self._endpoints = endpoints

    @property
    def paths(self) -> tuple[str, ...]:
        """Of the endpoints that batches may call."""
        return tuple(self._endpoints)

    async def call(self, path: str, tenant: str, body: bytes, request_id: str) -> LineReply:
        """The endpoint's answer to one request; cancelled like one whose client leaves."""
        headers = [
            (b"content-type", b"application/json"),
            (HEADER_PRIORITY.encode("ascii"), b"%d" % PRIORITY),
            (TENANT_HEADER, tenant.encode("utf-8")),
        ]
        request, reply = HttpRequest(b"POST", path.encode("ascii"), headers), KeptReply()
        request.request_id, request.body = request_id, body
        await self._endpoints[path].serve(request, reply)
        return reply.kept if reply.is_over else LineReply()


def batch_callers(caller_named: Callable[[str], Caller]) -> Callable[[Headers], Caller]:
    """`caller_of` of an edge whose requests come from batches."""

    def caller_of(headers: Headers) -> Caller:
        return caller_named(dict(headers).get(TENANT_HEADER, b"").decode("utf-8"))

    return caller_of
