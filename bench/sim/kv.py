"""KV caches of a simulated worker: they grow as models serve, keep prefixes, and shrink when they are trimmed.

Called by the simulated worker. Growth is told to the hub a little later, as an engine would, so the hub's view lags.
"""

from __future__ import annotations

from collections.abc import Callable

from bench.sim.catalog import ModelProfile
from bench.sim.clock import Event, Simulation
from bench.sim.operations import Operations
from bench.sim.truth import Phase

from naru_worker.core.hub import events
from naru_worker.core.hub.config import HubConfig

REPORT_S = 0.05
"""From a change to the report of it."""


class KVCaches:
    """Mutable: what the hub was last told, beside the truth in `operations.truth`."""

    def __init__(
        self, sim: Simulation, operations: Operations, config: HubConfig, report: Callable[[events.Result], None]
    ) -> None:
        self._sim = sim
        self._operations = operations
        self._soft_bytes = int(config.budget_bytes * config.high_watermark)
        self._report = report
        self._profiles: dict[str, ModelProfile] = {}
        self._told: dict[str, int] = {}
        """KV bytes of models whose change is not reported yet, as they were before it."""
        self._timer: Event | None = None

    def restart(self) -> None:
        """All caches are gone."""
        self._told.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def forget(self, model: str) -> None:
        """A model has left; there is nothing more to report of it."""
        self._told.pop(model, None)
        self._profiles.pop(model, None)

    @property
    def unseen_bytes(self) -> int:
        """Growth the hub does not know of, at least 0."""
        copies = self._operations.truth.copies
        return max(0, sum(copies[model].kv_bytes - told for model, told in self._told.items() if model in copies))

    @property
    def is_told(self) -> bool:
        """The hub knows of every change."""
        return not self._told

    def grow(self, profile: ModelProfile, num_running: int) -> None:
        """A request begins: the cache grows. Beyond the soft limit it does so only where several run at once."""
        truth = self._operations.truth
        copy = truth.copies[profile.name]
        self._profiles[profile.name] = profile
        wanted_bytes = min(self._need_bytes(profile, num_running), max(profile.kv_max_bytes, copy.kv_bytes))
        growth_bytes = wanted_bytes - copy.kv_bytes
        limit_bytes = truth.budget_bytes if num_running > 1 else self._soft_bytes
        if growth_bytes > 0 and truth.used_bytes + growth_bytes <= limit_bytes:
            self._change(profile.name, wanted_bytes)

    def trim(self, model: str, num_bytes: int, num_running: int) -> None:
        """Gives up cached prefixes, never what running requests need."""
        copy = self._operations.truth.copies.get(model)
        if copy is None or copy.phase is not Phase.LOADED or model not in self._profiles:
            return
        kept_bytes = max(copy.footprint.kv_floor_bytes, self._need_bytes(self._profiles[model], num_running))
        trimmed_bytes = min(num_bytes, max(0, copy.kv_bytes - kept_bytes))
        self._change(model, copy.kv_bytes - trimmed_bytes)

    def _need_bytes(self, profile: ModelProfile, num_running: int) -> int:
        extra_bytes = num_running * profile.kv_per_request_bytes
        chunks = -(-extra_bytes // profile.kv_chunk_bytes)
        return profile.footprint.kv_floor_bytes + chunks * profile.kv_chunk_bytes

    def _change(self, model: str, kv_bytes: int) -> None:
        truth = self._operations.truth
        self._told.setdefault(model, truth.copies[model].kv_bytes)
        truth.set_kv(model, kv_bytes)
        if self._timer is None:
            self._timer = self._sim.after(REPORT_S, self._tell)

    def _tell(self) -> None:
        self._timer = None
        copies = self._operations.truth.copies
        changed = {model: copies[model].kv_bytes for model in sorted(self._told) if model in copies}
        self._told.clear()
        if changed:
            self._report(events.KVChanged(changed))
