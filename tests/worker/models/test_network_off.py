"""Tests cannot reach other machines, and can reach their own."""

from __future__ import annotations

import socket

import pytest


@pytest.mark.parametrize("address", [("192.0.2.1", 80), ("example.org", 443)])
def test_other_machines_are_out_of_reach(address: tuple[str, int]) -> None:
    with socket.socket() as client, pytest.raises(RuntimeError, match="tests use this machine only"):
        client.connect(address)


def test_this_machine_is_in_reach() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted:
            client.sendall(b"x")
            assert accepted.recv(1) == b"x"
