"""What one ModelDeployment is to come to: its rollout, and the revisions that workers should hold or know. Pure.

Put together by the plan, one for each object that owns its name, from its claim and what is known of its revisions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from naru_operator.core.desired import DesiredModel, Tier, engine_limits, residency_of
from naru_operator.core.models.claims import Claim
from naru_operator.core.models.fleet import Fleet
from naru_operator.core.models.model import ModelsSnapshot
from naru_operator.core.models.revision import Revision, RevisionSpec, revision_spec
from naru_operator.core.models.rollout import COMPLETE, REVISION_FAILED, Case, Rollout, decide
from naru_operator.core.models.sources import eligible_pools
from naru_operator.core.scaling import scaling_of
from naru_proto import names
from naru_proto.crd.v1alpha1 import ModelDeployment, ModelDeploymentSpec, WorkerPool
from naru_proto.registry import ModelRecord


@dataclass(frozen=True, slots=True)
class Wanted:
    """A revision that workers should hold or know."""

    name: str
    """In the registry."""
    digest: str
    model: DesiredModel | None
    """As workers are told of it; None: nothing but its record and its copies is left of it."""
    pools: tuple[str, ...] = ()
    num_copies: int | None = None
    """None: every worker of its pools knows it, and requests load it."""
    max_copies: int = 0
    """Most there may be; 0: as many as there are workers."""
    num_ahead: int = 0
    """Copies that should be up for a rollout to go on."""
    is_stopped: bool = False
    """It has failed: no further worker tries it."""
    is_frozen: bool = False
    """Its copies stay as they are: nobody knows where they belong now."""


@dataclass(frozen=True, slots=True)
class Intent:
    """One ModelDeployment that owns its name."""

    claim: Claim
    deployment: ModelDeployment | None
    """None: it cannot be read."""
    target: str
    """Digest of the revision that requests go to; empty: none can be served."""
    update: str
    """Digest of the revision the spec asks for; empty: it cannot be read."""
    wanted: tuple[Wanted, ...]
    rollout: Rollout | None
    """None: the object is refused, and what it served before goes on."""


@dataclass(frozen=True, slots=True)
class World:
    """What all intents of one plan are made from."""

    snapshot: ModelsSnapshot
    fleet: Fleet
    pools: Mapping[str, WorkerPool]
    """Those that own their name."""
    num_staying: Mapping[str, int]
    """Pool to its workers that take models."""
    revisions: Mapping[str, list[str]]
    """ModelDeployment's name to the registry names of its revisions that workers hold or know."""
    now_s: int


def make_intent(
    claim: Claim, deployment: ModelDeployment | None, revisions: Iterable[Revision], world: World
) -> Intent:
    """What the object is to come to; ``revisions`` are its own."""
    history = {each.digest: each for each in revisions}
    if deployment is None:
        served = _served(claim.key.name, "", None, history, world)
        return Intent(claim, None, served, "", _kept(claim, served, world), None)
    spec = revision_spec(deployment.spec)
    update = spec.digest
    served = _served(claim.key.name, update, deployment.status.current_revision, history, world)
    specs = {update: spec}
    if served not in ("", update) and served in history:
        found = history[served].spec()
        specs |= {served: found} if found is not None else {}
    if not claim.is_accepted:
        wanted = _going_on(claim, deployment, served, specs, world)
        return Intent(claim, deployment, served, update, wanted, None)
    return _rolled(claim, deployment, served, update, specs, world)


def is_on_demand(spec: ModelDeploymentSpec) -> bool:
    """Whether requests alone load it: by its policy, or because no copy is asked for ahead of them."""
    return spec.residency.policy == "OnDemand" or spec.replicas.min == 0


def _rolled(
    claim: Claim,
    deployment: ModelDeployment,
    served: str,
    update: str,
    specs: Mapping[str, RevisionSpec],
    world: World,
) -> Intent:
    spec, name = deployment.spec, deployment.metadata.name
    rollout = decide(
        Case(
            name,
            served,
            update,
            is_on_demand(spec),
            spec.rollout.strategy == "Recreate",
            spec.replicas.min,
            sum(world.num_staying.get(pool, 0) for pool in claim.pools),
            spec.rollout.progress_deadline_s,
            _started_s(deployment, update, world),
            _failed_message(deployment, update),
        ),
        world.fleet,
        now_s=world.now_s,
    )
    wanted = [
        _wanted(deployment, digest, specs.get(digest), claim.pools if digest == update else None, world)
        for digest in rollout.wanted
    ]
    wanted = [
        dataclasses.replace(each, num_ahead=rollout.num_ahead, is_stopped=rollout.reason == "RevisionFailed")
        if each.digest == update
        else each
        for each in wanted
    ]
    return Intent(claim, deployment, rollout.target, update, tuple(wanted), rollout)


