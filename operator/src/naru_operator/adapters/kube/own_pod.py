"""Where this process runs: its namespace, and a name no other replica has. Called by the app."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path

from naru_operator.settings import Settings
from naru_proto.settings import SettingsError

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def own_namespace(settings: Settings) -> str:
    """The operator's own namespace.

    Raises:
        SettingsError: it is not set, and nothing here tells.
    """
    if settings.namespace:
        return settings.namespace
    if named := os.environ.get("POD_NAMESPACE"):
        return named
    try:
        return _NAMESPACE_FILE.read_text(encoding="utf-8").strip()
    except OSError:
        raise SettingsError(
            "namespace is empty, and neither POD_NAMESPACE nor a service account tells it; outside a pod give "
            "--namespace"
        ) from None


def own_identity(settings: Settings) -> str:
    """The name this replica holds the lease under; another one at each call where none is set."""
    return settings.identity or f"{socket.gethostname()}_{secrets.token_hex(4)}"
