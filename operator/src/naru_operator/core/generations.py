"""The number under which workers take a command: one further whenever what it stands for changes. Pure.

Workers refuse a generation older than they have seen, so one of a name never falls. Called by both plans.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping

from naru_operator.core.desired import DesiredModel, Tier
from naru_operator.core.model_plan import Applied
from naru_proto.registry import ModelRecord


@functools.lru_cache(maxsize=1 << 16)
def desired_digest(model: DesiredModel) -> str:
    """Identity of all that a generation stands for; equal in every process and version that knows the same fields."""
    told = dataclasses.asdict(model)
    del told["scaling"], told["traffic"]  # workers are not told of them
    text = json.dumps(told, sort_keys=True, separators=(",", ":"), default=_value)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def next_generations(
    models: Iterable[DesiredModel],
    records: Mapping[str, ModelRecord],
    applied: Mapping[str, Applied],
    refused: Mapping[str, int],
    held: Mapping[str, int] | None = None,
) -> dict[str, Applied]:
    """Each model's generation: one more than ever before under that name whenever anything of it changed.

    ``applied`` is what the last call returned; where it says nothing of a model, its record's `desired_digest` does.
    ``refused``: newest generations that workers named; ``held``: newest ones in leases. Models that are gone stay, as
    None.
    """
    held = held or {}
    result: dict[str, Applied] = {}
    for model in models:
        result[model.name] = (model, _generation(model, records.get(model.name), applied, refused, held))
    for name, (last, planned) in applied.items():
        if name not in result:
            generation = planned if last is None else planned + 1
            result[name] = (None, max(generation, refused.get(name, 0)))
    return result


def _generation(
    model: DesiredModel,
    record: ModelRecord | None,
    applied: Mapping[str, Applied],
    refused: Mapping[str, int],
    held: Mapping[str, int],
) -> int:
    last, planned = applied.get(model.name, (None, 0))
    if model.name not in applied and record is not None and record.desired_digest == desired_digest(model):
        last, planned = model, record.generation
    seen = max(planned, record.generation if record else 0)
    refused_generation, held_generation = refused.get(model.name, 0), held.get(model.name, 0)
    # What stands behind a generation of somebody else's is unknown: ours must be newer.
    if last == model and refused_generation <= planned and held_generation <= seen:
        return seen
    return max(seen, refused_generation, held_generation) + 1


def _value(item: object) -> object:
    if isinstance(item, Tier):
        return item.value
    raise TypeError(f"{item!r} has no place in a digest")
