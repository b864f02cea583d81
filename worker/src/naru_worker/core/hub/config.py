"""The hub's limits, one frozen record. Built by the worker's wiring from its settings and the machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HubConfig:
    """Limits of one worker's residency.

    Raises:
        ValueError: a value is out of range; the message names it.
    """

    budget_bytes: int
    """Weights, KV, workspace, private and reserved bytes of all models never exceed it."""
    host_budget_bytes: int = 0
    """Weights of models in host memory that are not active. 0: no host tier."""
    high_watermark: float = 0.80
    """Share of the budget above which idle models leave, least valuable first."""
    low_watermark: float = 0.70
    """Share of the budget down to which they leave."""
    max_loads: int = 2
    """Loads (host or engine) under way at once."""
    max_fetches: int = 4
    """Fetches (download and packing) under way at once."""
    guard_loads: float = 1.0
    """Guard against thrashing: no model is evicted before so many times its own load time has passed since it."""
    popularity_half_life_s: float = 600.0
    """A request counts half as much after this time where victims are chosen."""
    reload_floor_s: float = 0.1
    """Loads that took less count as this long where victims are chosen: such differences are chance, not cost."""
    fair_wait_s: float = 1.0
    """When a load has waited this long and only busy models could make room, the least valuable one past its minimum
    residency is drained: it finishes what it runs, and what comes next for it waits."""
    backoff_first_s: float = 1.0
    """Before the second try of a failed load; doubled with each failure in a row."""
    backoff_max_s: float = 300.0
    backoff_expires_s: float = 900.0
    """A failure this long ago is forgotten."""
    max_known_models: int = 100_000
    """Names remembered; the oldest forgotten ones go first, beyond that further names are refused."""

    def __post_init__(self) -> None:
        """Checks every field."""
        if self.budget_bytes < 0 or self.host_budget_bytes < 0:
            raise ValueError(
                f"budget_bytes is {self.budget_bytes!r} and host_budget_bytes {self.host_budget_bytes!r}; "
                "they must be at least 0"
            )
        if not 0.0 < self.low_watermark <= self.high_watermark <= 1.0:
            raise ValueError(
                f"low_watermark is {self.low_watermark!r} and high_watermark {self.high_watermark!r}; "
                "0 < low <= high <= 1 is needed"
            )
        for name in ("max_loads", "max_fetches", "max_known_models"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be at least 1")
        for name in (
            "guard_loads",
            "reload_floor_s",
            "fair_wait_s",
            "backoff_first_s",
            "backoff_max_s",
            "backoff_expires_s",
        ):
            if not getattr(self, name) >= 0.0:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be at least 0")
