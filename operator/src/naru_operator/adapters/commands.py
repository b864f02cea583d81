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
from naru_operator.core.model_plan import EVICTED, KNOWN, LoadModel, ObservedModel, UnloadModel
from naru_proto import names
from naru_proto.errors import NaruError, StaleCommand, Unavailable
from naru_proto.registry import WorkerRecord

_Work = Callable[[], Coroutine[None, None, str]]
"""Carries a command out; returns the state it leads to."""

_RETRY_S = 0.5
"""A worker that does not answer is left alone for this long: its lease may outlive it by a while."""


_RETRY_UNLOAD_S = 5.0
"""Before an unload that a worker refused is tried again."""
_ARRIVED = ("ready", "active")
_ON_ITS_WAY = ("fetching", "loading", *_ARRIVED)
_LEARN_TIMEOUT_S = 5.0
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
        *,
        retry_failed_s: float = math.inf,
    ) -> None:
        """``retry_failed_s``: after this long a load that failed may be planned again; until then it counts as failed,
        unless the lease shows that the worker has come further by itself.
        """
        self._retry_failed_s = retry_failed_s
        self._on_progress = on_progress
        self._on_failure = on_failure
        self._on_end = on_end
        self._clients: dict[str, tuple[str, WorkerClient]] = {}
        """Worker id to the address its channel goes to, and the channel."""
        self._closing: set[asyncio.Task[None]] = set()
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._outcomes: dict[str, dict[str, _Outcome]] = {}
        """By worker, then by model."""
        self._known: dict[str, dict[str, tuple[str, int, bool]]] = {}
        """Worker id to model to the worker's epoch, the generation in which it was told of the model, and whether it
        was told to load it: a lease does not show what a worker knows and does not hold.
        """
        self._learned: dict[str, str] = {}
        """Worker id to the epoch of the life in which it was asked what it knows."""
        self._refused: dict[str, int] = {}
        self._tells = asyncio.Semaphore(_MAX_TELLS)

    @property
    def refused(self) -> dict[str, int]:
        """Model to the newest generation that a worker named when it refused a command as stale."""
        return dict(self._refused)

    @property
    def is_settled(self) -> bool:
        """Nothing is under way, and what is believed of models does not depend on the time."""
        outcomes = (outcome for found in self._outcomes.values() for outcome in found.values())
        return not self._tasks and all(math.isinf(outcome.until_s) for outcome in outcomes)

    def load(self, command: LoadModel, worker: WorkerRecord) -> None:
        """Begins a load; what is under way for that model on that worker is given up."""
        is_told = command.residency.tier is Tier.COLD
        self._begin(command, KNOWN if is_told else "loading", lambda: self._load(command, worker))

    def unload(self, command: UnloadModel, worker: WorkerRecord) -> None:
        """Begins an unload; what is under way for that model on that worker is given up."""
        if (command.worker_id, command.model) in self._tasks:
            # A load may have told the worker of the model already, which no lease shows: to be unloaded until it is.
            known = self._known.setdefault(command.worker_id, {})
            known.setdefault(command.model, (worker.epoch, command.generation, False))
        self._begin(command, "draining", lambda: self._unload(command, worker))

    def observed(self, worker: WorkerRecord) -> dict[str, ObservedModel]:
        """A worker's models as its lease has them, with those it knows, corrected by what will come of commands.

        What a worker was told holds for its life, which its epoch names: a restarted one knows nothing.
        """
        models = {name: ObservedModel(held.state, held.generation) for name, held in worker.models.items()}
        for name, (epoch, generation, is_ordered) in self._known.get(worker.worker_id, {}).items():
            if epoch == worker.epoch and (name not in models or models[name].state == "cold"):
                models[name] = ObservedModel(EVICTED if is_ordered else KNOWN, generation)
        now_s = time.monotonic()
        outcomes = self._outcomes.get(worker.worker_id, {})
        for name, outcome in list(outcomes.items()):
            if now_s > outcome.until_s or _is_outlived(outcome.model, models.get(name)):
                del outcomes[name]
            elif _is_news(outcome.model, models.get(name)):
                models[name] = outcome.model
        return models

    def forget(self, worker_id: str) -> None:
        """A worker's process ended: nothing that was known of its models holds for the next one."""
        self._outcomes.pop(worker_id, None)
        self._known.pop(worker_id, None)
        self._learned.pop(worker_id, None)

    def drop(self, worker_id: str) -> None:
        """A worker is gone for good: what is under way to it is given up, and its channel closed."""
        for key, task in list(self._tasks.items()):
            if key[0] == worker_id:
                task.cancel()
        self.forget(worker_id)
        _, client = self._clients.pop(worker_id, ("", None))
        if client is not None:
            self._close(client)

    def give_up(self) -> None:
        """Gives up everything under way, at once; what workers were asked for already goes on there."""
        for task in self._tasks.values():
            task.cancel()

    async def close(self) -> None:
        """Gives up everything under way and closes the channels."""
        self.give_up()
        await asyncio.gather(*self._tasks.values(), *self._closing, return_exceptions=True)
        for _, client in self._clients.values():
            await client.close()

    def _begin(self, command: LoadModel | UnloadModel, state: str, work: _Work) -> None:
        key = (command.worker_id, command.model)
        before = self._tasks.get(key)
        if before is not None:
            before.cancel()
        self._expect(command, state, math.inf)
        task = asyncio.create_task(self._carry_out(command, work), name=f"{state} {command.model}")
        self._tasks[key] = task
        task.add_done_callback(lambda done: self._ended(key, done))

    def _ended(self, key: tuple[str, str], task: asyncio.Task[None]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]
            self._on_end()

    async def _carry_out(self, command: LoadModel | UnloadModel, work: _Work) -> None:
        try:
            self._expect(command, await work(), names.WORKER_LEASE_TTL_S)
        except Unavailable:
            self._expect(command, "loading", _RETRY_S)
        except NaruError as exc:
            if isinstance(exc, StaleCommand):
                self._refused[command.model] = max(exc.newest_generation, self._refused.get(command.model, 0))
            if isinstance(command, LoadModel):
                self._expect(command, "failed", self._retry_failed_s)
            else:
                self._expect(command, "draining", _RETRY_UNLOAD_S)
            self._on_failure(command, exc)

    def _expect(self, command: LoadModel | UnloadModel, state: str, for_s: float) -> None:
        """What the command makes of its model is believed for so long from now."""
        outcome = _Outcome(ObservedModel(state, command.generation), time.monotonic() + for_s)
        self._outcomes.setdefault(command.worker_id, {})[command.model] = outcome

    async def learn(self, worker: WorkerRecord) -> None:
        """Asks a worker, once in its life, what it knows: what another control plane told it is not told again.

        Raises:
            NaruError: it does not answer; nothing was learned.
        """
        if self._learned.get(worker.worker_id) == worker.epoch:
            return
        found = await self._client(worker).known(_LEARN_TIMEOUT_S)
        known = self._known.setdefault(worker.worker_id, {})
        for name, (generation, is_ordered) in found.items():
            known.setdefault(name, (worker.epoch, generation, is_ordered))
        self._learned[worker.worker_id] = worker.epoch

    async def _load(self, command: LoadModel, worker: WorkerRecord) -> str:
        is_told = command.residency.tier is Tier.COLD
        async with self._tells if is_told else contextlib.nullcontext():
            async for report in self._client(worker).load(command):
                self._on_progress(command, report)
        if is_told:
            self._on_progress(command, LoadReport(KNOWN, 0, 0, ""))
        known = self._known.setdefault(command.worker_id, {})
        known[command.model] = (worker.epoch, command.generation, not is_told)
        return KNOWN if is_told else "ready"

    async def _unload(self, command: UnloadModel, worker: WorkerRecord) -> str:
        await self._client(worker).unload(command)
        self._known.get(command.worker_id, {}).pop(command.model, None)
        return "cold"

    def _client(self, worker: WorkerRecord) -> WorkerClient:
        address, client = self._clients.get(worker.worker_id, ("", None))
        if client is None or address != worker.address:
            if client is not None:
                self._close(client)
            client = WorkerClient(worker.address)
            self._clients[worker.worker_id] = (worker.address, client)
        return client

    def _close(self, client: WorkerClient) -> None:
        task = asyncio.create_task(client.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _is_outlived(outcome: ObservedModel, held: ObservedModel | None) -> bool:
    """A load failed, and the worker has brought the model up since: it tries again by itself."""
    if outcome.state != "failed" or held is None:
        return False
    return held.state in _ARRIVED and held.generation >= outcome.generation


def _is_news(outcome: ObservedModel, held: ObservedModel | None) -> bool:
    """Whether a command's outcome says more than the lease does."""
    if held is None or held.generation < outcome.generation:
        return True
    is_tried_again = outcome.state == "failed" and held.state in _ON_ITS_WAY
    return held.generation == outcome.generation and not is_tried_again
