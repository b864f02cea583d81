"""Commands under way to workers, and what they lead to before the leases show it. Called by the controller.

A lease is renewed a few times a second at most; without this, a command would be planned again until then.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from naru_operator.adapters.worker_client import LoadReport, WorkerClient
from naru_operator.core.local_plan import LoadModel, ObservedModel, UnloadModel
from naru_proto import names
from naru_proto.errors import NaruError, Unavailable
from naru_proto.registry import WorkerRecord

_Work = Callable[[], Coroutine[None, None, str]]
"""Carries a command out; returns the state it leads to."""

_RETRY_S = 0.5
"""A worker that does not answer is left alone for this long: its lease may outlive it by a while."""


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

    def load(self, command: LoadModel, worker: WorkerRecord) -> None:
        """Begins a load; what is under way for that model on that worker is given up."""
        self._begin(command, "loading", lambda: self._load(command, worker))

    def unload(self, command: UnloadModel, worker: WorkerRecord) -> None:
        """Begins an unload; what is under way for that model on that worker is given up."""
        self._begin(command, "draining", lambda: self._unload(command, worker))

    def observed(self, worker: WorkerRecord) -> dict[str, ObservedModel]:
        """A worker's models as its lease has them, corrected by what is known to come of commands."""
        models = {name: ObservedModel(held.state, held.generation) for name, held in worker.models.items()}
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
            self._outcomes[key] = _Outcome(ObservedModel("failed", command.generation), math.inf)
            self._on_failure(command, exc)

    async def _load(self, command: LoadModel, worker: WorkerRecord) -> str:
        async for report in self._client(worker).load(command):
            self._on_progress(command, report)
        return "ready"

    async def _unload(self, command: UnloadModel, worker: WorkerRecord) -> str:
        await self._client(worker).unload(command)
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