def _going_on(
    claim: Claim, deployment: ModelDeployment, served: str, specs: Mapping[str, RevisionSpec], world: World
) -> tuple[Wanted, ...]:
    """A refused object: what it served before goes on."""
    if not served:
        return ()
    return (_wanted(deployment, served, specs.get(served), None, world),)


def _kept(claim: Claim, served: str, world: World) -> tuple[Wanted, ...]:
    """An object that cannot be read: all that is there of it stays as it is."""
    model = claim.key.name
    found = set(world.revisions.get(model, ())) | ({names.revision_name(model, served)} if served else set())
    return tuple(
        Wanted(name, name.partition("@")[2], world.snapshot.applied.get(name, (None, 0))[0], is_frozen=True)
        for name in sorted(found)
    )


def _wanted(
    deployment: ModelDeployment, digest: str, spec: RevisionSpec | None, pools: tuple[str, ...] | None, world: World
) -> Wanted:
    """``pools``: where they are known already."""
    name = names.revision_name(deployment.metadata.name, digest)
    if spec is None:
        last, _ = world.snapshot.applied.get(name, (None, 0))
        return Wanted(name, digest, last, is_frozen=True)
    model = desired_model(name, spec, deployment.spec)
    if pools is None:
        pools = eligible_pools(spec, deployment.spec.placement.pool_selector.match_labels, world.pools).pools
    num_copies = None if model.is_on_demand else deployment.spec.replicas.min
    max_copies = deployment.spec.replicas.max or 0
    return Wanted(name, digest, model, pools, num_copies, max_copies, is_frozen=not pools)


def desired_model(name: str, revision: RevisionSpec, spec: ModelDeploymentSpec) -> DesiredModel:
    """A revision as workers are told of it. Where it is placed and how often is no part: that needs no new command."""
    residency = residency_of(spec)
    if is_on_demand(spec):
        residency = dataclasses.replace(residency, tier=Tier.COLD)
    return DesiredModel(
        name=name,
        uri=revision.model.uri,
        revision=revision.model.revision or "",
        aliases=(),
        min_replicas=0,
        pools=(),
        limits=engine_limits(revision.engine, revision.resources, revision.batching),
        residency=residency,
        credentials=revision.model.credentials_secret or "",
        scaling=scaling_of(spec, revision.resources),
    )


def _served(name: str, update: str, told: str | None, history: Mapping[str, Revision], world: World) -> str:
    """Digest of the revision that requests go to, as far as it can go on; ``told``: what the object's status says.

    The registry knows; where it was emptied, the status does. One that never served gives way at once.
    """
    records = world.snapshot.records
    entry: ModelRecord | None = records.get(name)
    base, _, digest = (entry.target if entry is not None else "").partition("@")
    if (
        base == name
        and digest
        and ((entry is not None and entry.target in records) or _is_known(digest, update, history))
    ):
        has_served = told is not None or world.fleet.num_ready(names.revision_name(name, digest)) > 0
        return digest if has_served or update in ("", digest) else ""
    return told if told is not None and _is_known(told, update, history) else ""


def _is_known(digest: str, update: str, history: Mapping[str, Revision]) -> bool:
    return digest == update or (digest in history and history[digest].spec() is not None)


def _failed_message(deployment: ModelDeployment, update: str) -> str:
    """What the status tells of a failure of that very revision."""
    status = deployment.status
    if status.update_revision != update:
        return ""
    progressing = next((each for each in status.conditions if each.type == "Progressing"), None)
    return progressing.message if progressing is not None and progressing.reason == REVISION_FAILED else ""


def _started_s(deployment: ModelDeployment, update: str, world: World) -> int | None:
    """When the rollout to `update` began; None: it is done, as the last plan or, after a restart, the status says."""
    name = names.revision_name(deployment.metadata.name, update)
    started_s = world.snapshot.started_s.get(name)
    if started_s is not None:
        return min(started_s, world.now_s)
    if name in world.snapshot.applied and world.snapshot.applied[name][0] is not None:
        return None
    status = deployment.status
    if status.update_revision == update:
        reason = next((each.reason for each in status.conditions if each.type == "Progressing"), "")
        if reason == COMPLETE:
            return None
        if reason == "DeadlineExceeded":
            return world.now_s - int(deployment.spec.rollout.progress_deadline_s)
    return world.now_s
