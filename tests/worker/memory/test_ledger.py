"""The ledger of bytes: never overbooked, whoever books at the same time, and nothing lost."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from naru_worker.adapters.memory.ledger import MemoryLedger


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    ledger = MemoryLedger(100)
    assert ledger.book("weights", 60)
    version = ledger.version
    assert not ledger.book("other", 41)
    assert not ledger.book_kv("m", 41)
    assert (ledger.free_bytes(), ledger.version) == (40, version)
    assert ledger.view().fixed == {"weights": 60}
    assert ledger.book_kv("m", 40)
    assert ledger.free_bytes() == 0


def test_several_owners_are_booked_together_or_not_at_all() -> None:
    ledger = MemoryLedger(100)
    assert not ledger.book_all({"a": 50, "b": 30}, {"m": 21})
    assert ledger.view().used_bytes == 0
    assert ledger.book_all({"a": 50, "b": 30}, {"m": 20})
    assert (ledger.fixed_bytes("a"), ledger.fixed_bytes("b"), ledger.kv_bytes("m")) == (50, 30, 20)
    assert ledger.free_bytes() == 0


@pytest.mark.parametrize(("is_urgent", "num_bytes", "is_taken"), [(False, 5, True), (False, 6, False), (True, 6, True)])
def test_kv_grows_beyond_the_soft_limit_only_where_it_must(is_urgent: bool, num_bytes: int, is_taken: bool) -> None:
    ledger = MemoryLedger(100, soft_ratio=0.8)
    assert ledger.book("weights", 75)
    assert ledger.book_kv("m", num_bytes, is_urgent=is_urgent) == is_taken
    assert ledger.kv_bytes("m") == num_bytes * is_taken


def test_the_soft_limit_does_not_hold_for_weights() -> None:
    assert MemoryLedger(100, soft_ratio=0.5).book("weights", 100)


def test_bytes_are_given_back_in_part_or_whole() -> None:
    ledger = MemoryLedger(100)
    assert ledger.book("a", 30)
    assert ledger.book_kv("a", 20)
    assert ledger.unbook("a", 10) == 10
    assert (ledger.fixed_bytes("a"), ledger.kv_bytes("a")) == (20, 20), "owners and models are kept apart"
    assert ledger.unbook("a") == 20
    assert ledger.unbook("a") == 0
    assert ledger.unbook_kv("a") == 20
    assert ledger.free_bytes() == 100
    assert (ledger.view().fixed, ledger.view().kv) == ({}, {})


def test_giving_back_more_than_was_booked_is_noticed() -> None:
    ledger = MemoryLedger(100)
    assert ledger.book_kv("a", 20)
    with pytest.raises(AssertionError, match="more bytes"):
        ledger.unbook_kv("a", 21)
    assert ledger.kv_bytes("a") == 20
    # The lock is free again.
    assert ledger.view().used_bytes == 20


@pytest.mark.parametrize(("budget_bytes", "soft_ratio"), [(-1, 1.0), (1, 1.1), (1, -0.1), (1, float("nan"))])
def test_impossible_limits_are_refused(budget_bytes: int, soft_ratio: float) -> None:
    with pytest.raises(ValueError, match=f"budget_bytes is {budget_bytes}"):
        MemoryLedger(budget_bytes, soft_ratio)


def test_a_view_is_a_copy() -> None:
    ledger = MemoryLedger(100)
    assert ledger.book("a", 30)
    view = ledger.view()
    assert ledger.book("a", 30)
    assert (view.used_bytes, view.free_bytes, view.budget_bytes) == (30, 70, 100)


def test_threads_that_book_at_once_never_overbook_and_lose_nothing() -> None:
    """Eight threads want twice the budget; a ninth looks all the time."""
    budget = 1000
    ledger = MemoryLedger(budget, soft_ratio=0.9)
    go, done = threading.Barrier(9), threading.Event()
    faults: list[str] = []
    held = [0] * 8

    def work(index: int) -> Callable[[], None]:
        def run() -> None:
            name = f"m{index % 4}"
            go.wait()
            for turn in range(1500):
                size = 10 + (index * 7 + turn * 13) % 240
                is_kv = (index + turn) % 2 == 0
                if ledger.book_kv(name, size, is_urgent=turn % 3 == 0) if is_kv else ledger.book(name, size):
                    held[index] += 1
                    back = ledger.unbook_kv(name, size) if is_kv else ledger.unbook(name, size)
                    if back != size:
                        faults.append(f"{back} bytes came back of {size}")

        return run

    def look() -> None:
        go.wait()
        while not done.is_set():
            view = ledger.view()
            if not 0 <= view.used_bytes <= budget:
                faults.append(f"{view.used_bytes} bytes are booked")

    threads = [threading.Thread(target=work(index)) for index in range(8)]
    watcher = threading.Thread(target=look)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # or threads would hardly ever meet inside the ledger
    try:
        for thread in (*threads, watcher):
            thread.start()
        for thread in threads:
            thread.join()
        done.set()
        watcher.join()
    finally:
        sys.setswitchinterval(interval_s)
    assert faults == []
    assert all(held)
    assert (ledger.free_bytes(), ledger.view().used_bytes) == (budget, 0)


class LedgerMachine(RuleBasedStateMachine):
    """Against two dictionaries."""

    @initialize(budget=st.integers(0, 200), soft_ratio=st.sampled_from([0.0, 0.5, 0.8, 1.0]))
    def start(self, budget: int, soft_ratio: float) -> None:
        self.ledger = MemoryLedger(budget, soft_ratio)
        self.budget, self.soft = budget, int(budget * soft_ratio)
        self.books: dict[tuple[bool, str], int] = {}

    @property
    def used(self) -> int:
        return sum(self.books.values())

    def add(self, key: tuple[bool, str], num_bytes: int) -> None:
        self.books[key] = self.books.get(key, 0) + num_bytes

    @rule(name=st.sampled_from("abc"), num_bytes=st.integers(0, 120))
    def book(self, name: str, num_bytes: int) -> None:
        fits = self.used + num_bytes <= self.budget
        assert self.ledger.book(name, num_bytes) == fits
        if fits:
            self.add((False, name), num_bytes)

    @rule(name=st.sampled_from("abc"), num_bytes=st.integers(1, 120), is_urgent=st.booleans())
    def book_kv(self, name: str, num_bytes: int, is_urgent: bool) -> None:
        fits = self.used + num_bytes <= (self.budget if is_urgent else self.soft)
        assert self.ledger.book_kv(name, num_bytes, is_urgent=is_urgent) == fits
        if fits:
            self.add((True, name), num_bytes)

    @rule(
        fixed=st.dictionaries(st.sampled_from("abc"), st.integers(0, 90), max_size=3),
        kv=st.dictionaries(st.sampled_from("abc"), st.integers(0, 90), max_size=2),
    )
    def book_all(self, fixed: dict[str, int], kv: dict[str, int]) -> None:
        fits = self.used + sum(fixed.values()) + sum(kv.values()) <= self.budget
        assert self.ledger.book_all(fixed, kv) == fits
        if fits:
            for is_kv, more in ((False, fixed), (True, kv)):
                for name, num_bytes in more.items():
                    self.add((is_kv, name), num_bytes)

    @rule(is_kv=st.booleans(), name=st.sampled_from("abc"), share=st.sampled_from([0.0, 0.3, 1.0, None]))
    def unbook(self, is_kv: bool, name: str, share: float | None) -> None:
        held = self.books.get((is_kv, name), 0)
        num_bytes = None if share is None else int(held * share)
        give_back = self.ledger.unbook_kv if is_kv else self.ledger.unbook
        expected = held if num_bytes is None else num_bytes
        version = self.ledger.version
        assert give_back(name, num_bytes) == expected
        assert self.ledger.version != version
        self.add((is_kv, name), -expected)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "ledger"):
            return
        view = self.ledger.view()
        assert 0 <= view.used_bytes == self.used <= self.budget == view.budget_bytes
        assert self.ledger.free_bytes() == view.free_bytes == self.budget - self.used
        for is_kv, shown in ((False, view.fixed), (True, view.kv)):
            for name in "abc":
                booked = self.books.get((is_kv, name), 0)
                assert shown.get(name, 0) == booked
                assert (self.ledger.kv_bytes(name) if is_kv else self.ledger.fixed_bytes(name)) == booked


TestLedgerMachine = LedgerMachine.TestCase


def test_what_is_given_back_at_once_is_free_but_for_what_is_kept() -> None:
    ledger = MemoryLedger(100)
    assert ledger.book_all({"weights": 50, "private": 10}, {"m": 30})
    assert ledger.unbook_all(["weights", "private", "nobody"], ["m"], kept_as="lost", kept_bytes=40) == 50
    assert (ledger.view().fixed, ledger.view().kv) == ({"lost": 40}, {})
    assert ledger.free_bytes() == 60


def test_no_more_is_kept_than_was_booked() -> None:
    ledger = MemoryLedger(100)
    assert ledger.book("weights", 50)
    assert ledger.unbook_all(["weights"], [], kept_as="lost", kept_bytes=80) == 0
    assert ledger.view().fixed == {"lost": 50}
