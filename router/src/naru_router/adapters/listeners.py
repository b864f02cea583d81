"""Sockets bound to a port, for this process alone or shared with others. Used by the app and by `processes`."""

from __future__ import annotations

import socket

from naru_proto.settings import SettingsError


def bind(host: str, port: int, flag: str, *, is_shared: bool = False) -> socket.socket:
    """A bound socket that does not listen yet.

    Args:
        host: an address of this machine.
        port: 0 takes a free one.
        flag: of the command, that sets the port.
        is_shared: other sockets of this user may be bound to it, too; the kernel deals connections out among those that
            listen.

    Raises:
        SettingsError: the address cannot be had.
    """
    # asyncio turns Nagle's algorithm off only where the protocol number says TCP; 0, the default, would cost 40 ms.
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((host, port))
    except OSError as exc:
        bound.close()
        raise SettingsError(_taken(host, port, flag, exc)) from exc
    return bound


def listen(host: str, port: int, flag: str, *, is_shared: bool = False) -> socket.socket:
    """A listening socket; see `bind`.

    Raises:
        SettingsError: the address cannot be had.
    """
    listener = bind(host, port, flag, is_shared=is_shared)
    try:
        listener.listen(2048)
    except OSError as exc:
        listener.close()
        raise SettingsError(_taken(host, port, flag, exc)) from exc
    return listener


def _taken(host: str, port: int, flag: str, exc: OSError) -> str:
    what = "gRPC" if "grpc" in flag else "HTTP"
    return f"{what} cannot listen on {host}:{port}: {exc.strerror}; free the port or set {flag}"
