"""What to do next for all ModelDeployments: `plan_models(snapshot)` returns the steps with their reasons. Pure.

Called by the control loop, which carries the steps out and calls again. Planning twice from the state that a plan leads
to gives no steps, and nothing but the snapshot counts: an operator that starts anew goes on where another one was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

from naru_operator.core.desired import DRAIN_TIMEOUT_S
from naru_operator.core.generations import next_generations
from naru_operator.core.kube import Object, ObjectKey
from naru_operator.core.model_plan import Applied
from naru_operator.core.model_steps import load_steps, unload_steps
from naru_operator.core.models.aliases import Aliases, raised_for_aliases, settle_aliases
from naru_operator.core.models.claims import ALIAS_WAITS, Claim, judge, key_of, pool_owners
from naru_operator.core.models.copies import Copies, settle_copies
from naru_operator.core.models.fleet import Fleet, revisions_by_model
from naru_operator.core.models.intent import Intent, World, make_intent
from naru_operator.core.models.model import ModelsPlan, ModelsSnapshot, Verdict
from naru_operator.core.models.records import records_to_delete, records_to_put
from naru_operator.core.models.revision import (
    Revision,
    build_revision,
    object_name,
    read_revision,
    revision_spec,
    surplus_revisions,
)
from naru_operator.core.models.rollout import COMPLETE
from naru_proto import names
from naru_proto.crd.v1alpha1 import WorkerPool


def plan_models(snapshot: ModelsSnapshot, *, now_s: int) -> ModelsPlan:
    """The steps from what is seen to what the objects ask for; ``now_s`` is in Unix seconds."""
    reasons: list[str] = []
    pools, _ = pool_owners(snapshot.pools)
    claims = judge(snapshot.deployments, snapshot.invalid, snapshot.raw, pools, snapshot.records)
    world = _world(snapshot, pools, now_s)
    history = _history(snapshot.revisions)
    intents = _intents(claims, history, world)
    aliases = settle_aliases(intents, snapshot.records, world.fleet)
    intents = raised_for_aliases(intents, aliases)
    creates = _revisions_to_create(intents, history, snapshot, reasons)
    removals = _revisions_to_delete(intents, history, snapshot, reasons)
    copies = settle_copies(intents, world)
    applied = _generations(intents, world)
    puts = records_to_put(intents, snapshot.records, applied, _answering(intents, aliases), reasons, now_s=now_s)
    entries = {intent.claim.key.name for intent in intents if intent.target}
    deletes = records_to_delete(snapshot.records, entries, _kept_records(intents), world.fleet, reasons)
    takers = {worker_id: worker.models for worker_id, worker in world.fleet.staying.items()}
    drain_s = _drain_timeouts(world)
    unloads = unload_steps(takers, applied, copies.placement, drain_s, reasons, kept=copies.kept, known=copies.known)
    loads = load_steps(takers, applied, copies.placement, reasons, raised=copies.raised, known=copies.known)
    return ModelsPlan(
        create_revisions=creates,
        delete_revisions=removals,
        put_records=puts,
        delete_records=deletes,
        unload_models=unloads,
        load_models=loads,
        applied=applied,
        started_s=copies.retired_s | _started(intents),
        verdicts=_verdicts(claims, intents, copies, aliases, world),
        reasons=tuple(reasons),
    )


def _world(snapshot: ModelsSnapshot, pools: Mapping[str, WorkerPool], now_s: int) -> World:
    fleet = Fleet(snapshot.workers, snapshot.failed)
    num_staying: dict[str, int] = {}
    for worker in fleet.staying.values():
        num_staying[worker.record.pool] = num_staying.get(worker.record.pool, 0) + 1
    return World(snapshot, fleet, pools, num_staying, revisions_by_model(fleet.names), now_s)


def _history(revisions: Iterable[Object]) -> dict[str, list[Revision]]:
    """Owner's uid to its revisions."""
    history: dict[str, list[Revision]] = {}
    for raw in revisions:
        revision = read_revision(raw)
        if revision is not None:
            history.setdefault(revision.owner_uid, []).append(revision)
    return history


def _uid(snapshot: ModelsSnapshot, key: ObjectKey) -> str:
    metadata = snapshot.raw.get(key, {}).get("metadata")
    uid = metadata.get("uid") if isinstance(metadata, dict) else None
    return uid if isinstance(uid, str) else ""


def _intents(claims: Mapping[ObjectKey, Claim], history: Mapping[str, list[Revision]], world: World) -> list[Intent]:
    living = {key_of(each): each for each in world.snapshot.deployments}
    return [
        make_intent(
            claim,
            None if key in world.snapshot.invalid else living[key],
            history.get(_uid(world.snapshot, key), ()),
            world,
        )
        for key, claim in claims.items()
        if claim.owns_name
    ]


def _revisions_to_create(
    intents: Iterable[Intent], history: Mapping[str, list[Revision]], snapshot: ModelsSnapshot, reasons: list[str]
) -> tuple[Object, ...]:
    taken = {_place(raw) for raw in snapshot.revisions}
    creates = []
    for intent in intents:
        key, uid = intent.claim.key, _uid(snapshot, intent.claim.key)
        own = history.get(uid, ())
        # An object of that name that is not ours, or is not what it says, is left alone: then there is no undo to it.
        is_taken = (key.namespace, object_name(key.name, intent.update)) in taken
        if intent.deployment is None or not intent.claim.is_accepted or not uid or is_taken:
            continue
        if all(each.digest != intent.update for each in own):
            number = max((each.number for each in own), default=0) + 1
            creates.append(build_revision(snapshot.raw[key], revision_spec(intent.deployment.spec), number))
            reasons.append(f"keep revision {intent.update} of {str(key)!r} as number {number}: its spec is new")
    return tuple(creates)


