"""Who may act, in virtual time: several replicas, their own clocks, a slow network, pauses and lost answers."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from naru_operator.core.leadership import Candidate, LeaseRecord, Move, Timing, decide

TIMING = Timing(lease_s=15, deadline_s=10, renew_s=3)
OTHERS = LeaseRecord(holder="b", duration_s=15, renewed_at="t1", version="7")


@pytest.mark.parametrize(
    ("record", "held_until_s", "now_s", "move"),
    [
        (None, None, 0, Move.ACQUIRE),
        (replace(OTHERS, holder=""), None, 0, Move.ACQUIRE),
        (replace(OTHERS, holder="a"), None, 0, Move.ACQUIRE),
        (OTHERS, None, 14.9, Move.WAIT),
        (OTHERS, None, 15, Move.ACQUIRE),
        (replace(OTHERS, duration_s=60), None, 59, Move.WAIT),
        (replace(OTHERS, duration_s=60), None, 60, Move.ACQUIRE),
        (replace(OTHERS, duration_s=1), None, 14, Move.WAIT),
        (replace(OTHERS, duration_s=1e12), None, 300, Move.ACQUIRE),
        (replace(OTHERS, holder="a"), 10, 9.9, Move.RENEW),
        (replace(OTHERS, holder="a"), 10, 10, Move.STEP_DOWN),
        (OTHERS, 10, 1, Move.STEP_DOWN),
        (replace(OTHERS, holder=""), 10, 1, Move.RENEW),
        (None, 10, 1, Move.RENEW),
    ],
)
def test_each_sight_has_its_move(
    record: LeaseRecord | None, held_until_s: float | None, now_s: float, move: Move
) -> None:
    assert decide(record, 0.0, "a", held_until_s, now_s, TIMING).move is move


def test_only_a_changed_record_starts_the_waiting_anew() -> None:
    candidate = Candidate("a", TIMING)
    candidate.saw(OTHERS, 100.0)
    candidate.saw(OTHERS, 110.0)
    assert candidate.decide(114.9).move is Move.WAIT
    assert candidate.decide(115.0).move is Move.ACQUIRE
    candidate.saw(replace(OTHERS, version="8"), 115.0)
    assert candidate.decide(129.9).move is Move.WAIT


def test_wall_clocks_in_the_record_are_not_believed() -> None:
    candidate = Candidate("a", TIMING)
    candidate.saw(replace(OTHERS, renewed_at="1970-01-01T00:00:00Z"), 100.0)
    assert candidate.decide(101.0).move is Move.WAIT
    candidate.saw(replace(OTHERS, renewed_at="2999-01-01T00:00:00Z"), 101.0)
    assert candidate.decide(116.0).move is Move.ACQUIRE


def test_the_right_to_act_counts_from_before_the_request_and_ends_by_itself() -> None:
    candidate = Candidate("a", TIMING)
    candidate.wrote(replace(OTHERS, holder="a"), sent_s=50.0, now_s=54.0)
    assert candidate.is_leader(59.9)
    assert not candidate.is_leader(60.0)
    assert candidate.decide(60.0).move is Move.STEP_DOWN


@pytest.mark.parametrize("wrong", [(15, 10, 10), (10, 15, 3), (15, 15, 3), (15, 10, 0)])
def test_a_timing_that_could_make_two_leaders_is_refused(wrong: tuple[float, float, float]) -> None:
    with pytest.raises(AssertionError):
        Timing(*wrong)


# --- the whole thing in virtual time ---


@dataclass
class Server:
    """The lease, with a version for each write."""

    record: LeaseRecord | None = None
    version: int = 0

    def put(self, holder: str, expected: str | None, at: str) -> LeaseRecord | None:
        """Writes over the expected version (None: there must be none); None: somebody wrote in between."""
        if (self.record.version if self.record else None) != expected:
            return None
        self.version += 1
        self.record = LeaseRecord(holder, 15.0 if holder else 1.0, at, str(self.version))
        return self.record


@dataclass
class World:
    """True time and what happens in it."""

    now_s: float = 0.0
    queue: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (self.now_s + delay_s, next(self.numbers), action))

    def run(self, until_s: float, watch: Callable[[], None]) -> None:
        while self.queue and self.queue[0][0] <= until_s:
            self.now_s, _, action = heapq.heappop(self.queue)
            watch()
            action()
            watch()


@dataclass
class Replica:
    """Does as the election does, over a network that delays and loses."""

    name: str
    world: World
    server: Server
    rate: float
    """Its clock's seconds in a true one."""
    draw_delay_s: Callable[[], float]
    draw_is_lost: Callable[[], bool]
    draw_pause_s: Callable[[], float]
    candidate: Candidate = field(init=False)
    offset_s: float = 0.0
    is_dead: bool = False
    won: int = 0

    def __post_init__(self) -> None:
        self.candidate = Candidate(self.name, TIMING)

    def clock_s(self) -> float:
        return self.offset_s + self.world.now_s * self.rate

    def is_leader(self) -> bool:
        return not self.is_dead and self.candidate.is_leader(self.clock_s())

    def turn(self) -> None:
        if self.is_dead:
            return
        move = self.candidate.decide(self.clock_s()).move
        if move is Move.STEP_DOWN:
            self.candidate.step_down()
        if move is Move.RENEW:
            self.write()
        else:
            self.ask(lambda: self.server.record, self.looked)
        # A process may stand still for any time, before it looks at its clock again.
        self.world.after(TIMING.renew_s / self.rate + self.draw_pause_s(), self.turn)

    def looked(self, record: LeaseRecord | None) -> None:
        self.candidate.saw(record, self.clock_s())
        if self.candidate.decide(self.clock_s()).move is Move.ACQUIRE:
            self.write()

    def write(self) -> None:
        sent_s = self.clock_s()
        before = self.candidate.record
        expected = before.version if before else None

        def done(record: LeaseRecord | None) -> None:
            if record is None:
                self.ask(lambda: self.server.record, lambda seen: self.candidate.saw(seen, self.clock_s()))
            else:
                self.won += 1
                self.candidate.wrote(record, sent_s, self.clock_s())

        self.ask(lambda: self.server.put(self.name, expected, str(sent_s)), done)

    def ask(self, request: Callable[[], LeaseRecord | None], done: Callable[[LeaseRecord | None], None]) -> None:
        def arrive() -> None:
            answer = request()
            if not self.draw_is_lost():
                self.world.after(self.draw_delay_s(), lambda: None if self.is_dead else done(answer))

        if not self.draw_is_lost():
            self.world.after(self.draw_delay_s(), arrive)


