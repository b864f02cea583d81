"""Which ModelDeployments and WorkerPools are accepted: every served name and every pool name has one owner. Pure.

One installation serves one space of names over all namespaces. Who had a name accepted keeps it; else the oldest object
has it. Called by the plan; the pools' control asks for `pool_owners` too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from naru_operator.core.kube import Object, ObjectKey
from naru_operator.core.models.revision import RevisionSpec, revision_spec
from naru_operator.core.models.sources import Eligible, eligible_pools
from naru_proto.crd.units import unix_s_of
from naru_proto.crd.v1alpha1 import ModelDeployment, WorkerPool
from naru_proto.registry import ModelRecord

ALIAS_WAITS = "AliasWaits"
"""Reason of an Accepted condition: all but the alias is as asked for."""
_NEVER_S = float("inf")


@dataclass(frozen=True, slots=True)
class Claim:
    """One ModelDeployment's claim to be served."""

    key: ObjectKey
    is_accepted: bool
    reason: str
    """CamelCase word of the Accepted condition."""
    message: str
    owns_name: bool
    """Whether the registry's entry under its own name is its own; what it served before goes on then."""
    pools: tuple[str, ...] = ()
    """Pools whose workers may hold the revision it asks for."""
    owns_alias: bool = True
    """Whether its alias, if it has one, is to be its own; False: another one has it and has not given it up."""


@dataclass(frozen=True, slots=True)
class _Claimant:
    """An object that wants names."""

    key: ObjectKey
    created_s: float
    was_accepted: bool
    is_unchanged: bool
    """Its spec is the one that was accepted."""
    alias: str | None
    was_waiting: bool = False
    """It was accepted but for its alias."""


def pool_owners(pools: Iterable[WorkerPool]) -> tuple[dict[str, WorkerPool], dict[ObjectKey, str]]:
    """Pool names with the pool each belongs to, the oldest; and the other pools with what to say of the conflict.

    A pool that is being deleted owns no name.
    """
    owners: dict[str, WorkerPool] = {}
    conflicts: dict[ObjectKey, str] = {}
    for pool in sorted((each for each in pools if each.metadata.deletion_timestamp is None), key=_pool_order):
        owner = owners.setdefault(pool.metadata.name, pool)
        if owner is not pool:
            conflicts[ObjectKey(pool.metadata.namespace, pool.metadata.name)] = (
                f"the name {pool.metadata.name!r} belongs to the WorkerPool in namespace "
                f"{owner.metadata.namespace!r}, which is older; rename this one"
            )
    return owners, conflicts


def judge(
    deployments: Iterable[ModelDeployment],
    invalid: Mapping[ObjectKey, str],
    raw: Mapping[ObjectKey, Object],
    pools: Mapping[str, WorkerPool],
    records: Mapping[str, ModelRecord],
) -> dict[ObjectKey, Claim]:
    """Every ModelDeployment's claim, in key order. ``pools``: those that own their name; deleted ones have no claim.

    An object that cannot be read (``invalid``, with why) is refused and keeps its own name. ``records`` is the
    registry: who answers to an alias keeps it for as long as its spec has it.
    """
    living = {key_of(each): each for each in deployments if each.metadata.deletion_timestamp is None}
    claimants = [_claimant(key, each) for key, each in living.items()]
    claimants += [_unreadable(key, raw.get(key, {})) for key in invalid]
    owners = _owners(claimants, records)
    claims = {}
    for claimant in claimants:
        key = claimant.key
        owns_name = owners[key.name] == key
        if key in invalid:
            claims[key] = Claim(key, False, "InvalidSpec", _cannot_be_read(invalid[key]), owns_name)
        else:
            claims[key] = _judge(living[key], key, owners, pools)
    return dict(sorted(claims.items()))


def key_of(deployment: ModelDeployment) -> ObjectKey:
    """The key of a parsed object."""
    return ObjectKey(deployment.metadata.namespace, deployment.metadata.name)


