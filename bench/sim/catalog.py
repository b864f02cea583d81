"""The models of a simulated fleet: sizes, reload costs and residency wishes. Plain values made from a seed.

Called by traces and scenarios. It knows nothing of workers: what a model costs there, `machine` computes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from naru_worker.core.hub.model import Footprint, Residency

MB = 1_000_000
GB = 1_000_000_000

NO_WISHES = Residency()


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """One model, or one revision of it."""

    name: str
    footprint: Footprint
    kv_chunk_bytes: int = 64 * MB
    """KV grows and shrinks by so much."""
    kv_per_request_bytes: int = 0
    """What a running request needs beyond the floor; it stays behind as a cached prefix."""
    kv_max_bytes: int = 0
    """Most it grows to; at or below the floor: it never grows."""
    slowness: float = 1.0
    """Its fetch and its read to host memory take so many times as long as its bytes say: remote or slow storage."""
    residency: Residency = NO_WISHES
    wishes_active: bool = False
    """It is asked for at once, not by its first request."""

    @property
    def spec(self) -> tuple[str, str, int]:
        """What an Ask carries; equal for equal files."""
        return (self.name, self.footprint.weights_key, self.footprint.kv_floor_bytes)


@dataclass(frozen=True, slots=True)
class SizeClass:
    """Models of one kind."""

    weight_bytes: int
    share: float
    """Of all models, relative to the other classes' shares."""
    slowness: float = 1.0


EQUAL = (SizeClass(4 * GB, 1.0),)
MIXED = (
    SizeClass(1 * GB, 0.50),
    SizeClass(4 * GB, 0.25),
    SizeClass(4 * GB, 0.10, slowness=6.0),
    SizeClass(14 * GB, 0.15),
)


def make_catalog(num_models: int, classes: Sequence[SizeClass], rng: random.Random) -> list[ModelProfile]:
    """Models with sizes drawn from the classes; popularity is the workload's matter, not theirs."""
    shares = [size.share for size in classes]
    return [_profile(index, size) for index, size in enumerate(rng.choices(classes, shares, k=num_models))]


def _profile(index: int, size: SizeClass) -> ModelProfile:
    floor_bytes = size.weight_bytes // 16
    footprint = Footprint(
        weights_key=f"weights-{index}",
        weight_bytes=size.weight_bytes,
        kv_floor_bytes=floor_bytes,
        workspace_bytes=256 * MB,
        private_bytes=16 * MB,
    )
    return ModelProfile(
        f"model-{index:05}",
        footprint,
        kv_per_request_bytes=floor_bytes // 4,
        kv_max_bytes=floor_bytes * 3,
        slowness=size.slowness,
    )