def build(seed: int, num_replicas: int, *, is_calm: bool) -> tuple[World, list[Replica]]:
    random = Random(seed)
    world, server = World(), Server()
    replicas = []
    for number in range(num_replicas):
        # Fastest to slowest stays below lease_s / deadline_s.
        rate = 1.0 if is_calm else random.uniform(0.85, 1.25)
        replica = Replica(
            f"r{number}",
            world,
            server,
            rate,
            draw_delay_s=lambda: random.uniform(0, 0.2) if is_calm else random.choice([0.01, 0.5, 3.0, 12.0]),
            draw_is_lost=lambda: not is_calm and random.random() < 0.15,
            draw_pause_s=lambda: 0.0 if is_calm or random.random() < 0.8 else random.choice([1.0, 8.0, 40.0]),
            offset_s=1000.0 * number,
        )
        replicas.append(replica)
        world.after(random.uniform(0, 3), replica.turn)
    return world, replicas


SEEDS = st.integers(0, 2**32 - 1)


@given(SEEDS, st.integers(2, 4))
@settings(max_examples=300, deadline=None)
def test_two_replicas_never_act_at_once(seed: int, num_replicas: int) -> None:
    world, replicas = build(seed, num_replicas, is_calm=False)

    def watch() -> None:
        leaders = [replica.name for replica in replicas if replica.is_leader()]
        assert len(leaders) <= 1, f"{leaders} at {world.now_s:.2f} s"

    world.run(300.0, watch)


@given(SEEDS, st.floats(20, 60))
@settings(max_examples=60, deadline=None)
def test_a_dead_leader_is_followed_within_its_lease_and_a_look(seed: int, died_s: float) -> None:
    world, replicas = build(seed, 3, is_calm=True)
    world.run(died_s, lambda: None)
    leaders = [replica for replica in replicas if replica.is_leader()]
    assert len(leaders) == 1
    leaders[0].is_dead = True
    world.run(died_s + TIMING.lease_s + 2 * TIMING.renew_s + 1, lambda: None)
    assert sum(replica.is_leader() for replica in replicas) == 1


@given(SEEDS)
@settings(max_examples=30, deadline=None)
def test_a_healthy_leader_is_never_followed(seed: int) -> None:
    world, replicas = build(seed, 3, is_calm=True)
    world.run(30.0, lambda: None)
    first = [replica.name for replica in replicas if replica.is_leader()]

    def watch() -> None:
        assert [replica.name for replica in replicas if replica.is_leader()] == first

    world.run(300.0, watch)
    assert sum(replica.won > 0 for replica in replicas) == 1


def test_in_the_simulation_the_lead_does_change_hands() -> None:
    world, replicas = build(7, 3, is_calm=False)
    leaders: set[str] = set()

    def watch() -> None:
        leaders.update(replica.name for replica in replicas if replica.is_leader())

    world.run(1000.0, watch)
    assert len(leaders) == 3


def test_the_simulation_would_notice_two_leaders() -> None:
    """A clock that runs at a third makes the holder overstay: the bound on clocks is needed, and watched."""
    world, server = World(), Server()
    slow, quick = (
        Replica(name, world, server, rate, lambda: 0.01, lambda: False, lambda: 0.0)
        for name, rate in (("slow", 0.3), ("quick", 1.0))
    )
    world.after(0.0, slow.turn)
    world.after(0.5, quick.turn)
    both = False

    def watch() -> None:
        nonlocal both
        both = both or (slow.is_leader() and quick.is_leader())

    world.run(8.0, watch)
    slow.draw_is_lost = lambda: True  # cut off: it acts until its own deadline
    world.run(60.0, watch)
    assert both
