"""What the endpoints of stored things share: who asks, errors, counts, and whether anything is stored here at all."""

from __future__ import annotations

import abc
import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import orjson

from naru_proto.errors import Cancelled, InternalError, NaruError, NotFound
from naru_router.adapters.http.generation import Edge
from naru_router.adapters.http.messages import HttpRequest, Reply
from naru_router.adapters.http.responses import send_error, send_json
from naru_router.core.caller import Caller

logger = logging.getLogger(__name__)

OFF = (
    "files and batches are not offered here: whoever runs the router turns them on with its setting files_dir, "
    "a folder that all routers share"
)
_S = TypeVar("_S")


class ResourceEndpoint(abc.ABC, Generic[_S]):
    """One path of a kind of things."""

    name: str
    """In metrics."""
    methods: tuple[bytes, ...] = (b"GET",)

    def __init__(self, edge: Edge, shelf: _S | None) -> None:
        """`shelf`: where the things are; None: nothing is stored here."""
        self._edge = edge
        self._shelf = shelf

    async def serve(self, request: HttpRequest, reply: Reply) -> None:
        """Answers one request; cancelled when the client leaves."""
        began_s, status = time.perf_counter(), "500"
        try:
            status = str(await self._serve(request, reply))
        except asyncio.CancelledError:
            status = "499"
            raise
        finally:
            self._edge.counts.request(self.name, "", status, time.perf_counter() - began_s)

    @abc.abstractmethod
    async def answer(self, request: HttpRequest, reply: Reply, caller: Caller, shelf: _S) -> None:
        """Does what is asked and sends the reply, of status 200."""

    async def _serve(self, request: HttpRequest, reply: Reply) -> int:
        try:
            with self._edge.gate.admit():
                caller = self._edge.caller_of(request.headers)
                if self._shelf is None:
                    raise NotFound(OFF)
                await self.answer(request, reply, caller, self._shelf)
                return 200
        except Cancelled:
            return 499
        except NaruError as exc:
            return _fail(request, reply, exc)
        except Exception:
            # The top of the request: the client gets an answer, the log gets the trace, the router lives on.
            logger.exception("request %s failed", request.request_id)
            return _fail(request, reply, InternalError("the router failed on this request; its log says why"))


def send_object(reply: Reply, value: Mapping[str, Any]) -> None:
    """Sends a JSON object."""
    send_json(reply, 200, orjson.dumps(value))


def _fail(request: HttpRequest, reply: Reply, error: NaruError) -> int:
    if reply.has_started:
        logger.warning("request %s failed in its reply: %s", request.request_id, error.message)
        return 500  # a reply without its end: the connection is dropped, so that the client sees it
    if request.stream is not None and not request.stream.is_complete:
        reply.close_after()  # the rest of the body is not read
    return send_error(reply, error)
