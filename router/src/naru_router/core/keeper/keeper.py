"""The keeper: adds and removes copies between their least and their most, and repairs what stays broken. Pure.

`observe` is called about once a second in every router, `plan` in the one that holds the keeper's lease; that one
tells `refused` what a worker refused. What a model must have at once is the control plane's; a model that is up nowhere
is its first request's. Nothing is ever taken down that has requests in flight, and never a model's last copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from naru_proto.placement import HeldState
from naru_proto.registry import ModelRecord
from naru_router.core.keeper.ledger import Ledger
from naru_router.core.keeper.model import UP_STATES, Direction, KeeperLimits, KeeperView, Move, Reason
from naru_router.core.keeper.relocations import Relocations
from naru_router.core.keeper.siting import NOT_STARVED, Sites, Starved
from naru_router.core.keeper.watch import Watch

_URGENCY = (Reason.LEAVING, Reason.MISSING, Reason.HOT)


class Keeper:
    """Mutable. Times are of one clock that never goes back."""

    def __init__(self, limits: KeeperLimits | None = None) -> None:
        self.limits = limits or KeeperLimits()
        self.watch = Watch(self.limits)
        self._ledger = Ledger(self.limits)
        self._starved: dict[str, Starved] = {}
        self._relocations = Relocations()
        self._defragment_s = -math.inf

    def observe(self, view: KeeperView, now_s: float) -> None:
        """Takes one instant; moves nothing."""
        for _ in self.observing(view, now_s):
            pass

    def observing(self, view: KeeperView, now_s: float) -> Iterator[None]:
        """The same in pieces of about a millisecond, for a caller with other work to do between them."""
        yield from self.watch.observing(view, now_s)
        self._ledger.settle(view, now_s)

    def plan(self, view: KeeperView, now_s: float) -> tuple[Move, ...]:
        """What is to be moved now; each is noted as begun. The same view must have been observed before."""
        moves = list(self._relocations.finish(view, self._ledger, now_s))
        moves += self._ups(view, now_s, moves)
        moves += self._downs(view, now_s, moves)
        moves = moves[: max(0, self.limits.max_moves - self._ledger.num_open)]
        for move in moves:
            self._ledger.begin(move, now_s)
        return tuple(moves)

    def refused(self, move: Move, now_s: float) -> None:
        """A worker refused a move, or did not answer."""
        self._ledger.refuse(move, now_s)
        self._forget_relocation(move)

    def postponed(self, move: Move, now_s: float) -> None:
        """A move was not asked for: somebody else acts on the model, or this router may not any more."""
        self._ledger.postpone(move, now_s)
        self._forget_relocation(move)

    def _forget_relocation(self, move: Move) -> None:
        if move.reason is Reason.DEFRAGMENT and move.direction is Direction.UP:
            self._relocations.forget(move)

    # --- who needs a copy ---------------------------------------------------------------------------------------------

    def ups(self, view: KeeperView, name: str) -> set[str]:
        """Workers that stay, may hold the model, and have it up or coming."""
        record = view.models[name]
        there = {
            worker_id
            for worker_id, held in view.copies.get(name, {}).items()
            if held.state in UP_STATES and not view.by_worker[worker_id].is_leaving
        }
        there |= {w for w in self._ledger.coming(name) if w in view.by_worker and not view.by_worker[w].is_leaving}
        return {worker_id for worker_id in there - set(self._ledger.going(name)) if view.may_hold(worker_id, record)}

    def needs(self, view: KeeperView, name: str, now_s: float) -> tuple[Reason, str] | None:
        """Why one more copy is needed; None: it is not."""
        record, num_up = view.models[name], len(self.ups(view, name))
        floor = self.watch.floor(name, record, now_s)
        leaving = self._leaving(view, name, record, num_up, floor, now_s)
        if leaving:
            return Reason.LEAVING, leaving
        if num_up < floor and self.watch.is_missing(name, now_s):
            for_s = self.watch.missing_s(name, now_s)
            return Reason.MISSING, f"{num_up} of at least {floor} copies are up, for {for_s:.0f} s"
        demand = self.watch.demands.get(name)
        if demand is None or not num_up or num_up >= self.watch.ceiling(record):
            return None
        if demand.num_wanted(record) > num_up:
            return Reason.HOT, (
                f"{demand.in_flight:.1f} requests in flight and {demand.queue_s:.2f} s of queue on average, "
                f"{num_up} of {demand.num_wanted(record)} copies of {record.target_in_flight} requests and "
                f"{record.target_queue_s:g} s each"
            )
        return None

    def _leaving(self, view: KeeperView, name: str, record: ModelRecord, num_up: int, floor: int, now_s: float) -> str:
        if num_up:
            return ""
        leavers = [
            worker_id
            for worker_id, held in view.copies.get(name, {}).items()
            if held.state in UP_STATES and view.by_worker[worker_id].is_leaving
        ]
        is_busy = any(view.num_in_flight(worker_id, name) for worker_id in leavers)
        if not leavers or not (floor or is_busy or self.watch.is_recent(name, now_s)):
            return ""
        patience_s = 0.0 if record.on_demand or not record.min_replicas else self.limits.leaving_s
        since_s = max(self.watch.leaving_s(worker_id, now_s) for worker_id in leavers)
        return f"its only copies are on {', '.join(sorted(leavers))}, leaving" if since_s >= patience_s else ""

    # --- copies that come up ------------------------------------------------------------------------------------------

    def _ups(self, view: KeeperView, now_s: float, before: list[Move]) -> list[Move]:
        needs = {name: need for name in self.watch.restless if (need := self.needs(view, name, now_s)) is not None}
        self._starved = {name: each for name, each in self._starved.items() if name in needs}
        due = [name for name in needs if self._is_due(view, name, needs[name][0], now_s)]
        if not due:
            return []
        coming = [(name, worker_id) for name in view.models for worker_id in self._ledger.coming(name)]
        coming += [move.place for move in before if move.direction is Direction.UP]
        sites = Sites(view, coming, lambda victim, worker_id: self._may_leave(view, victim, worker_id, now_s))
        num_free = self.limits.max_moves - self._ledger.num_open - len(before)
        moves: list[Move] = []
        due.sort(key=lambda name: (_URGENCY.index(needs[name][0]), self._starved.get(name, NOT_STARVED).next_s, name))
        for name in due[: max(0, min(num_free, self.limits.max_searches))]:
            reason, why = needs[name]
            site = sites.one_more(name, self._ledger.barred(name, now_s))
            if site.worker_id:
                self._starved.pop(name, None)
                for victim in site.victims:
                    self._ledger.rest(victim, now_s)
                moves.append(Move(name, site.worker_id, Direction.UP, reason, f"{why}; {site.why}"))
            else:
                self._starved[name] = self._starved.get(name, NOT_STARVED).again(site.why, now_s, self.limits)
        return moves or self._make_room(view, sites, now_s)

    def _is_due(self, view: KeeperView, name: str, reason: Reason, now_s: float) -> bool:
        """Whether it is time to look for a place: one that fits nowhere is looked for ever more seldom."""
        return now_s >= self._starved.get(name, NOT_STARVED).next_s and self._may_rise(view, name, reason, now_s)

    def _may_rise(self, view: KeeperView, name: str, reason: Reason, now_s: float) -> bool:
        """A hot model gets one copy at a time, and then time to show what that does."""
        if not self._ledger.may_move(name, now_s):
            return False
        if reason is not Reason.HOT:
            return True
        is_coming = any(held.state is HeldState.COMING for held in view.copies.get(name, {}).values())
        is_moving = is_coming or next(self._ledger.coming(name), None) is not None
        return not is_moving and self.watch.settled_s(name, now_s) >= self.limits.cool_down_s

    def _may_leave(self, view: KeeperView, name: str, worker_id: str, now_s: float) -> bool:
        """Whether an idle copy is spare, so that another model may have its place: nobody would bring it back."""
        record, demand = view.models.get(name), self.watch.demands.get(name)
        if record is None or demand is None or view.num_in_flight(worker_id, name):
            return False
        if not self._ledger.may_move(name, now_s):
            return False
        if self.watch.resident_s(name, worker_id, now_s) < self.limits.min_residency_s:
            return False
        kept = demand.num_kept(record, now_s)
        if kept is None:
            return False
        is_unused = not self.watch.is_recent(name, now_s)
        least = max(kept, self.watch.floor(name, record, now_s), 0 if is_unused else 1)
        return len(self.ups(view, name)) > least

    def _make_room(self, view: KeeperView, sites: Sites, now_s: float) -> list[Move]:
        """Idle copies move together where a model fits nowhere; each comes up at its new place before it leaves."""
        if not self._starved or self._relocations or now_s - self._defragment_s < self.limits.defragment_s:
            return []
        self._defragment_s = now_s
        movable = [name for name in view.models if self._is_movable(view, name, now_s)]
        for name in sorted(self._starved, key=lambda each: (self._starved[each].num_looks, each))[:1]:
            room = sites.room_among_idle(name, self._ledger.barred(name, now_s), movable, self.limits.max_moves)
            if not room.moves or room.for_model != name:
                continue
            return self._relocations.begin(room, now_s + self.limits.move_deadline_s)
        return []

    def _is_movable(self, view: KeeperView, name: str, now_s: float) -> bool:
        copies = view.copies.get(name, {})
        is_idle = not any(view.num_in_flight(worker_id, name) for worker_id in copies)
        rests = all(self.watch.resident_s(name, w, now_s) >= self.limits.min_residency_s for w in copies)
        return bool(copies) and is_idle and rests and self._ledger.may_move(name, now_s)

    # --- copies that leave --------------------------------------------------------------------------------------------

    def _downs(self, view: KeeperView, now_s: float, before: list[Move]) -> list[Move]:
        moving = {move.model for move in before}
        moves = []
        for name in sorted(self.watch.restless):
            if name in moving or not self._ledger.may_move(name, now_s):
                continue
            move = self._down(view, name, view.models[name], now_s)
            if move is not None:
                moves.append(move)
        return moves

    def _down(self, view: KeeperView, name: str, record: ModelRecord, now_s: float) -> Move | None:
        """The copy of a model that is to leave next; at most one at a time."""
        copies = view.copies.get(name)
        if not copies or next(self._ledger.going(name), None) is not None:
            return None
        ups = self.ups(view, name)
        ready = {worker_id for worker_id in ups if worker_id in copies and copies[worker_id].state is HeldState.READY}
        floor = self.watch.floor(name, record, now_s)
        for worker_id in sorted(copies):
            why = self._why_off(view, name, worker_id, len(ready), max(1, floor), now_s)
            if why is not None:
                return Move(name, worker_id, Direction.DOWN, *why)
        reason, why_spare = self._why_fewer(record, name, ups, ready, floor, now_s)
        if reason is None:
            return None
        barred = self._ledger.barred(name, now_s)
        idle = [w for w in ready - barred if not view.num_in_flight(w, name)]
        if not idle:
            return None
        worker_id = min(idle, key=lambda w: (copies[w].last_used_s, w))
        return Move(name, worker_id, Direction.DOWN, reason, why_spare)

    def _why_off(
        self, view: KeeperView, name: str, worker_id: str, num_ready: int, least: int, now_s: float
    ) -> tuple[Reason, str] | None:
        """Why one particular copy is to leave."""
        held, slot = view.copies[name][worker_id], view.by_worker[worker_id]
        if held.state is not HeldState.READY or view.num_in_flight(worker_id, name):
            return None
        if worker_id in self._ledger.barred(name, now_s):
            return None
        if self.watch.is_misplaced(name, worker_id, now_s) and num_ready >= least:
            return Reason.MISPLACED, f"pool {slot.pool!r} may not hold it, and {num_ready} other copies are ready"
        is_unwanted = not self.watch.is_recent(name, now_s) and not self.watch.floor(name, view.models[name], now_s)
        if slot.is_leaving and is_unwanted and not slot.holding[name].is_pinned:
            return Reason.LEAVING, "nobody has used it lately, and its worker leaves when nothing is loaded there"
        return None

    def _why_fewer(
        self, record: ModelRecord, name: str, ups: set[str], ready: set[str], floor: int, now_s: float
    ) -> tuple[Reason | None, str]:
        """Why a model has one copy too many, whichever."""
        if len(ready) <= max(1, floor) or len(ups) <= max(1, floor):
            return None, ""
        ceiling = self.watch.ceiling(record)
        if len(ups) > ceiling and self.watch.is_surplus(name, now_s):
            return Reason.SURPLUS, f"{len(ups)} copies are up, at most {ceiling:.0f} may be"
        demand = self.watch.demands.get(name)
        kept = demand.num_kept(record, now_s) if demand is not None else None
        if kept is None or demand is None or len(ups) != len(ready) or len(ready) <= max(kept, floor, 1):
            return None, ""
        if self._relocations.has(name):
            return None, ""
        return Reason.SPARE, (
            f"{demand.in_flight:.1f} requests in flight on average; {max(kept, floor, 1)} of {len(ready)} copies were "
            f"enough for {record.scale_down_delay_s:.0f} s"
        )

    # --- for people ---------------------------------------------------------------------------------------------------

    def explain(self, view: KeeperView, name: str, now_s: float) -> list[str]:
        """How many copies a model has, should have, and what stands in the way: sentences, most important first."""
        record, demand = view.models[name], self.watch.demands.get(name)
        num_up, ceiling = len(self.ups(view, name)), self.watch.ceiling(record)
        most = "as many as there are workers" if math.isinf(ceiling) else f"{ceiling:.0f}"
        lines = [f"{num_up} copies up; at least {self.watch.floor(name, record, now_s)}, at most {most}"]
        need = self.needs(view, name, now_s)
        if need is not None:
            lines.append(f"one more is wanted, {need[0].value}: {need[1]}")
        if name in self._starved:
            lines.append(f"a copy fits nowhere: {self._starved[name].why}")
        if demand is not None:
            carried = "" if math.isinf(demand.carried) else f"; queues grew too long at {demand.carried:.1f} a copy"
            lines.append(
                f"{demand.in_flight:.1f} requests in flight on average over {record.scale_window_s:.0f} s, "
                f"{record.target_in_flight} are a copy's share{carried}"
            )
        if self._ledger.pause_s(name, now_s):
            lines.append(f"the keeper leaves it alone for {self._ledger.pause_s(name, now_s):.0f} s more")
        return lines
