"""What really lies in a simulated worker's memory. Kept apart from the hub's books, so that the two can be compared.

Called by the simulated worker as operations begin and end. Every change is checked against both budgets at once.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from bench.sim.clock import InvariantViolation

from naru_worker.core.hub.model import Footprint


class Phase(enum.Enum):
    """Where a copy stands."""

    LOADING = 0
    LOADED = 1
    UNLOADING = 2


@dataclass(slots=True)
class Copy:
    """One model in the engine's memory, from the first byte of its load on to the last of its unload."""

    footprint: Footprint
    kv_bytes: int
    phase: Phase = Phase.LOADING


class Truth:
    """Mutable. Bytes of the engine's budget and of the host tier's.

    Equal weights count once in each. Host memory counts what it keeps and no loaded model uses. The workspace is as
    large as the largest of any model that was ever loaded, or is loading.
    """

    def __init__(self, budget_bytes: int, host_budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.host_budget_bytes = host_budget_bytes
        self.copies: dict[str, Copy] = {}
        self.in_host: dict[str, Footprint] = {}
        """Models whose image is kept in host memory."""
        self.unreturned_bytes = 0
        self.peak_bytes = 0
        self.used_bytes = 0
        self.host_bytes = 0
        self.workspace_bytes = 0
        self._loaded_workspace_bytes = 0
        self._users: dict[str, int] = {}
        """Copies by identity of their weights."""

    @property
    def free_bytes(self) -> int:
        """Left of the budget."""
        return self.budget_bytes - self.used_bytes

    def need_bytes(self, footprint: Footprint) -> int:
        """What a load of it takes now, with what it shares left out."""
        weight_bytes = 0 if footprint.weights_key in self._users else footprint.weight_bytes
        growth_bytes = max(0, footprint.workspace_bytes - self.workspace_bytes)
        return weight_bytes + footprint.kv_floor_bytes + footprint.private_bytes + growth_bytes

    def begin_load(self, model: str, footprint: Footprint) -> None:
        """All bytes of a load count from its first instant."""
        if model in self.copies:
            raise InvariantViolation(f"{model} is loaded while it is in memory")
        need_bytes = self.need_bytes(footprint)
        self._users[footprint.weights_key] = self._users.get(footprint.weights_key, 0) + 1
        self.workspace_bytes = max(self.workspace_bytes, footprint.workspace_bytes)
        self.copies[model] = Copy(footprint, footprint.kv_floor_bytes)
        self._use(need_bytes, f"the load of {model}")

    def end_load(self, model: str) -> None:
        """It is loaded: host memory is no longer what keeps its weights."""
        copy = self.copies[model]
        copy.phase = Phase.LOADED
        self._loaded_workspace_bytes = max(self._loaded_workspace_bytes, copy.footprint.workspace_bytes)
        self.in_host.pop(model, None)
        self._count_host(f"the load of {model}")

    def fail_load(self, model: str, unreturned_bytes: int = 0) -> None:
        """A load has come to nothing: the model holds nothing any more, but for what stays occupied."""
        self._remove(model, unreturned_bytes)
        self.leave_host(model)

    def begin_unload(self, model: str, *, keep_host: bool) -> None:
        """Its bytes count until the end; those that host memory keeps count there from now on."""
        copy = self.copies[model]
        copy.phase = Phase.UNLOADING
        if keep_host:
            self.in_host[model] = copy.footprint
        self._count_host(f"the unload of {model}")

    def end_unload(self, model: str, unreturned_bytes: int = 0) -> None:
        """A copy is gone; `unreturned_bytes` of it stay occupied."""
        self._remove(model, unreturned_bytes)

    def returnable_bytes(self, model: str) -> int:
        """What the model's end gives back, its share of the workspace left out."""
        copy = self.copies[model]
        is_last = self._users[copy.footprint.weights_key] == 1
        return copy.kv_bytes + copy.footprint.private_bytes + (copy.footprint.weight_bytes if is_last else 0)

    def give_back(self, num_bytes: int) -> None:
        """Bytes that an end had left occupied are free after all."""
        self.unreturned_bytes -= num_bytes
        self._use(-num_bytes, "bytes returned late")

    def set_kv(self, model: str, kv_bytes: int) -> None:
        """A KV cache has grown or shrunk."""
        copy = self.copies[model]
        if kv_bytes < copy.footprint.kv_floor_bytes:
            raise InvariantViolation(f"KV of {model} shrinks to {kv_bytes}, below its floor")
        change_bytes = kv_bytes - copy.kv_bytes
        copy.kv_bytes = kv_bytes
        self._use(change_bytes, f"KV of {model}")

    def enter_host(self, model: str, footprint: Footprint) -> None:
        """A model's weights begin to come into host memory."""
        if model in self.in_host:
            raise InvariantViolation(f"{model} is brought into host memory while it is there")
        self.in_host[model] = footprint
        self._count_host(f"{model} in host memory")

    def leave_host(self, model: str) -> None:
        """A model's weights are dropped from host memory; nothing happens where they are not there."""
        if self.in_host.pop(model, None) is not None:
            self._count_host(f"{model} out of host memory")

    def recount(self) -> None:
        """Counts everything anew and compares.

        Raises:
            InvariantViolation: the running sums are off, or a budget is exceeded.
        """
        weights = {copy.footprint.weights_key: copy.footprint.weight_bytes for copy in self.copies.values()}
        private_bytes = sum(copy.kv_bytes + copy.footprint.private_bytes for copy in self.copies.values())
        used_bytes = sum(weights.values()) + private_bytes + self.workspace_bytes + self.unreturned_bytes
        if used_bytes != self.used_bytes:
            raise InvariantViolation(f"the simulator notes {self.used_bytes} bytes, {used_bytes} are there")
        self._use(0, "recount")

    def _remove(self, model: str, unreturned_bytes: int) -> None:
        freed_bytes = self.returnable_bytes(model)
        copy = self.copies.pop(model)
        key = copy.footprint.weights_key
        self._users[key] -= 1
        if self._users[key] == 0:
            del self._users[key]
        loading = (c.footprint.workspace_bytes for c in self.copies.values() if c.phase is Phase.LOADING)
        workspace_bytes = max((self._loaded_workspace_bytes, *loading))
        freed_bytes += self.workspace_bytes - workspace_bytes
        self.workspace_bytes = workspace_bytes
        self.unreturned_bytes += unreturned_bytes
        self._use(unreturned_bytes - freed_bytes, f"the end of {model}")

    def _use(self, change_bytes: int, what: str) -> None:
        self.used_bytes += change_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        if self.used_bytes > self.budget_bytes:
            raise InvariantViolation(f"{what}: {self.used_bytes} bytes used of a budget of {self.budget_bytes}")

    def _count_host(self, what: str) -> None:
        loaded = self._keys(copy.footprint for copy in self.copies.values() if copy.phase is Phase.LOADED)
        kept = {footprint.weights_key: footprint.weight_bytes for footprint in self.in_host.values()}
        self.host_bytes = sum(num_bytes for key, num_bytes in kept.items() if key not in loaded)
        if self.host_bytes > self.host_budget_bytes:
            raise InvariantViolation(f"{what}: {self.host_bytes} host bytes of a budget of {self.host_budget_bytes}")

    @staticmethod
    def _keys(footprints: Iterable[Footprint]) -> set[str]:
        return {footprint.weights_key for footprint in footprints}
