"""What slow clients may hold: who is ended when they hold too much, and who when they take nothing."""

from __future__ import annotations

from naru_router.adapters.http.backlog import Backlog


class Reader:
    """A slow reader of the test's own."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.is_aborted = False

    def unsent_bytes(self) -> int:
        return self.num_bytes

    def abort(self) -> None:
        self.is_aborted = True


def test_the_one_that_holds_most_gives_way() -> None:
    backlog = Backlog(1000, 10.0, lambda: 0.0)
    small, large = Reader(300), Reader(600)
    for reader in (small, large):
        backlog.join(reader)
    small.num_bytes += 50
    backlog.wrote(small, 50)
    assert not small.is_aborted and not large.is_aborted and backlog.num_bytes == 950
    small.num_bytes += 100
    backlog.wrote(small, 100)
    assert large.is_aborted and not small.is_aborted and backlog.num_bytes == 450 and backlog.num_ended == 1
    backlog.leave(small)
    backlog.leave(small)
    assert backlog.num_bytes == 0


def test_time_counts_from_when_the_client_last_took_something() -> None:
    now_s = 0.0
    backlog = Backlog(10**9, 10.0, lambda: now_s)
    reader = Reader(1000)
    backlog.join(reader)
    for _ in range(3):
        now_s += 8.0
        reader.num_bytes -= 1
        backlog.sweep()
    reader.num_bytes += 500
    backlog.wrote(reader, 500)  # what it is sent is nothing that it took
    now_s = 33.0
    backlog.sweep()
    assert not reader.is_aborted
    now_s = 34.5
    backlog.sweep()
    assert reader.is_aborted and backlog.num_bytes == 0
