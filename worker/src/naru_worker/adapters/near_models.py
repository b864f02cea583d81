"""What this worker has near of models that it does not hold: weights in host memory, files on its disk.

Lives in the asyncio thread and looks at the disk in another. Told by the lease, for whoever chooses where a model comes
up. Decides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable

from naru_proto.registry import FootprintRecord, KnownRecord
from naru_worker.adapters.engine.hub import ModelHub
from naru_worker.core.hub.model import ModelEntry
from naru_worker.core.residency import ModelSpec, ModelState

_log = logging.getLogger(__name__)

RECHECK_S = 60.0
"""Another worker of the node, or the cache's own eviction, changes what lies on the disk."""
PAUSE_S = 0.2
"""Between two looks: changes come in flocks."""
MAX_LOOKS = 64
"""Models looked for on the disk at once."""


class NearModels:
    """asyncio thread only. Changes come by `poke`."""

    def __init__(self, hub: ModelHub) -> None:
        self._hub = hub
        self._on_disk: dict[ModelSpec, tuple[float, int | None]] = {}
        """When it was looked for, and the bytes of its files; None: they are not here."""
        self._poked = asyncio.Event()
        self.records: dict[str, KnownRecord] = {}
        """By model."""
        self.version = 0
        """Grows whenever `records` has changed."""

    def poke(self) -> None:
        """A model has moved: look again soon."""
        self._poked.set()

    async def run(self) -> None:
        """Keeps `records` true until cancelled."""
        while True:
            self._poked.clear()
            try:
                has_more = await self.look()
            except Exception as exc:
                # The top of the loop: what is near is a hint, and serving goes on without it.
                _log.error("looking for models on the disk failed", exc_info=exc)
                has_more = False
            await asyncio.sleep(PAUSE_S)
            if not has_more:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RECHECK_S):
                        await self._poked.wait()

    async def look(self) -> bool:
        """One look; whether there are more models to look for."""
        resting: dict[str, ModelEntry] = {}
        in_host: dict[str, ModelEntry] = {}
        specs: set[ModelSpec] = set()
        for entry in self._hub.core.entries():
            spec = entry.spec
            assert isinstance(spec, ModelSpec), "only models with something to load are known"
            specs.add(spec)
            if entry.state is ModelState.HOST:
                in_host[entry.name] = entry
            elif entry.state in (ModelState.COLD, ModelState.FAILED):
                resting[entry.name] = entry
            else:
                # It fetches what it lacks: what was seen before is out of date when it leaves.
                self._on_disk.pop(spec, None)
        self._on_disk = {spec: seen for spec, seen in self._on_disk.items() if spec in specs}
        has_more = await self._look_at_disk(resting.values())
        found = {name: KnownRecord("host", _weight_bytes(entry)) for name, entry in in_host.items()}
        for name, entry in resting.items():
            assert isinstance(entry.spec, ModelSpec)
            _, num_bytes = self._on_disk.get(entry.spec, (0.0, None))
            if num_bytes is not None:
                found[name] = KnownRecord("disk", _weight_bytes(entry) or num_bytes)
        if found != self.records:
            self.records, self.version = found, self.version + 1
            self._hub.on_change()
        return has_more

    def footprints(self) -> dict[str, FootprintRecord]:
        """What the models in memory take, as measured at their loads."""
        return {
            resident.name: FootprintRecord(
                # Of all accelerators together.
                entry.footprint.weight_bytes * entry.footprint.num_accelerators,
                entry.footprint.kv_floor_bytes * entry.footprint.num_accelerators,
                entry.footprint.private_bytes * entry.footprint.num_accelerators,
                round(entry.load_s, 3),
                round(resident.fetch_s + entry.load_s, 3) if resident.fetch_s else 0.0,
            )
            for resident in self._hub.residents()
            if (entry := resident.entry).footprint is not None and entry.state.is_serving
        }

    async def _look_at_disk(self, entries: Iterable[ModelEntry]) -> bool:
        now_s = self._hub.now_s()
        due: dict[ModelSpec, None] = {}
        for entry in entries:
            assert isinstance(entry.spec, ModelSpec)
            seen = self._on_disk.get(entry.spec)
            if seen is None or now_s - seen[0] >= RECHECK_S:
                due[entry.spec] = None
        batch = tuple(due)[:MAX_LOOKS]
        if batch:
            find = self._hub.operations.find
            sizes = await asyncio.to_thread(lambda: [find(spec) for spec in batch])
            self._on_disk |= {spec: (now_s, size) for spec, size in zip(batch, sizes, strict=True)}
        return len(due) > len(batch)


def _weight_bytes(entry: ModelEntry) -> int:
    footprint = entry.footprint
    return 0 if footprint is None else footprint.weight_bytes * footprint.num_accelerators
