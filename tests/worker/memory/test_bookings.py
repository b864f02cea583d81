"""What models that wait in host memory leave booked."""

from __future__ import annotations

from naru_worker.adapters.memory.bookings import Bookings
from naru_worker.adapters.memory.ledger import MemoryLedger
from naru_worker.core.hub.model import Footprint

MODEL = Footprint("weights", 70, 5, 0, 25, asleep_bytes=20)


def test_a_sleeping_model_leaves_its_part_until_it_loads_or_leaves_host_memory() -> None:
    books = Bookings(MemoryLedger(100))
    assert books.take("a", MODEL) and books.held_bytes("a") == 100
    books.give_back("a", is_asleep=True)
    assert books.is_asleep("a") and books.asleep_bytes == 20 and books.ledger.free_bytes() == 80
    assert books.take("a", MODEL), "what it has left is part of it"
    assert not books.is_asleep("a") and books.ledger.free_bytes() == 0
    books.give_back("a", is_asleep=True)
    books.leave_host("a")
    books.leave_host("nobody")
    assert (books.asleep_bytes, books.ledger.free_bytes()) == (0, 100)


def test_bytes_that_did_not_come_back_include_what_would_have_been_left() -> None:
    books = Bookings(MemoryLedger(100))
    books.take("a", MODEL)
    books.give_back("a", books.held_bytes("a"))
    assert books.unreturned_bytes == 100 and not books.is_asleep("a")


def test_a_model_that_leaves_nothing_is_not_kept_in_mind() -> None:
    books = Bookings(MemoryLedger(100))
    books.take("a", Footprint("weights", 70, 5, 0, 25))
    books.give_back("a", is_asleep=True)
    assert not books.is_asleep("a") and books.ledger.free_bytes() == 100