def _revisions_to_delete(
    intents: Iterable[Intent], history: Mapping[str, list[Revision]], snapshot: ModelsSnapshot, reasons: list[str]
) -> tuple[ObjectKey, ...]:
    deletes: list[ObjectKey] = []
    for intent in intents:
        own = history.get(_uid(snapshot, intent.claim.key), ())
        if intent.deployment is None or not own:
            continue
        limit = intent.deployment.spec.rollout.history_limit
        kept = {intent.target, intent.update, *(wanted.digest for wanted in intent.wanted)}
        if len(own) <= limit:
            continue
        surplus = surplus_revisions(own, kept, limit)
        deletes += surplus
        reasons += [f"delete revision {str(key)!r}: rollout.historyLimit is {limit}" for key in surplus]
    return tuple(deletes)


def _place(raw: Object) -> tuple[object, object]:
    metadata = raw.get("metadata")
    return (metadata.get("namespace"), metadata.get("name")) if isinstance(metadata, dict) else (None, None)


def _generations(intents: Iterable[Intent], world: World) -> dict[str, Applied]:
    models = [wanted.model for intent in intents for wanted in intent.wanted if wanted.model is not None]
    snapshot = world.snapshot
    return next_generations(models, snapshot.records, snapshot.applied, snapshot.refused, world.fleet.generations())


def _answering(intents: Iterable[Intent], aliases: Aliases) -> dict[str, str]:
    """Names with the ModelDeployment that answers to each: its own, and aliases that belong to somebody."""
    return dict(aliases.serving) | {intent.claim.key.name: intent.claim.key.name for intent in intents}


def _kept_records(intents: Iterable[Intent]) -> set[str]:
    kept = {wanted.name for intent in intents for wanted in intent.wanted}
    return kept | {names.revision_name(intent.claim.key.name, intent.target) for intent in intents if intent.target}


def _started(intents: Iterable[Intent]) -> dict[str, int]:
    return {
        names.revision_name(intent.claim.key.name, intent.update): intent.rollout.started_s
        for intent in intents
        if intent.rollout is not None and intent.rollout.started_s is not None
    }


def _drain_timeouts(world: World) -> Callable[[str], float]:
    def timeout_s(worker_id: str) -> float:
        pool = world.pools.get(world.fleet.staying[worker_id].record.pool)
        return pool.spec.drain_timeout_s if pool is not None else DRAIN_TIMEOUT_S

    return timeout_s


def _verdicts(
    claims: Mapping[ObjectKey, Claim], intents: Iterable[Intent], copies: Copies, aliases: Aliases, world: World
) -> dict[ObjectKey, Verdict]:
    verdicts = {
        claim.key: Verdict(claim.key, False, claim.reason, claim.message, rollout_reason="NotAccepted")
        for claim in claims.values()
    }
    for intent in intents:
        verdict = _verdict(intent, copies, world)
        wait = aliases.waiting.get(verdict.key, "")
        verdicts[verdict.key] = dataclasses.replace(verdict, reason=ALIAS_WAITS, message=wait) if wait else verdict
    return verdicts


def _verdict(intent: Intent, copies: Copies, world: World) -> Verdict:
    claim, rollout, deployment = intent.claim, intent.rollout, intent.deployment
    name = names.revision_name(claim.key.name, intent.update)
    by_digest = {wanted.digest: wanted for wanted in intent.wanted}
    serving = by_digest.get(intent.target) or by_digest.get(intent.update)
    is_on_demand = serving is not None and serving.num_copies is None
    is_up = any(copy.is_up for wanted in intent.wanted for copy in world.fleet.copies(wanted.name))
    num_desired = deployment.spec.replicas.min if deployment is not None else 0
    return Verdict(
        key=claim.key,
        is_accepted=claim.is_accepted,
        reason=claim.reason,
        message=claim.message,
        current="" if _is_first(intent, world) else intent.target,
        update=intent.update,
        rollout_reason=rollout.reason if rollout is not None else "NotAccepted",
        rollout_message=_rollout_message(intent, name, copies),
        has_rollout_failed=rollout is not None and rollout.has_failed,
        placed_on=copies.placement.get(name, ()) if claim.is_accepted else (),
        num_desired=int(is_up) if is_on_demand else num_desired,
        pools=claim.pools,
        is_on_demand=is_on_demand,
    )


def _rollout_message(intent: Intent, name: str, copies: Copies) -> str:
    """Without the numbers of the moment, which would be news at each look."""
    if intent.rollout is None:
        return intent.claim.message
    is_without_room = name in copies.unplaced and intent.rollout.reason in ("WaitingForCopies", "DeadlineExceeded")
    return intent.rollout.message + ("; no worker has room for a further copy" if is_without_room else "")


def _is_first(intent: Intent, world: World) -> bool:
    """Whether no revision has served yet."""
    if intent.rollout is None or intent.deployment is None or intent.deployment.status.current_revision is not None:
        return False
    target = names.revision_name(intent.claim.key.name, intent.target)
    return intent.rollout.reason != COMPLETE and world.fleet.num_ready(target) == 0
