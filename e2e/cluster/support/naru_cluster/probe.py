"""Asks a component whether it is well, as a liveness probe does. Called from a thread that is inside the cluster."""

from __future__ import annotations

import http.client
import ssl
from urllib.parse import urlsplit

_TIMEOUT_S = 2.0


def answers_ok(url: str, client: tuple[str, str] | None = None) -> bool:
    """Whether a GET is answered with status 200; `client` is a certificate and its key."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        # Components sign their own certificates, and nobody else is in that network.
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        if client is not None:
            context.load_cert_chain(*client)
        connection = http.client.HTTPSConnection(parts.hostname, parts.port, timeout=_TIMEOUT_S, context=context)
    else:
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", parts.path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
