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
from naru_proto.crd.model_residency import ScalingSpec
from naru_proto.crd.model_traffic import RoutingSpec, TenancySpec
from naru_proto.crd.units import unix_s_of
from naru_proto.crd.v1alpha1 import ModelDeployment, ModelDeploymentSpec, WorkerPool

_NEVER_S = float("inf")
_PLAIN_SCALING, _PLAIN_ROUTING, _PLAIN_TENANCY = ScalingSpec(), RoutingSpec(), TenancySpec()


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


@dataclass(frozen=True, slots=True)
class _Claimant:
    """An object that wants names."""

    key: ObjectKey
    created_s: float
    was_accepted: bool
    is_unchanged: bool
    """Its spec is the one that was accepted."""
    alias: str | None


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
) -> dict[ObjectKey, Claim]:
    """Every ModelDeployment's claim, in key order. ``pools``: those that own their name; deleted ones have no claim.

    An object that cannot be read (``invalid``, with why) is refused and keeps its own name.
    """
    living = {key_of(each): each for each in deployments if each.metadata.deletion_timestamp is None}
    claimants = [_claimant(key, each) for key, each in living.items()]
    claimants += [_unreadable(key, raw.get(key, {})) for key in invalid]
    owners = _owners(claimants)
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


def unused_fields(spec: ModelDeploymentSpec) -> tuple[str, ...]:
    """Fields that are set and that nothing acts on yet."""
    fields = (
        ("spec.replicas.max", spec.replicas.max is not None),
        ("spec.scaling", spec.scaling != _PLAIN_SCALING),
        ("spec.routing", spec.routing != _PLAIN_ROUTING),
        ("spec.tenancy", spec.tenancy != _PLAIN_TENANCY),
    )
    return tuple(name for name, is_set in fields if is_set)


def _judge(
    deployment: ModelDeployment, key: ObjectKey, owners: Mapping[str, ObjectKey], pools: Mapping[str, WorkerPool]
) -> Claim:
    owns_name = owners[key.name] == key
    for name in deployment.served_names:
        if owners[name] != key:
            field = "metadata.name" if name == key.name else "spec.alias"
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
    unused = unused_fields(deployment.spec)
    note = f"; nothing acts on {', '.join(unused)} yet" if unused else ""
    return Claim(key, True, "Accepted", f"its names are its own and pools can load it{note}", True, eligible.pools)


def _unsupported(spec: RevisionSpec) -> Eligible | None:
    """What no worker of this version can do, whatever the pools offer."""
    if spec.adapters:
        return Eligible((), "UnsupportedField", "spec.adapters: workers load no adapters yet; leave them out")
    count = spec.resources.tensor_parallel
    if count > 1:
        message = f"spec.resources.tensorParallel is {count}: a worker loads a model onto one accelerator; write 1"
        return Eligible((), "UnsupportedField", message)
    return None


def _owners(claimants: list[_Claimant]) -> dict[str, ObjectKey]:
    """Names with their owners. Who loses its own name takes no alias from others either."""
    owners: dict[str, ObjectKey] = {}
    by_age = sorted(claimants, key=lambda each: (each.created_s, each.key))
    # No edit of an older object takes the name of one that is served.
    for claimant in (each for each in by_age if each.was_accepted):
        owners.setdefault(claimant.key.name, claimant.key)
    for claimant in sorted(by_age, key=lambda each: not (each.was_accepted and each.is_unchanged)):
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
