"""Ports: found out before the start, with the flag to change."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from naru_operator.adapters import ports
from naru_operator.adapters.ports import bracketed, free_port, free_ports, require_port
from naru_proto.errors import Unavailable


def test_a_port_in_use_is_a_sentence_with_the_port_and_the_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Unavailable, match=f"port {port} on 127.0.0.1 is in use .* with --http-port"):
            require_port("127.0.0.1", port, "--http-port")
    require_port("127.0.0.1", port, "--http-port")


def test_a_port_whose_old_connections_time_out_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            served, _ = server.accept()
            served.close()  # the server's side closes first: its port stays in TIME_WAIT
            assert client.recv(1) == b""
    require_port("127.0.0.1", port, "--http-port")


@pytest.mark.parametrize("host", ["203.0.113.7", "", "\udcff", "256.0.0.1.invalid"], ids=ascii)
def test_a_host_that_is_not_ours_is_a_sentence(host: str) -> None:
    with pytest.raises(Unavailable, match="no address of this machine"):
        require_port(host, 0, "--http-port")


@pytest.mark.parametrize(("code", "message"), [(errno.EACCES, "above 1023"), (errno.ENOBUFS, "cannot be had")])
def test_what_the_system_refuses_is_a_sentence(code: int, message: str) -> None:
    assert message in ports._sentence(OSError(code, os.strerror(code)), "127.0.0.1", 80, "--http-port")


def test_free_ports_are_free_and_ipv6_hosts_get_brackets() -> None:
    require_port("127.0.0.1", free_port("127.0.0.1"), "")
    assert bracketed("::1") == "[::1]"
    assert bracketed("127.0.0.1") == "127.0.0.1"


def test_many_free_ports_are_all_different_and_none_of_those_taken() -> None:
    ports_at_once = free_ports("127.0.0.1", 100)
    assert len(set(ports_at_once)) == 100
    again = free_ports("127.0.0.1", 100, taken=ports_at_once)
    assert len(set(again)) == 100 and not set(again) & set(ports_at_once)
    for port in again[:3]:
        require_port("127.0.0.1", port, "")
    assert free_ports("127.0.0.1", 0) == []
