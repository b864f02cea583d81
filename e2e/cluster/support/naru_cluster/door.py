"""The way into a cluster's network: loopback ports on this machine whose connections go on from inside.

A socket belongs to the network it was made in, wherever it is used. So a client makes a listening socket in its own
network and hands it, with a target address, to the process here, which runs inside: it takes the connections and opens
the other half there. Nothing of the machine's network changes, and several clusters may use the same addresses.

`open_port` is called by tests; `python -m naru_cluster.door SOCKET` is started by `naru_cluster.cluster`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import sys
from pathlib import Path

from naru_cluster.errors import ClusterError

CONNECT_TIMEOUT_S = 10.0
_BUFFER_BYTES = 1 << 16
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


def open_port(door: Path, host: str, port: int) -> str:
    """Opens a loopback port here that leads to an address inside while the cluster runs; returns "127.0.0.1:PORT".

    Raises:
        ClusterError: there is no door, or it did not answer.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(512)
        own = int(listener.getsockname()[1])
        try:
            with socket.socket(socket.AF_UNIX) as control:
                control.settimeout(CONNECT_TIMEOUT_S)
                control.connect(str(door))
                socket.send_fds(control, [json.dumps([host, port]).encode()], [listener.fileno()])
                answer = control.recv(16)
        except OSError as exc:
            raise ClusterError(f"the door {str(door)!r} does not answer: {exc}") from exc
    if answer != b"ok":
        raise ClusterError(f"the door {str(door)!r} refused {host}:{port}")
    return f"127.0.0.1:{own}"


class Door:
    """Takes listening sockets and relays their connections."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serves for ever."""
        asyncio.get_running_loop().add_reader(self._control.fileno(), self._accept)
        await asyncio.Event().wait()

    def _accept(self) -> None:
        connection, _ = self._control.accept()
        with connection:
            connection.settimeout(CONNECT_TIMEOUT_S)  # the other end is our own code and sends at once
            with contextlib.suppress(OSError, ValueError):
                text, descriptors, _, _ = socket.recv_fds(connection, 4096, 1)
                host, port = json.loads(text)
                listener = socket.socket(fileno=descriptors[0])
                listener.setblocking(False)
                task = asyncio.get_running_loop().create_task(self._serve(listener, str(host), int(port)))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                connection.sendall(b"ok")

    async def _serve(self, listener: socket.socket, host: str, port: int) -> None:
        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await _relay(reader, writer, host, port)

        self._servers.append(await asyncio.start_server(relay, sock=listener))


async def _relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int) -> None:
    try:
        far_reader, far_writer = await asyncio.wait_for(asyncio.open_connection(host, port), CONNECT_TIMEOUT_S)
    except (OSError, TimeoutError):
        _reset(writer)
        return
    try:
        async with asyncio.TaskGroup() as group:  # the failure of one direction ends the other
            group.create_task(_pump(reader, far_writer))
            group.create_task(_pump(far_reader, writer))
    except* OSError:
        _reset(writer)
        _reset(far_writer)
    for end in (writer, far_writer):
        with contextlib.suppress(OSError):
            end.close()
            await end.wait_closed()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_BUFFER_BYTES):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Ends a connection as a machine does where nobody listens: by a reset, not by an orderly end."""
    own: socket.socket = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    writer.transport.abort()


def main(path: str) -> None:
    """Serves at a unix socket."""
    with socket.socket(socket.AF_UNIX) as control:
        control.bind(path)
        control.listen(64)
        asyncio.run(Door(control).run())


if __name__ == "__main__":
    main(sys.argv[1])
