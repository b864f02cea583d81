"""In which order requests of equal priority are served, so that tenants share by weight: start-time fair queueing.

Asked by the board for each request that comes, and told when a request gets its first output and when it ends. Each
request of a tenant starts, in virtual time, where the one before it ends; a tenant that was idle starts at the virtual
time of now. Served by start, backlogged tenants get work by their weights, a burst delays another tenant's request by
about one service, and a tenant's own requests keep their order. Work is counted in tokens, an answer's by what answers
of its tenant took lately; what an estimate missed is charged with the tenant's next request.

One queue for each model and priority: only there are requests compared. It knows no clock and no engine.

Source: P. Goyal, H. M. Vin, H. Cheng, "Start-time Fair Queueing: A Scheduling Algorithm for Integrated Services Packet
Switching Networks", SIGCOMM 1996; virtual time never passes a request that still waits, as requests start out of order.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

FIRST_OUTPUT_TOKENS = 256.0
"""Expected of a tenant's answers before any has ended."""
_OUTPUT_GAIN = 0.1
"""How much one answer moves what is expected of the next."""
_UNITS = 1024
"""Of virtual time for one token at weight 1; whole numbers, so that sums of any length stay exact."""
_COUNT_BITS = 64
"""A turn's number is its virtual start, then the count of requests, which decides between equal starts."""
_MAX_IDLE_TENANTS = 1024
"""Tenants of a queue that have no request and are still remembered."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a request asks for. `max_output_tokens` None: as much as fits."""

    prompt_tokens: int
    max_output_tokens: int | None = None
    num_choices: int = 1


@dataclass(slots=True, eq=False)
class Turn:
    """One request's place."""

    number: int
    """Sorts requests of one model and priority: lower is sooner. No two are equal."""
    key: tuple[str, int]
    tenant: str
    start: int
    finish: int
    tokens: float
    """As counted for it before it was known."""
    paid_tokens: float
    """Of its tenant's debt, what was charged with it."""
    is_begun: bool = False
    is_over: bool = False


@dataclass(slots=True)
class _Tenant:
    finish: int = 0
    """Where its next request starts, unless virtual time is further."""
    begun_finish: int = 0
    """The same by the requests that were served alone."""
    debt_tokens: float = 0.0
    """What its ended requests took above what was charged; below 0: less."""
    output_tokens: float = FIRST_OUTPUT_TOKENS
    waiting: dict[int, Turn] = field(default_factory=dict)
    """Turns that have not begun, by number."""
    num_live: int = 0


