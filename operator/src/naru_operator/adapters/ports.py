"""Whether a port can be had, found out before anything is started. Called by `naru up`."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Collection

from naru_proto.errors import Unavailable


def require_port(host: str, port: int, flag: str) -> None:
    """Binds and lets go at once; port 0 is always fine.

    Raises:
        Unavailable: in use, forbidden, or no address of this machine; names the flag to change.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, OverflowError, UnicodeError) as exc:
        raise Unavailable(f"--host {host!r} is no address of this machine ({exc}); try --host 127.0.0.1") from exc
    with socket.socket(family, kind, proto) as probe:
        # As servers do: a port whose old connections still time out is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as exc:
            raise Unavailable(_sentence(exc, host, port, flag)) from exc


def free_port(host: str) -> int:
    """A port that was free a moment ago."""
    return free_ports(host, 1)[0]


def free_ports(host: str, count: int, taken: Collection[int] = ()) -> list[int]:
    """As many different ports that were free a moment ago, none of those in `taken`."""
    family, kind, proto, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(found) < count:
            probe = stack.enter_context(socket.socket(family, kind, proto))  # held, or the next one may get it again
            probe.bind(address)
            port = int(probe.getsockname()[1])
            if port not in taken:
                found.append(port)
    return found


def bracketed(host: str) -> str:
    """A host as it stands before ``:port``: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def _sentence(exc: OSError, host: str, port: int, flag: str) -> str:
    if exc.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use by another program; stop it, or choose another port with {flag}"
    if exc.errno == errno.EACCES:
        return f"port {port} needs more rights than this user has; choose one above 1023 with {flag}"
    if exc.errno == errno.EADDRNOTAVAIL:
        return f"{host!r} is no address of this machine; try --host 127.0.0.1"
    return f"port {port} on {host} cannot be had ({exc.strerror}); choose another one with {flag}"