def _judge(
    deployment: ModelDeployment, key: ObjectKey, owners: Mapping[str, ObjectKey], pools: Mapping[str, WorkerPool]
) -> Claim:
    owns_name, alias = owners[key.name] == key, deployment.spec.alias
    for field, name in (("metadata.name", key.name), ("spec.alias", alias)):
        # Another's alias is waited for; another's own name it keeps for as long as it is there.
        if name is not None and owners[name] != key and (name == key.name or owners[name].name == name):
            message = (
                f"{field} {name!r} is already a name of ModelDeployment {owners[name]}, and one name is served once "
                "over all namespaces; choose another one"
            )
            return Claim(key, False, "NameConflict", message, owns_name)
    spec = revision_spec(deployment.spec)
    eligible = eligible_pools(spec, deployment.spec.placement.pool_selector.match_labels, pools)
    refused = eligible if eligible.reason else _unsupported(spec) or eligible
    if refused.reason:
        return Claim(key, False, refused.reason, refused.message, owns_name)
    if alias is not None and owners[alias] != key:
        message = (
            f"the alias {alias!r} is ModelDeployment {owners[alias]}'s; take it out there, and it moves here once as "
            "many copies are ready here"
        )
        return Claim(key, True, ALIAS_WAITS, message, True, eligible.pools, owns_alias=False)
    return Claim(key, True, "Accepted", "its names are its own and pools can load it", True, eligible.pools)


def _unsupported(spec: RevisionSpec) -> Eligible | None:
    """What no worker of this version can do, whatever the pools offer."""
    if spec.adapters:
        return Eligible((), "UnsupportedField", "spec.adapters: workers load no adapters yet; leave them out")
    return None


def _owners(claimants: list[_Claimant], records: Mapping[str, ModelRecord]) -> dict[str, ObjectKey]:
    """Names with their owners. Who loses its own name takes no alias from others either."""
    owners: dict[str, ObjectKey] = {}
    by_age = sorted(claimants, key=lambda each: (each.created_s, each.key))
    # No edit of an older object takes the name of one that is served.
    for claimant in (each for each in by_age if each.was_accepted):
        owners.setdefault(claimant.key.name, claimant.key)
    served = {(name, alias) for name, record in records.items() for alias in record.aliases if not record.is_revision}
    for claimant in sorted(
        by_age,
        key=lambda each: (
            (each.key.name, each.alias) not in served,
            not (each.was_accepted and each.is_unchanged and not each.was_waiting),
        ),
    ):
        if owners.setdefault(claimant.key.name, claimant.key) == claimant.key and claimant.alias is not None:
            owners.setdefault(claimant.alias, claimant.key)
    return owners


def _claimant(key: ObjectKey, deployment: ModelDeployment) -> _Claimant:
    metadata, status = deployment.metadata, deployment.status
    created = metadata.creation_timestamp
    accepted = next((each for each in status.conditions if each.type == "Accepted"), None)
    return _Claimant(
        key,
        created.timestamp() if created is not None else _NEVER_S,
        accepted is not None and accepted.status == "True",
        status.observed_generation == metadata.generation,
        deployment.spec.alias,
        accepted is not None and accepted.reason == ALIAS_WAITS,
    )


def _unreadable(key: ObjectKey, raw: Object) -> _Claimant:
    metadata, status = _mapping(raw.get("metadata")), _mapping(raw.get("status"))
    try:
        created_s = unix_s_of(metadata.get("creationTimestamp"))
    except ValueError:
        created_s = _NEVER_S
    return _Claimant(key, created_s, bool(status.get("currentRevision")), False, None)


def _cannot_be_read(why: str) -> str:
    return f"its spec cannot be read: {why}; what it served before goes on"


def _pool_order(pool: WorkerPool) -> tuple[float, str, str]:
    created = pool.metadata.creation_timestamp
    created_s = created.timestamp() if created is not None else _NEVER_S
    return created_s, pool.metadata.namespace, pool.metadata.name


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}
