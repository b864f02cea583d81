"""Requests to the API server from asyncio: threads, attempts, pauses, and the last look before a write leaves.

Used by the client. Knows kinds and verbs, not what is read or written.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from kubernetes.client.configuration import Configuration

from naru_operator.adapters.kube.connection import Answer, Connection
from naru_operator.adapters.kube.errors import ApiAway, NotLeader, error_of
from naru_operator.adapters.kube.kinds import Kind
from naru_operator.core.kube import Object

logger = logging.getLogger(__name__)

JSON = "application/json"
APPLY = "application/apply-patch+yaml"

_METHODS = {
    "get": "GET",
    "list": "GET",
    "create": "POST",
    "patch": "PATCH",
    "update": "PUT",
    "delete": "DELETE",
}
_READS = ("get", "list")


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """How patient a client is."""

    num_threads: int = 16
    """Requests under way at once."""
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 30.0
    """Between two pieces of an answer."""
    retry_pauses_s: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0)
    """Before each further attempt when the API server is away or overloaded; each is varied by half. A server that
    names a longer time gets it.
    """


@dataclass(frozen=True, slots=True)
class Request:
    """One request."""

    verb: str
    """RBAC's word for it."""
    kind: Kind
    namespace: str | None
    name: str = ""
    subresource: str = ""
    body: Object | None = None
    query: Mapping[str, str | int] = field(default_factory=dict)
    content_type: str = JSON
    path: str = ""
    """Of what is no object of a kind; empty: the kind's own."""

    @property
    def url_path(self) -> str:
        """The URL's path."""
        return self.path or self.kind.path(self.namespace, self.name, self.subresource)

    @property
    def target(self) -> str:
        """What it is about, in words."""
        if self.path:
            return self.path
        what = self.kind.resource + (f"/{self.subresource}" if self.subresource else "")
        named = f"{what} {self.name!r}" if self.name else what
        return f"{named} in namespace {self.namespace!r}" if self.namespace else f"{named} in all namespaces"


class Caller:
    """Sends requests, a number of them at once. asyncio thread only."""

    def __init__(
        self,
        configuration: Configuration,
        settings: ClientSettings,
        may_write: Callable[[], bool],
        on_answer: Callable[[str, str, int], None],
    ) -> None:
        """``may_write`` and ``on_answer``: as the client's."""
        self._settings = settings
        self._connection = Connection(configuration, num_connections=settings.num_threads)
        self._threads = ThreadPoolExecutor(settings.num_threads, thread_name_prefix="kube")
        self._may_write = may_write
        self._on_answer = on_answer

    async def close(self) -> None:
        """Waits for what is under way, then lets the connections go; requests that wait for a thread are given up."""
        await asyncio.get_running_loop().run_in_executor(None, lambda: self._threads.shutdown(cancel_futures=True))
        self._connection.close()

    async def call(
        self, request: Request, *, pauses_s: tuple[float, ...] | None = None, is_guarded: bool = True
    ) -> dict[str, Any]:
        """Sends a request until it is answered; pauses are spent without a thread.

        ``pauses_s``: before further attempts, None: the settings'. ``is_guarded``: `may_write` is asked before a write.

        Raises:
            NaruError: one of those in `errors`.
        """
        pauses_s = self._settings.retry_pauses_s if pauses_s is None else pauses_s
        loop = asyncio.get_running_loop()
        for pause_s in (*pauses_s, None):
            retry_after_s = 0.0
            try:
                answer = await loop.run_in_executor(self._threads, self._send, request, is_guarded)
                retry_after_s = answer.retry_after_s
                return _payload(answer, request)
            except ApiAway as exc:
                if pause_s is None:
                    raise
                logger.debug("%s; trying again", exc.message)
            await asyncio.sleep(pause_before_retry_s(pause_s, retry_after_s, random.random()))
        raise AssertionError("unreachable")

    def _send(self, request: Request, is_guarded: bool) -> Answer:
        """In a thread."""
        if is_guarded and request.verb not in _READS and not self._may_write():
            raise NotLeader(f"did not {request.verb} {request.target}: another replica acts")
        status = 0
        try:
            answer = self._connection.send(
                _METHODS[request.verb],
                request.url_path,
                query=request.query,
                body=request.body,
                content_type=request.content_type,
                timeouts_s=(self._settings.connect_timeout_s, self._settings.read_timeout_s),
            )
            status = answer.status
        finally:
            self._on_answer(request.verb, request.kind.name, status)
        _drop_managed_fields(answer.payload)
        return answer


def pause_before_retry_s(pause_s: float, retry_after_s: float, share: float) -> float:
    """The pause, between half and one and a half of it by ``share`` in [0, 1], but no less than the server asks for."""
    return max(retry_after_s, pause_s * (0.5 + share))


def _payload(answer: Answer, request: Request) -> dict[str, Any]:
    if not 200 <= answer.status < 300:
        raise error_of(answer.status, answer.payload or {}, request.verb, request.target)
    if answer.payload is None:
        raise ApiAway(f"cannot {request.verb} {request.target}: the answer is no JSON object; is it the API server?")
    return answer.payload


def _drop_managed_fields(payload: dict[str, Any] | None) -> None:
    """Nobody here reads them, and they are half of every object."""
    items = payload.get("items") if payload else None
    for item in items if isinstance(items, list) else [payload]:
        metadata = item.get("metadata") if isinstance(item, dict) else None
        if isinstance(metadata, dict):
            metadata.pop("managedFields", None)
