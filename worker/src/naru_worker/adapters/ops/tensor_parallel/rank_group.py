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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from naru_worker.adapters.ops.tensor_parallel.collectives import make_collectives
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
        """Starts ``size - 1`` processes and joins them; this process is rank 0. They end with the thread that calls.

        `timeout_s`: how long a step may take; `start_timeout_s`: how long the start of a process.

        Raises:
            RankLost: one does not start, or ranks cannot talk.
            ValueError: less than two ranks.
        """
        if size < 2:
            raise ValueError(f"size is {size!r}; a group has at least two ranks")
        self.size = size
        self.collectives = make_collectives(0, size)
        """Exchanges of the first so many ranks, by their number."""
        self._transport = transport
        self.timeout_s = timeout_s
        """How long a step may take from now on."""
        self._patience_s = min(GRACE_S, timeout_s / 6)
        """A late rank has so long for a sign of life."""
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._next_order = 1
        self._lost: RankLost | None = None
        self._on_loss: Callable[[RankLost], object] = lambda loss: None
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
            self._join(start_timeout_s)
        except BaseException:
            self.close()
            raise

    def _join(self, start_timeout_s: float) -> None:
        """In a thread of its own, which is left behind where a rank is lost meanwhile: it would be waited for."""
        store = open_store(self.size)
        # Lateness is found out here, with who is to blame; the transport's own limit never comes first.
        limit_s = max(start_timeout_s, 2 * self.timeout_s)
        number = self.order({"do": "join", "port": store.port, "timeout_s": limit_s}, timeout_s=start_timeout_s)
        joined: Future[None] = Future()

        def work() -> None:
            try:
                join(store, self.collectives, self.size, self._transport, limit_s)
                joined.set_result(None)
            except BaseException as exc:
                # The top of a thread: the error belongs to whoever waits for it.
                joined.set_exception(exc)
            with self._changed:
                self._changed.notify_all()

        threading.Thread(target=work, name="join", daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: self._lost or joined.done())
        if joined.done() and (failure := joined.exception()) is not None:
            raise self.loss(f"{type(failure).__name__}: {failure}") from failure
        self.wait(number)

    def order(
        self,
        header: Mapping[str, Any],
        tail: bytes = b"",
        *,
        size: int | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Tells ranks to do something, the first `size` or all; its number, for `wait`.

        They must answer in time, by default a step's.

        Raises:
            RankLost: some rank is lost.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        followers = self._followers if size is None else self._followers[: size - 1]
        with self._sending:
            with self._changed:
                self._raise_if_lost()
                number, self._next_order = self._next_order, self._next_order + 1
                for follower in followers:
                    follower.waiting[number] = time.monotonic() + limit_s
            for follower in followers:
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

    def tell_loss(self, on_loss: Callable[[RankLost], object]) -> None:
        """Has it called once a rank is lost, in some thread; at once where one is lost already."""
        with self._changed:
            self._on_loss = on_loss
            lost = None if self._is_closing else self._lost
        if lost is not None:
            on_loss(lost)

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

    def kill(self) -> None:
        """Ends all processes at once, before this one ends; whoever waits for them is left behind."""
        with self._changed:
            self._is_closing = True
        for follower in self._followers:
            follower.kill()

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
            told = None if suspicion is None else suspicion[1]
            loss = self._slowest(owing)
            if loss is None or (told is not None and told[0] == loss[0]):
                loss = told  # its own word says more
            self._lose(*((owing[0].rank, f"no answer within {self.timeout_s:g} s") if loss is None else loss))

    def _slowest(self, owing: Sequence[FollowerProcess]) -> tuple[int, str] | None:
        """Who holds up the others, and how that shows: it does not answer, or has begun fewer exchanges than others."""
        behind = {0: 0}
        """Exchanges less than rank 0 has begun, of the groups that a rank is in."""
        for follower in owing:
            count = follower.progress(self._patience_s)
            if count is None:
                return follower.rank, f"no sign of life for {self.timeout_s:g} s"
            of_both = sum(each.num_begun for size, each in self.collectives.items() if follower.rank < size)
            behind[follower.rank] = of_both - count
        rank = max(behind, key=lambda rank: behind[rank])
        num_behind = behind[rank] - min(behind.values())
        return (rank, f"it is stuck, {num_behind} exchanges behind others") if num_behind else None

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
            on_loss = self._on_loss
        on_loss(self._lost)
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
