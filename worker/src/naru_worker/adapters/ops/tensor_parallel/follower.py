"""The process of a rank other than 0: does what rank 0 says, in its order, until rank 0 is gone.

Started by `rank_group`. Whatever fails in a step ends the process: the others cannot go on without it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

from naru_proto.errors import NaruError
from naru_worker.adapters import machine
from naru_worker.adapters.ops.protocol import RunnerOptions
from naru_worker.adapters.ops.tensor_parallel.collectives import Collectives, make_collectives
from naru_worker.adapters.ops.tensor_parallel.errors import CollectiveFailed
from naru_worker.adapters.ops.tensor_parallel.heartbeat import answer_pulses
from naru_worker.adapters.ops.tensor_parallel.joining import Transport, find_store, join
from naru_worker.adapters.ops.tensor_parallel.shards import ShardRunner, load_shard
from naru_worker.adapters.ops.tensor_parallel.wire import Frame, receive, send, unpack_batch

EXIT_PEER_LOST = 3
"""Exit status of a rank that stopped because another one did."""
EXIT_FAILED = 4


class Follower:
    """One rank's models. Loading goes on beside the steps of other models; all else is done in order."""

    def __init__(self, connection: socket.socket, collectives: Mapping[int, Collectives]) -> None:
        """`collectives`: by the number of ranks that a model is cut over."""
        self._connection = connection
        self._collectives = collectives
        self._models: dict[int, Future[ShardRunner]] = {}
        self._loading = ThreadPoolExecutor(1)
        self._orders: dict[str, Callable[[dict[str, Any], bytes], dict[str, str]]] = {
            "step": self._step,
            "release": self._release,
            "close": self._close,
        }

    def serve(self) -> int:
        """Until rank 0 is gone, or something fails; returns the exit status."""
        while True:
            frame = receive(self._connection)
            if frame is None or frame.header["do"] == "end":
                return 0
            header = frame.header
            try:
                if header["do"] == "load":
                    self._load(header)
                    continue
                answer = self._orders[header["do"]](header, frame.tail)
            except CollectiveFailed as exc:
                self._say(failed=f"an exchange with other ranks failed: {exc}", is_own=False)
                return EXIT_PEER_LOST
            except Exception as exc:
                traceback.print_exc()
                self._say(failed=f"{type(exc).__name__}: {exc}", is_own=True)
                return EXIT_FAILED
            self._say(done=header["order"], **answer)

    def _load(self, header: dict[str, Any]) -> None:
        options = RunnerOptions(**header["options"])

        def load() -> ShardRunner:
            return load_shard(Path(header["path"]), header["backend"], options, self._collectives[header["size"]])

        def tell(ended: Future[ShardRunner]) -> None:
            exc = ended.exception()
            if exc is None:
                self._say(done=header["order"])
                return
            # A message of ours says it all; of other errors the kind must be told, too.
            self._say(done=header["order"], error=exc.message if isinstance(exc, NaruError) else repr(exc))

        future = self._models[header["model"]] = self._loading.submit(load)
        future.add_done_callback(tell)

    def _step(self, header: dict[str, Any], tail: bytes) -> dict[str, str]:
        runner, batch = self._models[header["model"]].result(), unpack_batch(tail)
        runner.prepare(batch)
        runner.follow(batch)
        return {}

    def _release(self, header: dict[str, Any], _tail: bytes) -> dict[str, str]:
        runner = self._models[header["model"]].result()
        try:
            runner.release_blocks(header["first_block"], header["num_blocks"])
        except NaruError as exc:  # what stays is counted, and others do not wait for it
            return {"error": exc.message}
        return {}

    def _close(self, header: dict[str, Any], _tail: bytes) -> dict[str, str]:
        future = self._models.pop(header["model"])
        if future.exception() is None:
            future.result().close()
        return {}

    def _say(self, **header: Any) -> None:
        # Short frames, sent at once: the loading thread's and the main one's do not mix.
        send(self._connection, Frame(header))


def main(arguments: Sequence[str]) -> int:
    """Joins the group and serves; returns the exit status."""
    orders, pulses, rank, size, boss_pid = map(int, arguments[:5])
    transport = cast(Transport, arguments[5])
    # Ctrl-C reaches all processes of a terminal; rank 0 decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Without rank 0 an exchange on a GPU may never end, and the device would stay taken: two ways to hear of its end,
    # one for a process whose threads all stand still.
    machine.die_with_parent(boss_pid, signal.SIGKILL)
    connection, collectives = socket.socket(fileno=orders), make_collectives(rank, size)
    answer_pulses(
        socket.socket(fileno=pulses),
        lambda: sum(each.num_begun for each in collectives.values()),
        on_end=lambda: os._exit(0),
    )
    send(connection, Frame({"done": 0}))
    frame = receive(connection)
    if frame is None or frame.header["do"] != "join":
        return 0
    timeout_s = frame.header["timeout_s"]
    join(find_store(frame.header["port"], size, timeout_s), collectives, size, transport, timeout_s)
    send(connection, Frame({"done": frame.header["order"]}))
    return Follower(connection, collectives).serve()


if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        status = EXIT_FAILED
    sys.stderr.flush()
    # Threads of the transports may wait for ranks that are gone; nothing here needs an orderly end.
    os._exit(status)
