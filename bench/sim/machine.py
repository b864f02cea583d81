"""What operations take and how they go wrong on a simulated worker. Plain values and arithmetic.

Called by `operations`. Bandwidths are those of one operation; operations beside each other do not slow each other down.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from bench.sim.catalog import GB, ModelProfile


@dataclass(frozen=True, slots=True)
class Machine:
    """Speeds of one worker."""

    fetch_bytes_per_s: float = 1.0 * GB
    """Download and packing together."""
    host_bytes_per_s: float = 2.0 * GB
    """From disk into host memory."""
    load_bytes_per_s: float = 20.0 * GB
    """From host memory into the engine's."""
    fixed_s: float = 0.05
    """Of every operation, beside its bytes."""

    def fetch_s(self, profile: ModelProfile) -> float:
        """Files onto the node and packed."""
        return self.fixed_s + profile.slowness * profile.footprint.weight_bytes / self.fetch_bytes_per_s

    def host_s(self, profile: ModelProfile) -> float:
        """Image into host memory."""
        return self.fixed_s + profile.slowness * profile.footprint.weight_bytes / self.host_bytes_per_s

    def load_s(self, profile: ModelProfile, *, is_in_host: bool) -> float:
        """Weights into the engine, through host memory where they are not there yet."""
        read_s = 0.0 if is_in_host else self.host_s(profile)
        return self.fixed_s + read_s + profile.footprint.weight_bytes / self.load_bytes_per_s


@dataclass(frozen=True, slots=True)
class Failures:
    """Chances of things going wrong, each in [0, 1]."""

    fetch: float = 0.0
    host: float = 0.0
    load: float = 0.0
    """It fails somewhere on its way."""
    is_permanent: float = 0.0
    """Of a failure: trying again cannot help."""
    hang: float = 0.0
    """A load that never ends by itself; it fails after `load_timeout_s`."""
    load_timeout_s: float = 60.0
    unreturned: float = 0.0
    """An unload, or a failed load, that gives back fewer bytes than it took."""
    never_returned: float = 0.0
    """Of such bytes: they are lost until the worker restarts."""
    slow_unload: float = 0.0
    slow_unload_s: float = 5.0

    def draw_end(self, chance: float, duration_s: float, rng: random.Random) -> tuple[float, bool]:
        """Seconds until an operation ends, and whether it has failed then."""
        if chance and rng.random() < chance:
            return duration_s * rng.random(), True
        return duration_s, False


DEFAULT_MACHINE = Machine()
NO_FAILURES = Failures()
