"""One turn for the ModelDeployments: observe, plan, carry out. Called by the term; `tellings` tells what came of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import replace

from naru_operator.adapters.cluster.leases import Leases
from naru_operator.adapters.cluster.nodes import NodeLabels
from naru_operator.adapters.cluster.objects import Parsed, ParsedObjects, readable
from naru_operator.adapters.cluster.pools import ParsedPool
from naru_operator.adapters.cluster.side_by_side import take_all
from naru_operator.adapters.cluster.status_writer import StatusWriter
from naru_operator.adapters.commands import Commands
from naru_operator.adapters.kube.client import KubeClient
from naru_operator.adapters.kube.errors import AlreadyExists, NotFound, NotLeader
from naru_operator.adapters.kube.store import ObjectStore
from naru_operator.adapters.worker_client import LoadReport
from naru_operator.core.kube import Object, ObjectKey, key_of
from naru_operator.core.model_plan import Applied, LoadModel, UnloadModel
from naru_operator.core.models.conditions import clean
from naru_operator.core.models.model import ClusterWorker, ModelsPlan, ModelsSnapshot
from naru_operator.core.models.plan import plan_models
from naru_operator.core.placement import PlacementFacts
from naru_proto.crd.v1alpha1 import ModelDeployment, ModelDeploymentStatus
from naru_proto.errors import NaruError

_log = logging.getLogger(__name__)

KIND = "ModelDeployment"
REVISION = "ControllerRevision"
MAX_WRITES = 12
"""ControllerRevisions that are created or deleted at once."""
_RETRY_FAILED_S = 900.0
"""Workers try failed loads again by themselves, and forget for good after this long: then one is planned anew."""
_LOADED = ("fetching", "loading", "ready", "active")

ParsedModel = Parsed[ModelDeployment, ModelDeploymentStatus]


class ModelControl:
    """Carries out what is planned for the models. asyncio thread only."""

    def __init__(
        self,
        store: ObjectStore,
        client: KubeClient,
        statuses: StatusWriter,
        leases: Leases,
        may_act: Callable[[], bool],
        wake: Callable[[], None],
    ) -> None:
        """``may_act`` is asked before the registry is written and workers are told anything."""
        self._store, self._client, self._statuses, self._leases = store, client, statuses, leases
        self._may_act, self._wake = may_act, wake
        self._nodes = NodeLabels(client, leases)
        self._objects: ParsedObjects[ModelDeployment, ModelDeploymentStatus] = ParsedObjects(
            ModelDeployment, ModelDeploymentStatus
        )
        self._applied: Mapping[str, Applied] = {}
        self._started_s: Mapping[str, int] = {}
        self.failed: dict[str, str] = {}
        """Registry name to what the last command about it failed with."""
        self.commands = Commands(self._on_progress, self._on_failure, wake, retry_failed_s=_RETRY_FAILED_S)
        self._mute: frozenset[str] = frozenset()
        """Workers that hold a lease and did not say what they know."""
        self.models: dict[ObjectKey, ParsedModel] = {}
        self.workers: Mapping[str, ClusterWorker] = {}
        """As the last plan saw them."""
        self.is_moving = False
        """Whether a rollout goes on or something waits for its next try: worth another look soon."""
        self._said: dict[int, frozenset[str]] = {}
        """Level to what was logged at the last turn."""

    async def observe(self) -> None:
        """Takes the store's models."""
        self.models = await self._objects.update(self._store.objects(KIND))
        self._statuses.keep_only(KIND, set(self.models))

    def worker_gone(self, worker_id: str) -> None:
        """A worker's life has ended; what was known of its models holds for no other."""
        self.commands.drop(worker_id)
        self._wake()

    async def turn(self, pools: Mapping[ObjectKey, ParsedPool], *, now_s: int) -> ModelsPlan:
        """One turn over all models.

        Raises:
            NotLeader: this replica may not act any more; nothing further was begun.
            Unavailable: the registry could not be written; no worker was told anything.
        """
        await self._learn()
        facts = await self._leases.placement_facts()
        facts = replace(facts, nodes=await self._nodes.update(self._spread_keys(), facts.nodes))
        snapshot = self._snapshot(pools, facts)
        self.workers = snapshot.workers
        # In a thread: thousands of models take a second, and the lease must be renewed meanwhile.
        plan = await asyncio.to_thread(plan_models, snapshot, now_s=now_s)
        self._say(plan.reasons)
        # One that cannot be kept, for a quota or a namespace that goes or a webhook, costs its undo alone.
        self._say(await self._each(self._create_revision(it) for it in plan.create_revisions), logging.WARNING)
        self._require_lead()
        await self._leases.write(plan.put_records, plan.delete_records)
        self._applied, self._started_s = plan.applied, plan.started_s
        self._require_lead()
        workers = self._leases.board.workers
        for unload in plan.unload_models:
            self.commands.unload(unload, workers[unload.worker_id])
        for load in plan.load_models:
            self.commands.load(load, workers[load.worker_id])
        self._forget_failures(plan)
        self._say(await self._each(self._delete_revision(it) for it in plan.delete_revisions), logging.ERROR)
        self.is_moving = bool(plan.started_s or plan.reasons or self._mute or self._nodes.is_behind)
        return plan

    def give_up(self) -> None:
        """Nothing that waits for its turn reaches a worker any more."""
        self.commands.give_up()

    async def close(self) -> None:
        """Gives up commands under way; what workers were asked for goes on there."""
        await self.commands.close()

    def _require_lead(self) -> None:
        if not self._may_act():
            raise NotLeader("the registry and the workers are left alone: another replica acts")

    def _spread_keys(self) -> set[str]:
        return {each.model.spec.placement.spread_topology_key for each in self.models.values() if each.model}

    def _snapshot(self, pools: Mapping[ObjectKey, ParsedPool], facts: PlacementFacts) -> ModelsSnapshot:
        items = sorted(self.models.items())
        workers = {
            worker_id: ClusterWorker(record, self.commands.observed(record))
            for worker_id, record in sorted(self._leases.board.workers.items())
            if worker_id not in self._mute
        }
        return ModelsSnapshot(
            deployments=tuple(self._with_status(key, it) for key, it in items if it.model and not _is_going(it.raw)),
            invalid={key: it.problem for key, it in items if it.model is None},
            raw={key: it.raw for key, it in items},
            pools=readable(it for _, it in sorted(pools.items())),
            workers=workers,
            records=self._leases.board.models,
            revisions=tuple(raw for _, raw in sorted(self._store.objects(REVISION).items())),
            applied=self._applied,
            refused=self.commands.refused,
            failed=self._failures(),
            placement=facts,
            started_s=self._started_s,
        )

    def _failures(self) -> dict[str, str]:
        """Without those that workers have got over since, by themselves."""
        if self.failed:
            for worker in self._leases.board.workers.values():
                for name in [name for name in self.failed if name in worker.models]:
                    if worker.models[name].state in _LOADED:
                        del self.failed[name]
        return dict(self.failed)

    async def _learn(self) -> None:
        """What workers know is asked of each once; one that does not answer is left out of this turn's plan."""
        board = self._leases.board.workers
        asked = (self.commands.learn(record) for record in board.values())
        results = await asyncio.gather(*asked, return_exceptions=True)
        mute = set()
        for worker_id, result in zip(board, results, strict=True):
            if isinstance(result, NaruError):
                _log.debug("worker %s does not say what it knows: %s", worker_id, result.message)
                mute.add(worker_id)
            elif isinstance(result, BaseException):
                raise result
        self._mute = frozenset(mute)

    def _with_status(self, key: ObjectKey, parsed: ParsedModel) -> ModelDeployment:
        """With what was last told, which the store may not show yet."""
        assert parsed.model is not None
        status = self._statuses.last(KIND, key, parsed.version[0], parsed.status)
        return parsed.model.model_copy(update={"status": status})

    async def _each(self, steps: Iterable[Awaitable[None]]) -> list[str]:
        """Takes all steps; returns what went wrong with single ones, which stand in no other's way.

        Raises:
            NotLeader: this replica may not act any more.
        """
        return [error.message for error in await take_all(steps, MAX_WRITES)]

    async def _create_revision(self, revision: Object) -> None:
        try:
            self._store.take(REVISION, await self._client.create(revision))
        except AlreadyExists:
            # The store has not seen it yet, or never will: it lacks our label. Seen once, it is not planned again.
            key = key_of(revision)
            try:
                self._store.take(REVISION, await self._client.get(REVISION, key))
            except NotFound:
                return  # gone meanwhile: the next turn creates it

    async def _delete_revision(self, key: ObjectKey) -> None:
        seen = self._store.objects(REVISION).get(key)
        if seen is not None:
            await self._client.delete(REVISION, key, uid=seen["metadata"].get("uid"))

    def _say(self, reasons: Collection[str], level: int = logging.INFO) -> None:
        """What has not been said at the last turn; what is still so is not news."""
        said, now = self._said.get(level, frozenset()), frozenset(reasons)
        self._said[level] = now
        for reason in reasons:
            if reason not in said:
                _log.log(level, "%s", reason)

    def _forget_failures(self, plan: ModelsPlan) -> None:
        gone = [name for name in self.failed if plan.applied.get(name, (None, 0))[0] is None]
        for name in gone:
            del self.failed[name]

    def _on_progress(self, command: LoadModel, report: LoadReport) -> None:
        if not command.is_spare:
            self.failed.pop(command.model, None)

    def _on_failure(self, command: LoadModel | UnloadModel, error: NaruError) -> None:
        message = clean(error.message)
        _log.warning("worker %s: %s: %s", command.worker_id, command.model, message)
        if isinstance(command, LoadModel):
            self.failed[command.model] = f"{command.worker_id}: {message}"


def _is_going(raw: Object) -> bool:
    return bool(raw["metadata"].get("deletionTimestamp"))
