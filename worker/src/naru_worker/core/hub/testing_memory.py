"""What is really in a virtual worker's memory, whatever its hub believes: copies, bytes, requests.

Used by `testing`, which compares the two after each event.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from naru_worker.core.hub.actions import Action
from naru_worker.core.hub.config import HubConfig
from naru_worker.core.hub.hub import Hub
from naru_worker.core.hub.model import Footprint
from naru_worker.core.residency import ModelState


class Chance(Protocol):
    """Where the virtual worker's luck comes from; `random.Random` is one."""

    def random(self) -> float:
        """In [0, 1)."""


@dataclass(frozen=True, slots=True)
class Luck:
    """How long things take, in seconds, and how often they go wrong, in [0, 1]."""

    fetch_s: float = 0.2
    load_s: float = 0.05
    unload_s: float = 0.02
    request_s: float = 0.5
    jitter: float = 0.0
    """Delays are between (1 - jitter) and (1 + jitter) times as long."""
    fetch_fails: float = 0.0
    load_fails: float = 0.0
    failure_is_permanent: float = 0.0
    keeps_bytes: float = 0.0
    """An unload or a failed load gives back less than it held, at first."""
    not_kept: float = 0.0
    """Weights that were to stay in host memory are gone when the unload is over."""
    wake_fails: float = 0.0
    """A load from host memory fails, and leaves the weights there."""
    kv_grows: float = 0.0
    """The engine takes a growth of KV with a request's end, and tells of it late."""
    stop_is_late: float = 0.0
    """An operation told to stop ends as if it had not been."""


@dataclass(slots=True)
class Body:
    """A model's copy as it really is."""

    operation: Action | None = None
    stop_told: bool = False
    is_loaded: bool = False
    is_draining: bool = False
    in_host: bool = False
    asleep_bytes: int = 0
    """Left in the engine's memory since its unload."""
    footprint: Footprint | None = None
    """Of what is booked."""
    kv_bytes: int = 0
    held: list[int] = field(default_factory=list)
    running: dict[int, float] = field(default_factory=dict)
    """Request to the time of its end."""
    was_released: bool = False
    """Since it began to serve."""


class VirtualMemory:
    """Copies and their bytes. `hub` is what it is compared with."""

    def __init__(
        self, config: HubConfig, hub: Hub, footprints: Mapping[str, Footprint] | Callable[[str], Footprint]
    ) -> None:
        self.config = config
        self.hub = hub
        self.bodies: dict[str, Body] = {}
        self.states: dict[str, ModelState] = {}
        """As told by changes."""
        self.unreturned_bytes = 0
        self.workspace_bytes = 0
        self.refused_loads: set[str] = set()
        """Loads that were refused their bytes, of which the hub has not heard yet."""
        self.footprint = footprints.__getitem__ if isinstance(footprints, Mapping) else footprints

    @property
    def used_bytes(self) -> int:
        """What is really booked."""
        booked = [body for body in self.bodies.values() if body.footprint is not None]
        pages: dict[str, int] = {}
        total_bytes = self.unreturned_bytes + self._workspace_bytes()
        for body in booked:
            assert body.footprint is not None
            pages[body.footprint.weights_key] = body.footprint.weight_bytes
            total_bytes += body.kv_bytes + body.footprint.private_bytes
        asleep_bytes = sum(body.asleep_bytes for body in self.bodies.values() if body.footprint is None)
        return total_bytes + sum(pages.values()) + asleep_bytes

    @property
    def host_bytes(self) -> int:
        """What host memory holds of models that no loaded one has in common."""
        active = {body.footprint.weights_key for body in self.bodies.values() if body.is_loaded and body.footprint}
        pages: dict[str, int] = {}
        for name, body in self.bodies.items():
            footprint = self.footprint(name) if body.in_host else None
            if footprint is not None and footprint.weights_key not in active:
                pages[footprint.weights_key] = footprint.weight_bytes
        return sum(pages.values())

    def _workspace_bytes(self) -> int:
        booked = (body.footprint.workspace_bytes for body in self.bodies.values() if body.footprint is not None)
        return max(self.workspace_bytes, *booked, 0)

    def need_bytes(self, model: str, footprint: Footprint) -> int:
        """What a load would take now."""
        is_shared = any(
            body.footprint is not None and body.footprint.weights_key == footprint.weights_key
            for name, body in self.bodies.items()
            if name != model
        )
        return (
            (0 if is_shared else footprint.weight_bytes)
            + footprint.kv_floor_bytes
            + footprint.private_bytes
            + max(0, footprint.workspace_bytes - self._workspace_bytes())
            - self.bodies[model].asleep_bytes
        )

    def check(self) -> None:
        """All that always holds.

        Raises:
            AssertionError: it does not.
        """
        budget_bytes = self.config.budget_bytes
        memory = self.hub.memory
        used_bytes = self.used_bytes
        assert used_bytes <= budget_bytes, f"{used_bytes} of {budget_bytes} bytes are booked"
        assert self.host_bytes <= memory.host_bytes <= memory.host_budget_bytes, "host memory is over its budget"
        assert memory.unreturned_bytes == self.unreturned_bytes
        if not self.refused_loads:
            assert memory.used_bytes <= budget_bytes, f"the hub books {memory}"
        for name, body in self.bodies.items():
            entry = self.hub.entry(name)
            assert entry is not None, f"{name!r} is not known any more"
            assert entry.state is self.states.get(name, ModelState.COLD), (
                f"{name!r} is {entry.state}, and nobody was told"
            )
            assert (entry.num_held, entry.num_in_flight) == (len(body.held), len(body.running)), f"{entry} {body}"
            assert entry.is_busy == (body.operation is not None), f"{entry} {body}"
