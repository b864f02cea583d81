"""kopf's way to the API server: the client's address and credentials, and an ear for its lists. Used by the watch.

kopf lists again whenever a stream has expired, tells nobody, and cannot tell what was deleted before. So the HTTP
sessions it gets say when a list has been answered.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import kopf
from kubernetes.client.configuration import Configuration
from kubernetes.config import ConfigException

from naru_operator.adapters.kube.kinds import WATCHED

logger = logging.getLogger(__name__)

_REFUSED_S = 10.0
"""The same credentials asked for again this soon were refused. kopf then ends, and is begun anew after a pause."""


class Login:
    """Makes the sessions of one run of kopf. Lives in kopf's loop."""

    def __init__(self, configuration: Configuration, on_listed: Callable[[], None]) -> None:
        """``on_listed`` is called when a list has been answered, or its first page."""
        self._configuration = configuration
        self._on_listed = on_listed
        self._sessions: list[aiohttp.ClientSession] = []
        self._last: tuple[kopf.ConnectionInfo, float] | None = None

    async def __call__(self, **_: Any) -> kopf.AiohttpSession | None:
        """A login handler. None makes kopf end; it must never raise, as kopf would wait for ever."""
        try:
            info = _connection_info(self._configuration)
            now_s = time.monotonic()
            if self._last is not None and self._last[0] == info and now_s - self._last[1] < _REFUSED_S:
                logger.warning("the API server refuses the operator's credentials; check its token")
                return None
            self._last = (info, now_s)
            session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context()),
                headers=info.as_http_headers(),
                trace_configs=[self._trace()],
            )
        except (OSError, ValueError, ConfigException) as exc:
            logger.warning("the operator's credentials cannot be used (%s)", type(exc).__name__)
            return None
        self._sessions.append(session)
        return kopf.AiohttpSession(server=info.server, aiohttp_session=session)

    async def close(self) -> None:
        """Closes what kopf left open."""
        for session in self._sessions:
            await session.close()

    def _trace(self) -> aiohttp.TraceConfig:
        async def ended(_session: object, _context: object, end: aiohttp.TraceRequestEndParams) -> None:
            is_list = end.method == "GET" and not {"watch", "continue"} & set(end.url.query)
            if is_list and end.response.status == 200 and end.url.path.rpartition("/")[2] in _PLURALS:
                self._on_listed()

        trace = aiohttp.TraceConfig()
        trace.on_request_end.append(ended)
        return trace


_PLURALS = {kind.plural for kind in WATCHED}


def _connection_info(configuration: Configuration) -> kopf.ConnectionInfo:
    header = configuration.get_api_key_with_prefix("BearerToken")
    scheme, _, token = (header or "").partition(" ")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        scheme=scheme or None,
        token=token or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
    )
