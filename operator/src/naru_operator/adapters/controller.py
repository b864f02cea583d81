"""The control loop of `naru up`: observe, plan, carry out, wait for a change, again. One task, wired by the command.

Decisions are in `core.local_plan`; processes are the supervisor's, loads and unloads those of `commands`. This is
what lies between.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from naru_operator.adapters.child_process import ProcessSpec
from naru_operator.adapters.commands import Commands
from naru_operator.adapters.route_map import Board, RouteMap
from naru_operator.adapters.supervisor import Supervisor
from naru_operator.adapters.worker_client import LoadReport
from naru_operator.core.desired import DesiredPool, DesiredState
from naru_operator.core.local_plan import LocalPlan, ObservedWorker, Snapshot, plan
from naru_operator.core.model_plan import Applied, LoadModel, UnloadModel
from naru_operator.core.placement import NO_FACTS
from naru_proto.beats import until_beat_s
from naru_proto.errors import NaruError, Unavailable

_RESYNC_S = 1.0
"""Read again at least this often: a lease that expires announces nothing."""
_RELISTEN_S = 0.5
"""Before listening again after Redis went away."""


class Events(Protocol):
    """What the loop tells the person who watches."""

    def planned(self, reasons: tuple[str, ...]) -> None:
        """Steps that are taken now."""

    def loading(self, command: LoadModel, report: LoadReport) -> None:
        """A load went on; the last report of one on demand has the state KNOWN."""

    def failed(self, command: LoadModel | UnloadModel, error: NaruError) -> None:
        """It is not tried again until the manifest or the worker's process changes."""

    def trouble(self, message: str) -> None:
        """A turn of the loop failed; it tries again."""


class Controller:
    """Brings this machine to the desired state and keeps it there."""

    def __init__(
        self,
        route_map: RouteMap,
        supervisor: Supervisor,
        worker_process: Callable[[str, DesiredPool], ProcessSpec],
        events: Events,
        *,
        started: Mapping[str, DesiredPool],
    ) -> None:
        """``started``: workers whose process the supervisor keeps running already."""
        self._route_map = route_map
        self._supervisor = supervisor
        self._worker_process = worker_process
        self._events = events
        self._desired: DesiredState | None = None
        self._applied: Mapping[str, Applied] = {}
        self._pools = dict(started)
        """Workers whose process is kept running, with the pool each was started for."""
        self._stopping: dict[str, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        self._commands = Commands(events.loading, events.failed, self._wake.set)
        self._board = Board({}, {})
        self._facts = NO_FACTS
        self._is_settled = False
        """The last turn has found nothing to do."""
        self._turned = asyncio.Condition()

    @property
    def workers(self) -> dict[str, DesiredPool]:
        """Workers whose process is kept running, with the pool each was started for."""
        return dict(self._pools)

    def desire(self, desired: DesiredState) -> None:
        """Takes a new desired state; the loop carries it out."""
        self._desired = desired
        self._wake.set()

    def wake(self) -> None:
        """Something may have changed: look again now."""
        self._wake.set()

    def worker_ended(self, worker_id: str) -> None:
        """A worker's process ended by itself; the supervisor starts the next one."""
        self._commands.forget(worker_id)
        self._wake.set()

    async def wait_for(self, condition: Callable[[Board], bool]) -> None:
        """Returns once the route map, as the loop last read it, fulfils the condition."""
        async with self._turned:
            await self._turned.wait_for(lambda: condition(self._board))

    async def run(self) -> None:
        """The loop. Ends by cancellation only, which gives up commands and leaves the processes running."""
        listener = asyncio.create_task(self._listen())
        try:
            while True:
                is_woken = self._wake.is_set()
                self._wake.clear()
                try:
                    if is_woken or not await self._is_at_rest():
                        await self.reconcile()
                except NaruError as exc:
                    self._events.trouble(exc.message)
                except Exception as exc:
                    # The top of the loop: a fault in one turn must not end the control of everything.
                    self._events.trouble(f"a turn of the control loop failed ({type(exc).__name__}: {exc})")
                # asyncio.timeout, not wait_for: that one loses a cancellation that meets the event (before 3.12).
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(until_beat_s(asyncio.get_running_loop().time(), _RESYNC_S)):
                        await self._wake.wait()
        finally:
            for task in (listener, *self._stopping.values()):
                task.cancel()
            await asyncio.gather(listener, *self._stopping.values(), return_exceptions=True)
            await self._commands.close()

    async def reconcile(self) -> LocalPlan:
        """One turn; returns what was begun.

        Raises:
            Unavailable: Redis does not answer, or no process can be made.
        """
        self._is_settled = False
        board = await self._route_map.read()
        self._facts = await self._route_map.placement.read(board.workers)
        async with self._turned:
            self._board = board
            self._turned.notify_all()
        if self._desired is None:
            return LocalPlan()
        steps = plan(self._snapshot(self._desired, board), now_s=int(time.time()))
        if not steps.is_empty:
            self._events.planned(steps.reasons)
        await self._route_map.write_models(steps.put_records, steps.delete_records)
        self._applied = steps.applied
        for start in steps.start_workers:
            await self._start_worker(start.worker_id, start.pool)
        for unload in steps.unload_models:
            self._commands.unload(unload, board.workers[unload.worker_id])
        for load in steps.load_models:
            self._commands.load(load, board.workers[load.worker_id])
        for worker_id in steps.stop_workers:
            self._stop_worker(worker_id)
        self._is_settled = steps.is_empty
        return steps

    async def _is_at_rest(self) -> bool:
        """Whether another turn would find what the last one has found, which was nothing to do.

        Raises:
            Unavailable: Redis does not answer.
        """
        is_settled = self._is_settled and not self._stopping and self._commands.is_settled
        return is_settled and await self._route_map.read() is self._board

    def _snapshot(self, desired: DesiredState, board: Board) -> Snapshot:
        wanted = {worker_id for pool in desired.pools for worker_id in pool.worker_ids()}
        workers = []
        for worker_id, pool in sorted(self._pools.items()):
            is_stopping = worker_id in self._stopping
            if is_stopping and worker_id not in wanted:
                continue  # its stop is under way; nothing more to plan
            lease = board.workers.get(worker_id)
            models = self._commands.observed(lease) if lease else {}
            takes = lease is not None and not lease.draining and not is_stopping
            workers.append(ObservedWorker(worker_id, pool, takes, models, lease))
        return Snapshot(desired, tuple(workers), board.models, self._applied, self._commands.refused, self._facts)

    async def _start_worker(self, worker_id: str, pool: DesiredPool) -> None:
        try:
            await self._supervisor.start(self._worker_process(worker_id, pool))
        except OSError as exc:
            raise Unavailable(
                f"worker {worker_id!r} cannot be started ({exc.strerror}); free memory or processes"
            ) from exc
        self._pools[worker_id] = pool

    def _stop_worker(self, worker_id: str) -> None:
        async def stop() -> None:
            await self._supervisor.stop(worker_id, self._pools[worker_id].drain_timeout_s)
            del self._pools[worker_id], self._stopping[worker_id]
            self._wake.set()

        if worker_id not in self._stopping:
            self._stopping[worker_id] = asyncio.create_task(stop(), name=f"stop {worker_id}")

    async def _listen(self) -> None:
        while True:
            with contextlib.suppress(Unavailable):
                async for _ in self._route_map.changes():
                    self._wake.set()
            await asyncio.sleep(_RELISTEN_S)
