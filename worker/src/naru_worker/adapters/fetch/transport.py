"""The HTTP client of this package: settings, small pages, statuses as sentences. Called by schemes and downloads."""

from __future__ import annotations

import logging
import os
import ssl
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from naru_proto.errors import LoadError

if TYPE_CHECKING:
    import httpx

_MAX_PAGE_BYTES = 64 << 20
"""An index page of a package with thousands of files stays far below."""
_MAX_TRIES = 3


class Broken(Exception):
    """The transfer stopped early, by no fault of the request; another try may work."""


class LoggedIn(Broken):
    """The server asked who this is and was answered; the next try needs no pause."""


class AccessRefused(LoadError):
    """The source does not let these credentials in; the fetcher adds what to do about them."""


class Login(Protocol):
    """How a server wants to be told who asks."""

    def headers(self) -> dict[str, str]:
        """What to send along."""

    def answer(self, response: httpx.Response) -> bool:
        """Answers a 401; whether it is worth asking again."""


def pause(delay_s: float) -> None:
    """Before another try."""
    time.sleep(delay_s)


def open_client(environ: Mapping[str, str] = os.environ, stall_timeout_s: float = 30.0) -> httpx.Client:
    """A client that follows redirects (a token stays behind when the host changes) and trusts the user's CA file."""
    import httpx

    # They log whole URLs, with the passwords and signatures in them.
    for name in ("httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)
    verify: ssl.SSLContext | bool = True
    if (bundle := environ.get("PIP_CERT")) and os.path.isfile(bundle):
        verify = ssl.create_default_context(cafile=bundle)
    timeout = httpx.Timeout(stall_timeout_s, connect=min(10.0, stall_timeout_s))
    return httpx.Client(follow_redirects=True, verify=verify, timeout=timeout, headers={"User-Agent": "naru"})


def get_page(
    client: httpx.Client,
    url: str,
    label: str,
    *,
    headers: dict[str, str] | None = None,
    login: Login | None = None,
    max_bytes: int = _MAX_PAGE_BYTES,
) -> httpx.Response:
    """One small page, read whole; ``label`` names it in messages in place of the URL.

    Raises:
        LoadError: not there, forbidden, or unreachable after a few tries.
    """
    import httpx

    last: Exception | None = None
    for attempt in range(_MAX_TRIES):
        if attempt and not isinstance(last, LoggedIn):
            pause(0.25 * 2**attempt)
        try:
            with client.stream(
                "GET", url, headers={**(headers or {}), **(login.headers() if login else {})}
            ) as response:
                if response.status_code == 401 and login is not None and login.answer(response):
                    raise LoggedIn("the server asks for a fresh login")
                check_status(response, label)
                body = bytearray()
                for chunk in response.iter_bytes():
                    body += chunk
                    if len(body) > max_bytes:
                        raise LoadError(f"{label}: the page is over {max_bytes} bytes; check the address")
                plain = {k: v for k, v in response.headers.items() if k in ("content-type", "link")}
                return httpx.Response(
                    response.status_code, headers=plain, content=bytes(body), request=response.request
                )
        except (httpx.TooManyRedirects, httpx.UnsupportedProtocol, httpx.InvalidURL) as exc:
            raise LoadError(f"{label}: its address cannot be followed ({exc}); check the index or endpoint") from exc
        except (httpx.TransportError, httpx.DecodingError, Broken) as exc:
            last = exc
    raise LoadError(f"{label}: no answer ({type(last).__name__}: {last}); check the network and try again") from last


def check_status(response: httpx.Response, label: str) -> None:
    """Turns an HTTP status into a sentence.

    Raises:
        LoadError: the request can never work as it is.
        Broken: the server is at fault for now.
    """
    code = response.status_code
    if code < 300:
        return
    if code in (401, 403):
        raise AccessRefused(f"{label}: the server refuses access (HTTP {code})")
    if code == 404:
        raise LoadError(f"{label}: not found (HTTP 404); check the name and the revision")
    if code in (408, 425, 429) or code >= 500:
        raise Broken(f"the server answered HTTP {code}")
    raise LoadError(f"{label}: the server answered HTTP {code}; check the URI and the configured index or endpoint")
