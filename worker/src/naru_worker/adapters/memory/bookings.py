"""What each loaded model has booked in the ledger: shared weights once, one workspace, private bytes, its KV floor.

Called by the model hub in the asyncio thread; the ledger itself is shared with the engine thread, which books KV.
"""

from __future__ import annotations

from naru_worker.adapters.memory.ledger import MemoryLedger
from naru_worker.core.hub.model import Footprint

_WORKSPACE = "workspace"
_UNRETURNED = "unreturned"


class Bookings:
    """Not thread-safe. A model holds at most one booking."""

    def __init__(self, ledger: MemoryLedger) -> None:
        self.ledger = ledger
        self._held: dict[str, Footprint] = {}
        self._asleep: set[str] = set()
        """Models that wait in host memory, and have left something in the engine's."""
        self._sharers: dict[str, int] = {}

    def take(self, model: str, footprint: Footprint) -> bool:
        """Books all that a load of the model needs, beyond what it has left there; False: no room, nothing changed."""
        assert model not in self._held, "a model is loaded once"
        fixed = {f"private:{model}": footprint.private_bytes - footprint.asleep_bytes}
        if model not in self._asleep:
            fixed[_asleep(model)] = footprint.asleep_bytes
        if not self._sharers.get(footprint.weights_key):
            fixed[f"weights:{footprint.weights_key}"] = footprint.weight_bytes
        fixed[_WORKSPACE] = max(0, footprint.workspace_bytes - self.ledger.fixed_bytes(_WORKSPACE))
        if not self.ledger.book_all(fixed, {model: footprint.kv_floor_bytes}):
            return False
        self._asleep.discard(model)
        self._held[model] = footprint
        self._sharers[footprint.weights_key] = self._sharers.get(footprint.weights_key, 0) + 1
        return True

    def give_back(self, model: str, unreturned_bytes: int = 0, *, is_asleep: bool = False) -> int:
        """Ends a model's booking, but for bytes that were seen not to come back; returns the bytes freed.

        `is_asleep`: it waits in host memory, and what it has left in the engine's stays booked until `leave_host`.
        """
        footprint = self._held.pop(model)
        fixed = [f"private:{model}"]
        if is_asleep and footprint.asleep_bytes:
            self._asleep.add(model)
        else:
            fixed.append(_asleep(model))
        self._sharers[footprint.weights_key] -= 1
        if not self._sharers[footprint.weights_key]:
            del self._sharers[footprint.weights_key]
            fixed.append(f"weights:{footprint.weights_key}")
        return self.ledger.unbook_all(fixed, [model], kept_as=_UNRETURNED, kept_bytes=unreturned_bytes)

    def is_asleep(self, model: str) -> bool:
        """Whether it waits in host memory, and has left something in the engine's."""
        return model in self._asleep

    def leave_host(self, model: str) -> None:
        """It waits in host memory no more; it need not have."""
        if model in self._asleep:
            self._asleep.remove(model)
            self.ledger.unbook(_asleep(model))

    def forgive(self, num_bytes: int) -> None:
        """Bytes that had not come back have."""
        self.ledger.unbook(_UNRETURNED, min(num_bytes, self.unreturned_bytes))

    def held_bytes(self, model: str) -> int:
        """All that is booked for a model alone: no weights while somebody shares them."""
        footprint = self._held.get(model)
        if footprint is None:
            return 0
        own = footprint.weight_bytes if self._sharers[footprint.weights_key] == 1 else 0
        return footprint.private_bytes + self.ledger.kv_bytes(model) + own

    @property
    def asleep_bytes(self) -> int:
        """What models that wait in host memory have left."""
        return sum(self.ledger.fixed_bytes(_asleep(model)) for model in self._asleep)

    @property
    def unreturned_bytes(self) -> int:
        """Bytes that unloads have not given back."""
        return self.ledger.fixed_bytes(_UNRETURNED)

    @property
    def workspace_bytes(self) -> int:
        """Of the one workspace."""
        return self.ledger.fixed_bytes(_WORKSPACE)

    @property
    def weight_bytes(self) -> int:
        """Of all loaded models, equal ones once."""
        return sum(n for owner, n in self.ledger.view().fixed.items() if owner.startswith("weights:"))


def _asleep(model: str) -> str:
    return f"asleep:{model}"
