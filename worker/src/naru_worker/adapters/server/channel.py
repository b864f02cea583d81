"""How the worker's gRPC server treats its connections: sizes, ports, and the pings that find dead routers.

Read by the app when it makes the server.
"""

from __future__ import annotations

PING_INTERVAL_MS, PING_TIMEOUT_MS = 2_000, 6_000
"""Of the server's own pings: together, the time in which a dead router is noticed. A router answers in its event loop,
which may lag by some seconds on a machine that is too busy."""
MIN_PEER_PING_MS = 250
"""Clients that ping more often are cut off."""


def server_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Arguments of the server's channels."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        # Without it a second worker would share the port in silence.
        ("grpc.so_reuseport", 0),
        # A router whose machine died says no goodbye: pings find it, and its requests end.
        ("grpc.keepalive_time_ms", PING_INTERVAL_MS),
        ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Routers may ping as often, on idle links too.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", MIN_PEER_PING_MS),
    ]
