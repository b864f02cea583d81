"""Counts of the calls that one router has answered over the protocol, model by model."""

from __future__ import annotations

from dataclasses import dataclass

MAX_MODELS = 10_000
"""Models come and go; the one that was called longest ago is forgotten."""


@dataclass(slots=True)
class ModelCounts:
    """Of one model. Mutable."""

    num_served: int = 0
    served_s: float = 0.0
    num_failed: int = 0
    failed_s: float = 0.0
    num_inputs: int = 0
    """Texts, or rows of batches, of the calls that were served."""
    last_unix_s: float = 0.0
    """0: never."""

    def to_json(self, name: str, version: str) -> dict[str, object]:
        """Triton's object, as far as it is known here."""
        return {
            "name": name,
            "version": version,
            "last_inference": int(self.last_unix_s * 1000),
            "inference_count": self.num_inputs,
            "execution_count": self.num_served,
            "inference_stats": {
                "success": {"count": self.num_served, "ns": int(self.served_s * 1e9)},
                "fail": {"count": self.num_failed, "ns": int(self.failed_s * 1e9)},
            },
        }


class CallCounts:
    """Counts by the names of models. Mutable."""

    def __init__(self) -> None:
        self._counts: dict[str, ModelCounts] = {}

    def of(self, model: str) -> ModelCounts:
        """Of one model; all zero where it was never called."""
        return self._counts.get(model, ModelCounts())

    def served(self, model: str, num_inputs: int, seconds: float, unix_s: float) -> None:
        """A call was answered."""
        counts = self._touch(model)
        counts.num_served += 1
        counts.served_s += seconds
        counts.num_inputs += num_inputs
        counts.last_unix_s = unix_s

    def failed(self, model: str, seconds: float) -> None:
        """A call was refused or failed."""
        counts = self._touch(model)
        counts.num_failed += 1
        counts.failed_s += seconds

    def _touch(self, model: str) -> ModelCounts:
        counts = self._counts.pop(model, None) or ModelCounts()
        if len(self._counts) >= MAX_MODELS:
            del self._counts[next(iter(self._counts))]
        self._counts[model] = counts
        return counts
