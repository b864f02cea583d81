"""Commands under way to workers, and what they lead to before the leases show it. Called by the controller.

A lease is renewed a few times a second at most; without this, a command would be planned again until then.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from naru_operator.adapters.worker_client import LoadReport, WorkerClient
from naru_operator.core.desired import Tier
from naru_operator.core.local_plan import KNOWN, LoadModel, ObservedModel, UnloadModel
from naru_proto import names
from naru_proto.errors import NaruError, StaleCommand, Unavailable
from naru_proto.registry import WorkerRecord

_Work = Callable[[], Coroutine[None, None, str]]
"""Carries a command out; returns the state it leads to."""

_RETRY_S = 0.5
"""A worker that does not answer is left alone for this long: its lease may outlive it by a while."""


_RETRY_UNLOAD_S = 5.0
"""Before an unload that a worker refused is tried again."""
_MAX_TELLS = 32
"""Models on demand that are made known at once: each is a short call, and there may be thousands."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a command made of a model, to be believed until the lease must show it."""

    model: ObservedModel
    until_s: float


class Commands:
    """Loads and unloads, one at a time for each worker and model. asyncio thread only."""

    def __init__(
        self,
        on_progress: Callable[[LoadModel, LoadReport], None],
        on_failure: Callable[[LoadModel | UnloadModel, NaruError], None],
        on_end: Callable[[], None],
    ) -> None:
        self._on_progress = on_progress
        self._on_failure = on_failure
        self._on_end = on_end
        self._clients: dict[str, tuple[str, WorkerClient]] = {}
        """Worker id to the address its channel goes to, and the channel."""
        self._closing: set[asyncio.Task[None]] = set()
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._outcomes: dict[tuple[str, str], _Outcome] = {}
        self._known: dict[str, dict[str, tuple[str, int]]] = {}
        """Worker id to model to the worker's epoch and the generation in which it was told of the model: a lease does
        not show what a worker knows and does not hold.
        """
        self._refused: dict[str, int] = {}
        self._tells = asyncio.Semaphore(_MAX_TELLS)

    @property
    def refused(self) -> dict[str, int]:
        """Model to the newest generation that a worker named when it refused a command as stale."""
        return dict(self._refused)

    def load(self, command: LoadModel, worker: WorkerRecord) -> None:
        """Begins a load; what is under way for that model on that worker is given up."""
        is_told = command.residency.tier is Tier.COLD
        self._begin(command, KNOWN if is_told else "loading", lambda: self._load(command, worker))

    def unload(self, command: UnloadModel, worker: WorkerRecord) -> None:
        """Begins an unload; what is under way for that model on that worker is given up."""
        self._begin(command, "draining", lambda: self._unload(command, worker))

    def observed(self, worker: WorkerRecord) -> dict[str, ObservedModel]:
        """A worker's models as its lease has them, with those it knows, corrected by what will come of commands.

        What a worker was told holds for its life, which its epoch names: a restarted one knows nothing.
        """
        models = {name: ObservedModel(held.state, held.generation) for name, held in worker.models.items()}
        for name, (epoch, generation) in self._known.get(worker.worker_id, {}).items():
            if epoch == worker.epoch and (name not in models or models[name].state == "cold"):
                models[name] = ObservedModel(KNOWN, generation)
        now_s = time.monotonic()
        for (worker_id, name), outcome in list(self._outcomes.items()):
            if worker_id != worker.worker_id:
                continue
            if now_s > outcome.until_s:
                del self._outcomes[worker_id, name]
            elif name not in models or outcome.model.generation >= models[name].generation:
                models[name] = outcome.model
        return models

    def forget(self, worker_id: str) -> None:
        """A worker's process ended: nothing that was known of its models holds for the next one."""
        self._outcomes = {key: outcome for key, outcome in self._outcomes.items() if key[0] != worker_id}
        self._known.pop(worker_id, None)

    async def close(self) -> None:
        """Gives up everything under way."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), *self._closing, return_exceptions=True)
        for _, client in self._clients.values():
            await client.close()

    def _begin(self, command: LoadModel | UnloadModel, state: str, work: _Work) -> None:
        key = (command.worker_id, command.model)
        before = self._tasks.get(key)
        if before is not None:
            before.cancel()
        self._outcomes[key] = _Outcome(ObservedModel(state, command.generation), math.inf)
        task = asyncio.create_task(self._carry_out(command, work), name=f"{state} {command.model}")
        self._tasks[key] = task
        task.add_done_callback(lambda done: self._ended(key, done))

    def _ended(self, key: tuple[str, str], task: asyncio.Task[None]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]
            self._on_end()

    async def _carry_out(self, command: LoadModel | UnloadModel, work: _Work) -> None:
        key = (command.worker_id, command.model)
        try:
            state = await work()
            lease_s = time.monotonic() + names.WORKER_LEASE_TTL_S
            self._outcomes[key] = _Outcome(ObservedModel(state, command.generation), lease_s)
        except Unavailable:
            retry = ObservedModel("loading", command.generation)
            self._outcomes[key] = _Outcome(retry, time.monotonic() + _RETRY_S)
        except NaruError as exc:
            if isinstance(exc, StaleCommand):
                self._refused[command.model] = max(exc.newest_generation, self._refused.get(command.model, 0))
            if isinstance(command, LoadModel):
                self._outcomes[key] = _Outcome(ObservedModel("failed", command.generation), math.inf)
            else:
                later_s = time.monotonic() + _RETRY_UNLOAD_S
                self._outcomes[key] = _Outcome(ObservedModel("draining", command.generation), later_s)
            self._on_failure(command, exc)

    async def _load(self, command: LoadModel, worker: WorkerRecord) -> str:
        is_told = command.residency.tier is Tier.COLD
        async with self._tells if is_told else contextlib.nullcontext():
            async for report in self._client(worker).load(command):
                self._on_progress(command, report)
        if is_told:
            self._on_progress(command, LoadReport(KNOWN, 0, 0, ""))
        self._known.setdefault(command.worker_id, {})[command.model] = (worker.epoch, command.generation)
        return KNOWN if is_told else "ready"

    async def _unload(self, command: UnloadModel, worker: WorkerRecord) -> str:
        await self._client(worker).unload(command)
        self._known.get(command.worker_id, {}).pop(command.model, None)
        return "cold"

    def _client(self, worker: WorkerRecord) -> WorkerClient:
        address, client = self._clients.get(worker.worker_id, ("", None))
        if client is None or address != worker.address:
            if client is not None:
                task = asyncio.create_task(client.close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
            client = WorkerClient(worker.address)
            self._clients[worker.worker_id] = (worker.address, client)
        return client
