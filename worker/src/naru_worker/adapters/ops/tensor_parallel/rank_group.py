"""Rank 0's side of a group: starts the other ranks, tells them what to do, and notices when one is lost.

One thread watches all ranks. Whatever is wrong becomes one `RankLost`, after which the group is over: those who wait
are told, and the processes are ended.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from naru_worker.adapters.ops.tensor_parallel.collectives import TorchCollectives
from naru_worker.adapters.ops.tensor_parallel.errors import RankLost
from naru_worker.adapters.ops.tensor_parallel.follower import EXIT_PEER_LOST
from naru_worker.adapters.ops.tensor_parallel.follower_process import FollowerProcess
from naru_worker.adapters.ops.tensor_parallel.joining import Transport, join, leave, open_store
from naru_worker.adapters.ops.tensor_parallel.wire import Frame, receive

GRACE_S = 2.0
"""So long the cause of a failure is looked for."""
END_S = 5.0
"""Ranks that were told to end get so long."""

_log = logging.getLogger(__name__)


class RankGroup:
    """Processes of one machine. Orders come from any thread, steps from one."""

    def __init__(
        self, size: int, transport: Transport, *, timeout_s: float = 60.0, start_timeout_s: float = 300.0
    ) -> None:
        """Starts ``size - 1`` processes and joins them; this process is rank 0.

        `timeout_s`: how long a step may take; `start_timeout_s`: how long the start of a process.

        Raises:
            RankLost: one does not start.
            RuntimeError: this process is in a group already.
            ValueError: less than two ranks.
        """
        if size < 2:
            raise ValueError(f"size is {size!r}; a group has at least two ranks")
        self.size = size
        self.collectives = TorchCollectives(0, size)
        self._transport = transport
        self.timeout_s = timeout_s
        """How long a step may take from now on."""
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._next_order = 1
        self._lost: RankLost | None = None
        self._suspicion: tuple[float, tuple[int, str]] | None = None
        """A failure that may be another's fault, and when that is settled."""
        self._is_closing = False
        self._followers: list[FollowerProcess] = []
        self._wakeup = socket.socketpair()
        try:
            for rank in range(1, size):
                self._followers.append(FollowerProcess(rank, size, transport, timeout_s, start_timeout_s))
        except BaseException:
            self._end_processes(0.0)
            raise
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()
        try:
            self.wait(0)
            store = open_store(size)
            # Lateness is found out here, with who is to blame; the transport's own limit never comes first.
            limit_s = max(start_timeout_s, 2 * timeout_s)
            self.order({"do": "join", "port": store.port, "timeout_s": limit_s}, is_answered=False)
            join(store, 0, size, transport, limit_s)
        except BaseException:
            self.close()
            raise

    def order(
        self, header: Mapping[str, Any], tail: bytes = b"", *, timeout_s: float | None = None, is_answered: bool = True
    ) -> int:
        """Tells all ranks to do something; its number, for `wait`. They must answer in time, by default a step's.

        Raises:
            RankLost: some rank is lost.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        with self._sending:
            with self._changed:
                self._raise_if_lost()
                number, self._next_order = self._next_order, self._next_order + 1
                if is_answered:
                    for follower in self._followers:
                        follower.waiting[number] = time.monotonic() + limit_s
            for follower in self._followers:
                try:
                    follower.send(Frame({**header, "order": number}, tail))
                except OSError as exc:
                    self._suspect(follower.rank, f"it takes no orders: {exc}")
                    raise self.loss() from exc
        return number

    def wait(self, number: int) -> dict[int, str]:
        """Until all ranks have answered an order; the messages of those that could not do it, by rank.

        Raises:
            RankLost: some rank is lost.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._lost or all(f.has_answered(number) for f in self._followers))
            self._raise_if_lost()
            return {f.rank: f.errors.pop(number) for f in self._followers if number in f.errors}

    @property
    def pids(self) -> list[int]:
        """Of the processes, from rank 1 on."""
        return [follower.pid for follower in self._followers]

    @property
    def is_lost(self) -> bool:
        """Whether it is over, or closed."""
        return self._lost is not None

    def has_ended(self, number: int) -> bool:
        """Whether all ranks have done an order, or do so very soon."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost or all(f.has_answered(number) for f in self._followers), GRACE_S)
            return self._lost is None and all(f.has_answered(number) for f in self._followers)

    def loss(self, own_failure: str = "") -> RankLost:
        """Waits until it is known who is lost, after an exchange that failed here; `own_failure`: what if nobody is."""
        if own_failure:
            self._suspect(0, own_failure)
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None)
            assert self._lost is not None
            return self._lost

    def close(self) -> None:
        """Ends all processes. Nothing happens the second time."""
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
            is_lost = self._lost is not None
        self._wakeup[1].send(b"x")
        self._watcher.join()
        for follower in self._followers:
            try:
                follower.send(Frame({"do": "end"}))
            except OSError:
                continue
        leave(self._transport, is_lost=is_lost)
        self._end_processes(0.0 if is_lost else END_S)
        with self._changed:
            self._lost = self._lost or RankLost(0, self.size, "the group is closed")
            self._changed.notify_all()

    # --- the watching thread -------------------------------------------------------------------------------------
    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wakeup[0], selectors.EVENT_READ)
            for follower in self._followers:
                selector.register(follower.connection, selectors.EVENT_READ, follower)
            while True:
                for key, _ in selector.select(0.2):
                    if key.data is not None and not self._listen(key.data):
                        selector.unregister(key.fileobj)
                self._judge()
                with self._changed:
                    if self._is_closing or self._lost is not None:
                        return

    def _listen(self, follower: FollowerProcess) -> bool:
        """Takes one frame of a rank; False: none will come any more."""
        try:
            frame = receive(follower.connection)
        except ConnectionError:
            frame = None
        except (OSError, ValueError) as exc:
            self._lose(follower.rank, f"it cannot be understood: {exc}")
            return False
        if frame is None:
            self._take_exit(follower)
            return False
        header = frame.header
        if "failed" in header:
            follower.is_out = True
            if header["is_own"]:
                self._lose(follower.rank, header["failed"])
            else:
                self._suspect(follower.rank, header["failed"])
            return True
        with self._changed:
            follower.waiting.pop(header["done"], None)
            if "error" in header:
                follower.errors[header["done"]] = header["error"]
            self._changed.notify_all()
        return True

    def _take_exit(self, follower: FollowerProcess) -> None:
        status, reason = follower.exit_reason(GRACE_S)
        if status == EXIT_PEER_LOST:
            follower.is_out = True
            self._suspect(follower.rank, "it has lost another rank")
        else:
            self._lose(follower.rank, reason)

    def _judge(self) -> None:
        """Settles what has waited long enough."""
        now_s = time.monotonic()
        with self._changed:
            suspicion = self._suspicion
            late = any(follower.is_late(now_s) for follower in self._followers)
            owing = [follower for follower in self._followers if follower.waiting and not follower.is_out]
        if late or (suspicion is not None and now_s >= suspicion[0]):
            loss = self._slowest(owing) or (suspicion[1] if suspicion is not None else None)
            self._lose(*((owing[0].rank, f"no answer within {self.timeout_s:g} s") if loss is None else loss))

    def _slowest(self, owing: Sequence[FollowerProcess]) -> tuple[int, str] | None:
        """Who holds up the others, and how that shows: it does not answer, or has begun fewer exchanges than others."""
        begun = {0: self.collectives.num_begun}
        for follower in owing:
            count = follower.progress(GRACE_S)
            if count is None:
                return follower.rank, f"no sign of life for {self.timeout_s:g} s"
            begun[follower.rank] = count
        rank = min(begun, key=lambda rank: begun[rank])
        if begun[rank] == max(begun.values()):
            return None
        return rank, f"it is stuck after {begun[rank]} exchanges; others have begun {max(begun.values())}"

    # --- what is known about losses ------------------------------------------------------------------------------
    def _suspect(self, rank: int, reason: str) -> None:
        """A rank has failed, maybe because of another: that one will be known soon."""
        with self._changed:
            if self._suspicion is None:
                self._suspicion = (time.monotonic() + GRACE_S, (rank, reason))

    def _lose(self, rank: int, reason: str) -> None:
        """Tells all who wait, and ends the processes: whoever waits for them in an exchange fails then."""
        with self._changed:
            if self._lost is not None or self._is_closing:
                return
            self._lost = RankLost(rank, self.size, reason)
            _log.error("%s", self._lost.message)
            for follower in self._followers:
                follower.kill()
            self._changed.notify_all()
        if self._transport == "nccl":
            leave(self._transport, is_lost=True)

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _end_processes(self, patience_s: float) -> None:
        deadline_s = time.monotonic() + patience_s
        for follower in self._followers:
            follower.end(deadline_s - time.monotonic())
        for end in self._wakeup:
            end.close()
