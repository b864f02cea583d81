"""Numbers of a model on a device of its own: how its steps were launched. Read by the metrics from any thread."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceStats:
    """Of one runner, since it was made."""

    steps: dict[str, int]
    """By the way they were launched: ``replayed``, or why no graph was; the same keys each time."""
    num_graphs: int
    graph_bytes: int
    """Device memory that capturing them has taken."""
    graph_failure: str
    """Why no more are captured; empty: they are."""
