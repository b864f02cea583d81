"""Which ModelDeployment answers to each alias now: one that changes hands moves when as many copies are ready. Pure.

Who should have an alias is the claims' decision. Who has it is in the registry, so that nothing is forgotten with the
operator. Called by the plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from naru_operator.core.kube import ObjectKey
from naru_operator.core.models.fleet import Fleet
from naru_operator.core.models.intent import Intent
from naru_proto import names
from naru_proto.registry import ModelRecord


@dataclass(frozen=True, slots=True)
class Aliases:
    """Of all ModelDeployments."""

    serving: Mapping[str, str] = field(default_factory=dict)
    """Alias that somebody should have to the model that answers to it now."""
    waiting: Mapping[ObjectKey, str] = field(default_factory=dict)
    """Who is to get one, and what that waits for."""
    needed: Mapping[ObjectKey, int] = field(default_factory=dict)
    """Of these, the copies that should be ready."""


def settle_aliases(intents: Iterable[Intent], records: Mapping[str, ModelRecord], fleet: Fleet) -> Aliases:
    """Decides for all at once: two models may exchange theirs."""
    by_name = {intent.claim.key.name: intent for intent in intents}
    holders = _holders(records, by_name)
    serving: dict[str, str] = {}
    waiting: dict[ObjectKey, str] = {}
    needed: dict[ObjectKey, int] = {}
    for name, owner in sorted(by_name.items()):
        alias = owned_alias(owner)
        if alias is None:
            continue
        holder = holders.get(alias, name)
        serving[alias] = name
        if holder == name:
            continue
        key, other = owner.claim.key, by_name[holder]
        num_held, num_own = _num_ready(other, fleet), _num_ready(owner, fleet)
        if other.deployment is None:
            serving[alias] = holder
            waiting[key] = f"the alias {alias!r} is ModelDeployment {other.claim.key}'s, whose spec cannot be read"
        elif num_held > num_own:
            serving[alias] = holder
            needed[key] = num_held
            waiting[key] = (
                f"the alias {alias!r} moves here from ModelDeployment {other.claim.key} when as many copies are ready: "
                f"{num_own} of {num_held}"
            )
    return Aliases(serving, waiting, needed)


def owned_alias(intent: Intent) -> str | None:
    """The alias an object should have."""
    if intent.deployment is None or not intent.claim.is_accepted or not intent.claim.owns_alias:
        return None
    return intent.deployment.spec.alias


def raised_for_aliases(intents: Iterable[Intent], aliases: Aliases) -> list[Intent]:
    """The intents, where models on demand that wait for an alias bring up the copies it takes: no request will."""
    raised = []
    for intent in intents:
        count = aliases.needed.get(intent.claim.key, 0)
        wanted = tuple(
            dataclasses.replace(each, num_ahead=max(each.num_ahead, count))
            if count and each.digest == intent.target and each.num_copies is None
            else each
            for each in intent.wanted
        )
        raised.append(dataclasses.replace(intent, wanted=wanted))
    return raised


def _holders(records: Mapping[str, ModelRecord], by_name: Mapping[str, Intent]) -> dict[str, str]:
    """Alias to the model that answers to it by the registry, and still can."""
    holders: dict[str, str] = {}
    for name, record in sorted(records.items()):
        if record.is_revision or name not in by_name or not by_name[name].target:
            continue
        for alias in record.aliases:
            if alias not in by_name:
                holders.setdefault(alias, name)
    return holders


def _num_ready(intent: Intent, fleet: Fleet) -> int:
    return fleet.num_ready(names.revision_name(intent.claim.key.name, intent.target)) if intent.target else 0
