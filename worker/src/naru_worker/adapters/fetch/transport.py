"""The HTTP client of this package: settings, small pages, statuses as sentences. Called by schemes and downloads."""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from naru_proto.errors import LoadError

if TYPE_CHECKING:
    import httpx

_MAX_PAGE_BYTES = 64 << 20
"""An index page of a package with thousands of files stays far below."""
_MAX_TRIES = 3


class Broken(Exception):
    """The transfer stopped early, by no fault of the request; another try may work."""


def pause(delay_s: float) -> None:
    """Before another try."""
    time.sleep(delay_s)


def open_client(environ: Mapping[str, str] = os.environ) -> httpx.Client:
    """A client that follows redirects (a token stays behind when the host changes) and trusts the user's CA file."""
    import httpx

    verify: ssl.SSLContext | bool = True
    if (bundle := environ.get("PIP_CERT")) and os.path.isfile(bundle):
        verify = ssl.create_default_context(cafile=bundle)
    timeout = httpx.Timeout(30.0, connect=10.0)
    return httpx.Client(follow_redirects=True, verify=verify, timeout=timeout, headers={"User-Agent": "naru"})


def get_page(
    client: httpx.Client,
    url: str,
    label: str,
    *,
    headers: dict[str, str] | None = None,
) -> httpx.Response:
    """One small page, read whole; ``label`` names it in messages in place of the URL.

    Raises:
        LoadError: not there, forbidden, or unreachable after a few tries.
    """
    import httpx

    last: Exception | None = None
    for attempt in range(_MAX_TRIES):
        if attempt:
            pause(0.25 * 2**attempt)
        try:
            with client.stream("GET", url, headers=headers) as response:
                check_status(response, label)
                body = bytearray()
                for chunk in response.iter_bytes():
                    body += chunk
                    if len(body) > _MAX_PAGE_BYTES:
                        raise LoadError(f"{label}: the page is over {_MAX_PAGE_BYTES} bytes; check the address")
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
        raise LoadError(f"{label}: the server refuses access (HTTP {code}); set the token or password it asks for")
    if code == 404:
        raise LoadError(f"{label}: not found (HTTP 404); check the name and the revision")
    if code in (408, 425, 429) or code >= 500:
        raise Broken(f"the server answered HTTP {code}")
    raise LoadError(f"{label}: the server answered HTTP {code}; check the URI and the configured index or endpoint")
