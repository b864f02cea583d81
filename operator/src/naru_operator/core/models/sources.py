"""Which pools can load a revision: labels, accelerators, and where its files come from. Pure.

Each need narrows the choice; the first that leaves no pool is the refusal, with its remedy. Called by the claims and
by the plan, which asks for the revision that serves as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from naru_operator.core.models.revision import RevisionSpec
from naru_proto.crd.v1alpha1 import WorkerPool

_MAX_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Eligible:
    """Pools whose workers may hold a revision, or why there are none."""

    pools: tuple[str, ...] = ()
    """In name order."""
    reason: str = ""
    """CamelCase word; empty: there are pools."""
    message: str = ""


@dataclass(frozen=True, slots=True)
class _Need:
    """Something that a pool must offer."""

    is_met: Callable[[WorkerPool], bool]
    reason: str
    message: str
    """`{pools}` stands for those that met all needs before."""


def eligible_pools(spec: RevisionSpec, selector: Mapping[str, str], pools: Mapping[str, WorkerPool]) -> Eligible:
    """Pools by name whose workers can load the revision; `pools` are the accepted ones."""
    chosen = {name: pool for name, pool in pools.items() if selector.items() <= pool.metadata.labels.items()}
    if not chosen:
        return Eligible((), "NoPool", _no_pool(selector, pools))
    for need in _needs(spec):
        meeting = {name: pool for name, pool in chosen.items() if need.is_met(pool)}
        if not meeting:
            return Eligible((), need.reason, need.message.replace("{pools}", _shown(sorted(chosen))))
        chosen = meeting
    return Eligible(tuple(sorted(chosen)))


def _needs(spec: RevisionSpec) -> Iterable[_Need]:
    count = spec.resources.tensor_parallel
    if count > 1:
        yield _Need(
            lambda pool: pool.spec.accelerator.num_accelerators >= count,
            "TooFewAccelerators",
            f"spec.resources.tensorParallel is {count}, and no worker of the pools {{pools}} has so many accelerators; "
            "raise accelerator.count of one of kind cuda or lower tensorParallel (workers of kind cpu cut no model)",
        )
    secret = spec.model.credentials_secret
    if secret is not None:
        yield _Need(
            lambda pool: secret in pool.spec.credential_secrets,
            "CredentialsNotMounted",
            f"none of the pools {{pools}} has the Secret {secret!r} among its credentialSecrets; add it to one of them "
            "or correct spec.model.credentialsSecret",
        )
    scheme, _, location = spec.model.uri.partition("://")
    if scheme == "pvc":
        claim = location.partition("/")[0]
        yield _Need(
            lambda pool: claim in pool.spec.claims,
            "ClaimNotMounted",
            f"none of the pools {{pools}} has the PersistentVolumeClaim {claim!r} among its claims; add it to one of "
            "them or correct spec.model.uri",
        )
    if scheme == "file":
        path = _segments(location)
        yield _Need(
            lambda pool: any(path[: len(_segments(folder))] == _segments(folder) for folder in pool.spec.node_folders),
            "FolderNotMounted",
            "none of the pools {pools} has a folder among its nodeFolders that holds the path of spec.model.uri; add "
            "the folder to one of them or use another source",
        )


def _segments(path: str) -> list[str]:
    return [segment for segment in path.split("/") if segment not in ("", ".")]


def _no_pool(selector: Mapping[str, str], pools: Mapping[str, WorkerPool]) -> str:
    if not pools:
        return "there is no WorkerPool; apply one"
    wanted = ", ".join(f"{key}={value}" for key, value in sorted(selector.items()))
    has = [f"{name} has {_labels(pool)}" for name, pool in sorted(pools.items())]
    more = f" and {len(has) - _MAX_SHOWN} more" if len(has) > _MAX_SHOWN else ""
    return (
        f"no WorkerPool has the labels {wanted} of spec.placement.poolSelector ({'; '.join(has[:_MAX_SHOWN])}{more}); "
        "add them to one, or change the selector"
    )


def _labels(pool: WorkerPool) -> str:
    labels = sorted(pool.metadata.labels.items())
    shown = ", ".join(f"{key}={value}" for key, value in labels[:_MAX_SHOWN])
    return (shown + (" and more" if len(labels) > _MAX_SHOWN else "")) or "none"


def _shown(items: list[str]) -> str:
    more = f" and {len(items) - _MAX_SHOWN} more" if len(items) > _MAX_SHOWN else ""
    return ", ".join(repr(item) for item in items[:_MAX_SHOWN]) + more
