"""One request to the API server, in the calling thread, over the `kubernetes` package. Called by the client alone.

Finds the credentials, sets timeouts, and turns whatever the libraries below raise into ApiAway. Does not retry, and
knows nothing of kinds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import urllib3
from kubernetes import config
from kubernetes.client.api_client import ApiClient
from kubernetes.client.configuration import Configuration
from kubernetes.client.exceptions import ApiException

from naru_operator.adapters.kube.errors import ApiAway

_USER_AGENT = "naru-operator"
_MAX_RETRY_AFTER_S = 30.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back."""

    status: int
    payload: dict[str, Any] | None
    """Parsed; None where the answer was no JSON object."""
    retry_after_s: float
    """How long the server asks to wait; 0: it does not."""


def find_configuration(kubeconfig: str | None = None) -> Configuration:
    """The API server's address and the credentials: a given file, $KUBECONFIG, the pod's account, ~/.kube/config.

    Raises:
        ApiAway: none of them is there, or what is there cannot be read.
    """
    found = Configuration()
    try:
        if kubeconfig or os.environ.get("KUBECONFIG"):
            config.load_kube_config(kubeconfig or None, client_configuration=found)
        elif os.environ.get("KUBERNETES_SERVICE_HOST"):
            config.load_incluster_config(client_configuration=found)
        else:
            config.load_kube_config(client_configuration=found)
    except (config.ConfigException, OSError) as exc:
        # The text of a ConfigException names files and keys, never their values.
        raise ApiAway(
            f"no way to the API server was found ({exc}); run in a pod with a service account, or set KUBECONFIG"
        ) from None
    return found


class Connection:
    """A pool of connections to one API server; used from many threads at once."""

    def __init__(self, configuration: Configuration, *, num_connections: int) -> None:
        """Connects on the first request; ``num_connections`` are kept open at most."""
        configuration.retries = False  # the client retries, where it can wait without holding a thread
        configuration.connection_pool_maxsize = num_connections
        self._configuration = configuration
        self._api = ApiClient(configuration)

    def send(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str | int],
        body: dict[str, Any] | None,
        content_type: str,
        timeouts_s: tuple[float, float],
    ) -> Answer:
        """Sends one request and reads the whole answer. ``timeouts_s``: to connect, and between two pieces read.

        Raises:
            ApiAway: no whole answer came.
        """
        headers = {"Accept": "application/json", "User-Agent": _USER_AGENT}
        if body is not None:
            headers["Content-Type"] = content_type
        url = self._configuration.host + path + ("?" + urlencode(query) if query else "")
        try:
            token = self._configuration.get_api_key_with_prefix("BearerToken")
            if token:
                headers["Authorization"] = token
            answer = self._api.call_api(method, url, headers, body=body, _request_timeout=timeouts_s)
            data = answer.read()
        except (urllib3.exceptions.HTTPError, ApiException, config.ConfigException, OSError) as exc:
            raise ApiAway(f"the API server does not answer ({_cause(exc)})") from None
        return Answer(answer.status, _parsed(data), _retry_after_s(answer.headers.get("Retry-After")))

    def close(self) -> None:
        """Closes idle connections."""
        self._api.close()


def _cause(exc: BaseException) -> str:
    """The kind of the innermost fault: texts of these libraries may hold addresses, never needed here."""
    while (inner := getattr(exc, "reason", None) or exc.__cause__ or exc.__context__) is not None:
        if not isinstance(inner, BaseException):
            break
        exc = inner
    return type(exc).__name__


def _parsed(data: bytes) -> dict[str, Any] | None:
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


def _retry_after_s(text: str | None) -> float:
    try:
        return min(max(float(text or 0), 0.0), _MAX_RETRY_AFTER_S)
    except ValueError:
        return 0.0
