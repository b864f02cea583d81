"""What the two generation endpoints share, as ASGI applications: admission, the body, errors, counts.

Errors are in OpenAI's form, as a reply before the first byte and as an event after it.
"""

from __future__ import annotations

import abc
import logging
import secrets
import time
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from naru_proto.errors import Cancelled, InternalError, NaruError
from naru_router.adapters.dispatcher import Dispatcher
from naru_router.adapters.gate import Gate
from naru_router.adapters.http.body import read_body, run_while_connected
from naru_router.adapters.http.consumers import AnswerConsumer, Stopwatch, route_header
from naru_router.adapters.http.responses import EventStream, Headers, send_error
from naru_router.adapters.jobs import JobMaker
from naru_router.adapters.metrics import Metrics
from naru_router.core.json_body import parse_object

logger = logging.getLogger(__name__)

UNKNOWN_MODEL = ""
"""Label of requests whose model was never found: names come from clients and would pile up."""


@dataclass(frozen=True, slots=True)
class Edge:
    """What both endpoints work with."""

    jobs: JobMaker
    dispatcher: Dispatcher
    gate: Gate
    metrics: Metrics
    max_body_bytes: int


class Exchange:
    """One request and its reply."""

    def __init__(self, edge: Edge, endpoint: str, send: Send, request_id: str) -> None:
        self.edge = edge
        self.endpoint = endpoint
        self.send = send
        self.request_id = request_id
        self.stream = EventStream(send)
        self.model = UNKNOWN_MODEL
        self.answer_id = secrets.token_hex(12)
        self.created_s = int(time.time())
        self.watch = Stopwatch()

    def on_first_byte(self) -> None:
        """Notes the time to the first token."""
        self.edge.metrics.ttft_seconds.labels(self.endpoint, self.model).observe(self.watch.elapsed_s())


class GenerationEndpoint(abc.ABC):
    """One of the two endpoints."""

    name: str

    def __init__(self, edge: Edge) -> None:
        self._edge = edge

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        exchange = Exchange(self._edge, self.name, send, scope.get("naru.request_id", ""))
        status = "500"
        try:
            status = await self._serve(scope, receive, exchange)
        finally:
            metrics = self._edge.metrics
            metrics.requests.labels(self.name, exchange.model, status).inc()
            metrics.request_seconds.labels(self.name, exchange.model).observe(exchange.watch.elapsed_s())

    @abc.abstractmethod
    async def answer(self, body: dict[str, object], exchange: Exchange) -> None:
        """Runs the call and sends its answer."""

    async def _serve(self, scope: Scope, receive: Receive, exchange: Exchange) -> str:
        is_body_unread = True
        try:
            with self._edge.gate.admit():
                data = await read_body(scope, receive, self._edge.max_body_bytes)
                is_body_unread = False
                body = parse_object(data)
                del data
                await run_while_connected(receive, self.answer(body, exchange))
                return "200"
        except Cancelled:
            return "499"
        except NaruError as exc:
            return await _fail(exchange, exc, is_body_unread)
        except Exception:
            # The top of the request: the client gets an answer, the log gets the trace, the router lives on.
            logger.exception("request %s failed", exchange.request_id)
            error = InternalError("the router failed on this request; its log says why")
            return await _fail(exchange, error, is_body_unread)


async def _fail(exchange: Exchange, error: NaruError, is_body_unread: bool) -> str:
    if exchange.stream.has_started:
        logger.warning("request %s failed in its stream: %s", exchange.request_id, error.message)
        await exchange.stream.close_with_error(error)
        return "stream_error"
    return str(await send_error(exchange.send, error, is_body_unread=is_body_unread))


def route_headers(consumers: list[AnswerConsumer]) -> Headers:
    """Where the first prompt went; the others of a call are found by their counts in the metrics."""
    decision = consumers[0].decision
    return [] if decision is None else [route_header(decision)]
