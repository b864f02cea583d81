"""Workers, models and load in virtual time, for tests of the keeper: what is ordered happens, after a load's time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from naru_proto.placement import served, slots_of
from naru_proto.registry import FootprintRecord, ModelRecord, ResidentRecord, WorkerRecord
from naru_router.core.keeper.keeper import Keeper
from naru_router.core.keeper.model import CopyLoad, Direction, KeeperView, Move


def entry(name: str, minimum: int = 1, maximum: int = 0, **more: object) -> ModelRecord:
    """An entry of the registry, with quick scaling."""
    quick: dict[str, object] = {"scale_window_s": 30.0, "scale_down_delay_s": 120.0, "target_in_flight": 16}
    fields: dict[str, object] = {"min_replicas": minimum, "max_replicas": maximum, **quick, **more}
    return ModelRecord(name, f"hf://o/{name}", 1, **fields)  # type: ignore[arg-type]


@dataclass
class Copy:
    """One copy on one worker."""

    ready_s: float
    used_s: float = 0.0
    is_failed: bool = False


@dataclass
class World:
    """Mutable."""

    entries: dict[str, ModelRecord]
    budgets: dict[str, int]
    """Worker to bytes."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Model to bytes of a copy; absent: 100."""
    load_s: float = 5.0
    strength: float = 1e9
    """Requests a copy runs at once; the others queue, half a second each."""
    pools: dict[str, str] = field(default_factory=dict)
    leaving: set[str] = field(default_factory=set)
    unaware: set[tuple[str, str]] = field(default_factory=set)
    """(model, worker) that the worker was never told of."""
    failing: set[tuple[str, str]] = field(default_factory=set)
    offered: dict[str, int] = field(default_factory=dict)
    """Requests in flight of a model, over all its copies."""
    now_s: float = 1000.0
    copies: dict[tuple[str, str], Copy] = field(default_factory=dict)
    moves: list[tuple[float, Move]] = field(default_factory=list)
    refusals: list[tuple[float, Move]] = field(default_factory=list)
    num_evictions: int = 0

    def put(self, model: str, *workers: str) -> None:
        """Copies that are ready."""
        for worker in workers:
            self.copies[model, worker] = Copy(self.now_s)

    def holders(self, model: str) -> list[str]:
        """Workers where it is ready."""
        return sorted(w for (m, w), copy in self.copies.items() if m == model and self._is_ready(copy))

    def up(self, model: str) -> list[str]:
        """Workers where it is ready or coming."""
        return sorted(w for (m, w), copy in self.copies.items() if m == model and not copy.is_failed)

    def in_flight(self, model: str, worker: str) -> int:
        """This copy's part."""
        holders = self.holders(model)
        if worker not in holders:
            return 0
        share, rest = divmod(self.offered.get(model, 0), len(holders))
        return share + (holders.index(worker) < rest)

    def view(self) -> KeeperView:
        """As a router sees it, made of leases and frames."""
        loads = {
            (worker, model): CopyLoad(
                self.in_flight(model, worker), max(0.0, self.in_flight(model, worker) - self.strength) * 0.5
            )
            for model, worker in self.copies
        }
        footprints = {name: FootprintRecord(self._size(name), 0) for name in self.entries}
        return KeeperView(
            served(self.entries),
            slots_of(self._records(), models=self.entries, footprints=footprints),
            loads,
            footprints,
        )

    def run(
        self,
        seconds: int,
        *keepers: Keeper,
        acting: Callable[[float], Keeper | None] | None = None,
        each: Callable[[World], None] = lambda world: None,
        step_s: int = 1,
    ) -> None:
        """All keepers observe; the one that `acting` names plans, else the first."""
        for _ in range(0, seconds, step_s):
            self.now_s += step_s
            self._advance()
            view = self.view()
            for keeper in keepers:
                keeper.observe(view, self.now_s)
            actor = acting(self.now_s) if acting is not None else keepers[0]
            for move in actor.plan(view, self.now_s) if actor is not None else ():
                self._carry_out(move, actor)
            each(self)

    def told(self, direction: Direction, model: str = "") -> list[Move]:
        """Moves that were carried out."""
        return [m for _, m in self.moves if m.direction is direction and model in ("", m.model)]

    def _carry_out(self, move: Move, keeper: Keeper | None) -> None:
        assert keeper is not None
        done = self._bring_up(move) if move.direction is Direction.UP else self._take_down(move)
        (self.moves if done else self.refusals).append((self.now_s, move))
        if not done:
            keeper.refused(move, self.now_s)

    def _bring_up(self, move: Move) -> bool:
        place = move.place
        if place in self.unaware or move.worker_id not in self.budgets:
            return False
        assert place not in self.copies or self.copies[place].is_failed, f"{move} is up or coming already"
        self.copies.pop(place, None)
        size = self._size(move.model)
        while self._used(move.worker_id) + size > self.budgets[move.worker_id]:
            idle = [
                (copy.used_s, p)
                for p, copy in self.copies.items()
                if p[1] == move.worker_id and self._is_ready(copy) and not self.in_flight(*p)
            ]
            if not idle:
                return False
            del self.copies[min(idle)[1]]
            self.num_evictions += 1
        self.copies[place] = Copy(self.now_s + self.load_s)
        return True

    def _take_down(self, move: Move) -> bool:
        assert move.place in self.copies and self._is_ready(self.copies[move.place]), move
        if self.in_flight(*move.place):
            return False
        del self.copies[move.place]
        return True

    def _advance(self) -> None:
        for (model, worker), copy in list(self.copies.items()):
            if copy.ready_s <= self.now_s and (model, worker) in self.failing:
                copy.is_failed = True
            if self.in_flight(model, worker):
                copy.used_s = self.now_s

    def _is_ready(self, copy: Copy) -> bool:
        return copy.ready_s <= self.now_s and not copy.is_failed

    def _size(self, model: str) -> int:
        return self.sizes.get(model, 100)

    def _used(self, worker: str) -> int:
        return sum(self._size(m) for (m, w), copy in self.copies.items() if w == worker and not copy.is_failed)

    def _records(self) -> Mapping[str, WorkerRecord]:
        records = {}
        for worker, budget in self.budgets.items():
            models = {m: self._resident(m, w, copy) for (m, w), copy in self.copies.items() if w == worker}
            records[worker] = WorkerRecord(
                worker,
                f"{worker}:1",
                "e",
                models,
                pool=self.pools.get(worker, "default"),
                budget_bytes=budget,
                used_bytes=self._used(worker),
                leaving=worker in self.leaving,
            )
        return records

    def _resident(self, model: str, worker: str, copy: Copy) -> ResidentRecord:
        state = "failed" if copy.is_failed else "ready" if self._is_ready(copy) else "loading"
        return ResidentRecord(
            state,
            1,
            weight_bytes=self._size(model),
            num_in_flight=self.in_flight(model, worker),
            last_used_s=int(copy.used_s) // 60 * 60,
        )
