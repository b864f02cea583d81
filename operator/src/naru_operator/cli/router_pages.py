"""A router's pages for people, by HTTP: which routers there are, asking one, and its refusals as errors of ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from naru_operator.cli.status import running_here
from naru_proto.errors import InvalidRequest, ModelNotFound, NaruError, Unauthenticated, Unavailable

TIMEOUT_S = 10.0
_BY_STATUS: Mapping[int, type[NaruError]] = {400: InvalidRequest, 401: Unauthenticated, 404: ModelNotFound}


def router_urls(urls: Sequence[str]) -> list[str]:
    """Base addresses: those given, else those of the instances that run here; says so where there is none."""
    if urls:
        return [url.rstrip("/").removesuffix("/v1") for url in urls]
    return [url for state in running_here() for url in (state.http_url, *state.more_http_urls)]


def router_client(api_key: str | None) -> httpx.Client:
    """A client for them; close it after use."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    # Requests stay on this path: a proxy from the environment is for the outside world.
    return httpx.Client(timeout=TIMEOUT_S, trust_env=False, headers=headers)


def ask(
    client: httpx.Client, method: str, url: str, body: object = None, params: Mapping[str, str] | None = None
) -> httpx.Response:
    """One request.

    Raises:
        Unavailable: nothing answers there.
    """
    try:
        return client.request(method, url, json=body, params=params)
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        raise Unavailable(f"no router answers at {url!r} ({type(exc).__name__}); check --url") from exc


def page_of(reply: httpx.Response, url: str) -> dict[str, Any]:
    """The page that a reply holds.

    Raises:
        NaruError: as the router said.
        Unavailable: what answers is no router.
    """
    try:
        data = reply.json()
    except ValueError as exc:
        raise Unavailable(f"{url!r} is no router of Naru; check --url") from exc
    if reply.status_code == 200 and isinstance(data, dict):
        return data
    error = data.get("error") if isinstance(data, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    raise _BY_STATUS.get(reply.status_code, Unavailable)(str(message or f"{url!r} answers {reply.status_code}"))
