"""A small client of the OpenAI chat API, for `naru chat`: lists models, streams answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from naru_proto.errors import InternalError, InvalidRequest, NaruError, Unavailable

_TIMEOUT = httpx.Timeout(10.0, read=300.0)
"""A long prompt on a busy machine may take minutes to its first token."""
_MAX_LINE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a talk."""

    role: str
    content: str


class ChatClient:
    """Speaks to one router. Close it after use."""

    def __init__(
        self,
        base_url: str,
        transport: httpx.BaseTransport | None = None,
        *,
        http: httpx.Client | None = None,
        api_key: str | None = None,
    ) -> None:
        """``http``: a client that reaches the router by itself, as through an API server; it is closed, too.

        Raises:
            InvalidRequest: the key cannot be one.
        """
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise InvalidRequest("the API key has characters that no header may carry; check --api-key or NARU_API_KEY")
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        # Requests stay on this path: a proxy from the environment is for the outside world.
        self._http = http or httpx.Client(timeout=_TIMEOUT, transport=transport, trust_env=False)
        self._http.timeout = _TIMEOUT
        if api_key:
            # Not `authorization`: on the way through an API server that is the cluster's own.
            self._http.headers["x-api-key"] = api_key

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def models(self) -> list[str]:
        """Names that can be asked for.

        Raises:
            Unavailable: nothing answers there.
            NaruError: as the router said.
        """
        try:
            reply = self._http.get(f"{self._base_url}/v1/models")
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise self._unreachable(exc) from exc
        if reply.status_code != 200:
            raise _refusal(reply.status_code, reply.content)
        try:
            return [str(card["id"]) for card in reply.json()["data"]]
        except (ValueError, KeyError, TypeError) as exc:
            raise InternalError(f"{self._base_url!r} is no OpenAI API ({exc!r}); check --url") from exc

    def stream(self, model: str, messages: list[Message], options: dict[str, float | int]) -> Iterator[str]:
        """Pieces of the answer as they come; closing the iterator cancels the request.

        Raises:
            Unavailable: nothing answers there, or it went away.
            NaruError: as the router said, before or in the middle of the answer.
        """
        turns = [{"role": message.role, "content": message.content} for message in messages]
        body = {"model": model, "messages": turns, "stream": True, **options}
        try:
            with self._http.stream("POST", f"{self._base_url}/v1/chat/completions", json=body) as reply:
                if reply.status_code != 200:
                    raise _refusal(reply.status_code, reply.read())
                yield from _pieces(reply.iter_bytes())
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise self._unreachable(exc) from exc

    def _unreachable(self, exc: Exception) -> Unavailable:
        why = f"{type(exc).__name__}: {exc}"
        return Unavailable(
            f"no answer from {self._base_url!r} ({why}); start `naru up`, or give the address with --url"
        )


def _pieces(chunks: Iterator[bytes]) -> Iterator[str]:
    for data in server_sent_data(chunks):
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
            if isinstance(event, dict) and event.get("error"):
                raise _error(event["error"])
            for choice in event["choices"]:
                if piece := choice["delta"].get("content"):
                    yield str(piece)
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise InternalError(f"the answer's stream holds {data[:80]!r}, which is no chunk; check --url") from exc
    raise Unavailable("the answer broke off; ask again")


def server_sent_data(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The data of server-sent events. Lines end at line feeds alone: text may hold other separators of Unicode.

    Raises:
        InternalError: a line without end.
    """
    pending = b""
    for chunk in chunks:
        *lines, pending = (pending + chunk).split(b"\n")
        if len(pending) > _MAX_LINE_BYTES:
            raise InternalError("the answer's stream holds a line without end; check --url")
        for line in lines:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip()


def _refusal(status: int, body: bytes) -> NaruError:
    try:
        return _error(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return InternalError(f"the router answered HTTP {status}: {body[:200].decode('utf-8', 'replace')!r}")


def _error(error: Any) -> NaruError:
    message = str(error.get("message", error)) if isinstance(error, dict) else str(error)
    return InvalidRequest(message)