def part_numbers(turn: Turn, sizes: Sequence[int]) -> tuple[int, ...]:
    """A number for each part of a request, of so many tokens: spread over its turn, so that a large request does not
    stand before all that another tenant asks for meanwhile.
    """
    total = max(1, sum(sizes))
    span, start, offset = turn.finish - turn.start, 0, -1
    numbers = []
    for size in sizes:
        offset = max(offset + 1, span * start // total)
        numbers.append(turn.number + (offset << _COUNT_BITS))
        start += size
    return tuple(numbers)


class FairOrder:
    """All queues of one worker. Mutable; one thread."""

    def __init__(self) -> None:
        self._queues: dict[tuple[str, int], _Queue] = {}
        self._counts = itertools.count()

    def __len__(self) -> int:
        """Queues with a request alive."""
        return len(self._queues)

    def num_tenants(self, model: str, priority: int) -> int:
        """Tenants remembered for one queue."""
        queue = self._queues.get((model, priority))
        return 0 if queue is None else len(queue.tenants)

    def enter(self, model: str, priority: int, tenant: str, weight: float, work: Work) -> Turn:
        """The turn of a request that has come; to be ended. `weight` is above 0 and finite."""
        queue = self._queues.setdefault((model, priority), _Queue((model, priority)))
        return queue.enter(next(self._counts), tenant, weight, work)

    def begin(self, turn: Turn) -> None:
        """The request is being served; again: nothing."""
        queue = self._queues.get(turn.key)
        if queue is not None and not turn.is_begun and not turn.is_over:
            queue.begin(turn)

    def end(self, turn: Turn, computed_tokens: int | None = None, output_tokens: int | None = None) -> None:
        """The request is over; again: nothing.

        Args:
            turn: what `enter` gave. One that never began is taken back, as far as no later one stands on it.
            computed_tokens: of prompt and output together, what was computed for it; None: not known.
            output_tokens: of one choice on average; None: not known.
        """
        queue = self._queues.get(turn.key)
        if queue is None or turn.is_over:
            return
        queue.end(turn, computed_tokens, output_tokens)
        if not queue.num_live:
            # The end of a busy time: nobody owes anybody anything.
            del self._queues[turn.key]


class _Queue:
    """Tenants that compete for one model at one priority."""

    def __init__(self, key: tuple[str, int]) -> None:
        self.tenants: dict[str, _Tenant] = {}
        self.num_live = 0
        self._key = key
        self._now = 0
        """Virtual time."""
        self._latest = 0
        """Latest start of all that have begun."""
        self._waiting: list[tuple[int, Turn]] = []
        """Heap by number; those that have begun or ended meanwhile are dropped when they come to its top."""

    def enter(self, count: int, name: str, weight: float, work: Work) -> Turn:
        tenant = self.tenants.setdefault(name, _Tenant())
        if self._now >= tenant.finish:
            tenant.debt_tokens = max(0.0, tenant.debt_tokens)  # no credit is saved up while it is idle
        start = max(self._now, tenant.finish)
        output = tenant.output_tokens
        if work.max_output_tokens is not None:
            output = min(float(work.max_output_tokens), output)
        tokens = max(1.0, work.prompt_tokens + output * work.num_choices)
        charged = max(1.0, tokens + tenant.debt_tokens)
        tenant.debt_tokens += tokens - charged
        finish = start + max(1, round(charged * _UNITS / weight))
        turn = Turn(start << _COUNT_BITS | count, self._key, name, start, finish, tokens, max(0.0, charged - tokens))
        tenant.finish = finish
        tenant.waiting[turn.number] = turn
        tenant.num_live += 1
        self.num_live += 1
        heapq.heappush(self._waiting, (turn.number, turn))
        return turn

    def begin(self, turn: Turn) -> None:
        turn.is_begun = True
        tenant = self.tenants[turn.tenant]
        del tenant.waiting[turn.number]
        tenant.begun_finish = max(tenant.begun_finish, turn.finish)
        self._latest = max(self._latest, turn.start)
        self._advance()

    def end(self, turn: Turn, computed_tokens: int | None, output_tokens: int | None) -> None:
        turn.is_over = True
        tenant = self.tenants[turn.tenant]
        tenant.num_live -= 1
        self.num_live -= 1
        if turn.is_begun:
            if computed_tokens is not None:
                tenant.debt_tokens += computed_tokens - turn.tokens
            if output_tokens is not None:
                tenant.output_tokens += _OUTPUT_GAIN * (output_tokens - tenant.output_tokens)
        else:
            del tenant.waiting[turn.number]
            newest = next(reversed(tenant.waiting.values()), None)
            tenant.finish = tenant.begun_finish if newest is None else newest.finish
            # Who takes requests back is not rid of a debt; what of a credit they would have used is lost.
            tenant.debt_tokens += turn.paid_tokens
        self._advance()
        if len(self.tenants) > self.num_live + _MAX_IDLE_TENANTS:
            self._forget_idle()

    def _advance(self) -> None:
        """Virtual time follows what is served, up to the first that still waits."""
        waiting = self._waiting
        while waiting and (waiting[0][1].is_begun or waiting[0][1].is_over):
            heapq.heappop(waiting)
        reached = min(self._latest, waiting[0][1].start) if waiting else self._latest
        self._now = max(self._now, reached)

    def _forget_idle(self) -> None:
        """Drops the idle half that is nearest to being forgotten anyway: those that have the least to make up for."""
        idle = sorted((it.finish, name) for name, it in self.tenants.items() if not it.num_live)
        for _, name in idle[: len(idle) // 2 + 1]:
            del self.tenants[name]
