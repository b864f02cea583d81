"""The registry's records of ModelDeployments: an entry that clients ask for, and one record for each revision. Pure.

An entry's target always names a record that stands in the registry after the same write. Called by the plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping

from naru_operator.core.generations import desired_digest
from naru_operator.core.model_plan import Applied
from naru_operator.core.models.fleet import Fleet
from naru_operator.core.models.intent import Intent, Wanted
from naru_operator.core.record_parts import with_parts
from naru_operator.core.traffic import Traffic, traffic_in, traffic_of
from naru_proto import names
from naru_proto.registry import ModelRecord


def records_to_put(
    intents: Iterable[Intent],
    records: Mapping[str, ModelRecord],
    applied: Mapping[str, Applied],
    aliases: Mapping[str, str],
    reasons: list[str],
    *,
    now_s: int,
) -> tuple[ModelRecord, ...]:
    """Records that are new or changed, a revision's before the entry that leads to it.

    ``aliases``: those that belong to somebody, and all own names, with the ModelDeployment that answers to each now. A
    line for each record is appended to `reasons`.
    """
    puts: list[ModelRecord] = []
    for intent in intents:
        revisions: dict[str, ModelRecord] = {}
        for wanted in intent.wanted:
            record = _revision_record(intent, wanted, records, applied, now_s)
            if record is not None:
                revisions[record.name] = record
        puts += [record for record in revisions.values() if record != records.get(record.name)]
        target = names.revision_name(intent.claim.key.name, intent.target) if intent.target else ""
        serving = revisions.get(target) or records.get(target)
        if serving is not None:
            puts += _changed(_entry_record(intent, serving, records, aliases, now_s), records)
    for record in puts:
        old = records.get(record.name)
        what = f"to {record.target!r}" if record.target else f"in generation {record.generation}"
        reasons.append(f"register {record.name!r} {what}: {'it changed' if old else 'it is new'}")
    return tuple(puts)


def records_to_delete(
    records: Iterable[str], entries: Collection[str], kept: Collection[str], fleet: Fleet, reasons: list[str]
) -> tuple[str, ...]:
    """Entries that no object stands for, and revisions that are not in `kept` and that no worker holds any more.

    A line for each is appended to `reasons`.
    """
    deletes = []
    for name in sorted(records):
        is_entry = names.base_name(name) == name
        if (name not in entries) if is_entry else (name not in kept and not fleet.has(name)):
            deletes.append(name)
            reasons.append(f"forget {name!r}: " + ("nothing serves it" if is_entry else "nobody wants or holds it"))
    return tuple(deletes)


def _revision_record(
    intent: Intent,
    wanted: Wanted,
    records: Mapping[str, ModelRecord],
    applied: Mapping[str, Applied],
    now_s: int,
) -> ModelRecord | None:
    old = records.get(wanted.name)
    model, generation = applied.get(wanted.name, (None, 0))
    if model is None or intent.deployment is None:
        return old
    record = ModelRecord(
        name=wanted.name,
        uri=model.uri,
        generation=generation,
        revision=model.revision,
        min_replicas=intent.deployment.spec.replicas.min,
        created_s=_created_s(intent, old, now_s),
        on_demand=model.is_on_demand,
        pools=old.pools if wanted.is_frozen and old is not None else wanted.pools,
        is_revision=True,
        desired_digest=desired_digest(model),
    )
    return with_parts(record, _traffic(intent, old), model.scaling)


def _entry_record(
    intent: Intent,
    serving: ModelRecord,
    records: Mapping[str, ModelRecord],
    aliases: Mapping[str, str],
    now_s: int,
) -> ModelRecord:
    name = intent.claim.key.name
    old = records.get(name)
    own = [alias for alias, model in aliases.items() if model == name and alias != name]
    if old is not None and (intent.deployment is None or not intent.claim.is_accepted):
        # What it served before goes on, but for what is another's by now.
        own += [alias for alias in old.aliases if alias not in aliases]
    record = dataclasses.replace(
        serving,
        name=name,
        generation=0,
        aliases=tuple(sorted(own)),
        created_s=_created_s(intent, old, now_s),
        target=serving.name,
        is_revision=False,
        desired_digest="",
    )
    return with_parts(record, _traffic(intent, old or serving))


def _traffic(intent: Intent, before: ModelRecord | None) -> Traffic:
    """What the object says; of one that is refused, what was said before goes on."""
    if before is not None and (intent.deployment is None or not intent.claim.is_accepted):
        return traffic_in(before)
    assert intent.deployment is not None, "of an object that cannot be read there is a record, or nothing is written"
    return traffic_of(intent.deployment.spec)


def _changed(record: ModelRecord, records: Mapping[str, ModelRecord]) -> list[ModelRecord]:
    """The entry, counted one further, if it differs from the one that stands."""
    old = records.get(record.name)
    before = old.generation if old is not None else 0
    if old is not None and dataclasses.replace(record, generation=before) == old:
        return []
    return [dataclasses.replace(record, generation=before + 1)]


def _created_s(intent: Intent, old: ModelRecord | None, now_s: int) -> int:
    created = intent.deployment.metadata.creation_timestamp if intent.deployment is not None else None
    if created is not None:
        return int(created.timestamp())
    return old.created_s if old is not None else now_s
