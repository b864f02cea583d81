"""What this worker says of itself in the route map: its lease, and with it what it has near. Put together by the app.

Lives in the asyncio thread. Says what is; nothing is decided here.
"""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Any

from naru_proto.registry import ModelInfoRecord, WorkerRecord
from naru_worker.adapters.engine.hub import ModelHub
from naru_worker.adapters.near_models import NearModels
from naru_worker.adapters.near_writer import NearWriter
from naru_worker.adapters.registry import LeaseKeeper
from naru_worker.adapters.server import describe
from naru_worker.adapters.server.identity import WorkerIdentity
from naru_worker.settings import RegistrySettings, in_brackets


class Announcement:
    """Hears of changes from the hub as soon as it is made."""

    def __init__(
        self,
        settings: RegistrySettings,
        identity: WorkerIdentity,
        hub: ModelHub,
        address: str,
        on_registered: Callable[[], None],
    ) -> None:
        """``address``: where routers reach the worker. `on_registered`: the first lease is written."""
        self._settings, self._identity, self._hub = settings, identity, hub
        self._address = in_brackets(address)
        self._node = settings.node or socket.gethostname()
        # Fixed, so that one moment is always told as the same second.
        self._unix_offset_s = time.time() - time.monotonic()
        self._near = NearModels(hub)
        self._near_writer = NearWriter(self._near, identity.worker_id)
        self.is_leaving = False
        """Asked to end, and serving until its models are elsewhere."""
        self.lease = LeaseKeeper(settings, self._record, self._infos, hub.changes, on_registered, self._near_writer)
        hub.listeners.append(self._on_change)

    def work(self) -> tuple[Coroutine[Any, Any, None], ...]:
        """To be run, each as a task of its own, until the end."""
        return self.lease.run(), self._near.run()

    def _on_change(self) -> None:
        self._near.poke()
        self.lease.poke()

    def _record(self) -> WorkerRecord:
        settings = self._settings
        return dataclasses.replace(
            describe.worker_record(self._identity, self._hub, self._address, self._unix_offset_s),
            pool=settings.pool,
            leaving=self.is_leaving,
            node=self._node,
            domains=dict(entry.split("=", 1) for entry in settings.domains),
            known_version=self._near_writer.version,
        )

    def _infos(self) -> dict[str, ModelInfoRecord]:
        return {model.facts.info_digest: model.facts.info for model in self._hub.models()}
