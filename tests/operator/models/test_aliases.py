"""An alias changes hands without a gap: it moves when as many copies of the new model are ready, and a status tells."""

from __future__ import annotations

from typing import Any

from model_world import World, raw_model

from naru_operator.core.kube import ObjectKey
from naru_operator.core.models.changes import model_events

OLD, NEW = ObjectKey("default", "old"), ObjectKey("default", "new")


def holders(world: World, alias: str = "chat") -> list[str]:
    return [name for name, record in sorted(world.records.items()) if alias in record.aliases]


def told(world: World, key: ObjectKey = NEW) -> tuple[str, str]:
    verdict = world.plan().verdicts[key]
    assert verdict.is_accepted
    return verdict.reason, verdict.message


def world_with(num_workers: int = 2, copies: int = 2, **new: Any) -> World:
    """`old` has the alias, `new` wants it and is loaded."""
    world = World(**{f"p_{index}": "p" for index in range(num_workers)})
    world.apply(raw_model("old", alias="chat", replicas={"min": copies}))
    world.settle()
    world.apply(raw_model("new", alias="chat", **new))
    world.settle()
    return world


def test_an_alias_moves_when_it_is_given_up_and_as_many_copies_are_ready() -> None:
    world = world_with(replicas={"min": 1})
    assert holders(world) == ["old"]
    assert told(world) == (
        "AliasWaits",
        "the alias 'chat' is ModelDeployment default/old's; take it out there, and it moves here once as many copies "
        "are ready here",
    )
    world.edit("old", alias=None)
    world.settle()
    assert holders(world) == ["old"]
    assert told(world)[1] == (
        "the alias 'chat' moves here from ModelDeployment default/old when as many copies are ready: 1 of 2"
    )
    world.edit("new", replicas={"min": 2})
    seen = []
    for _ in range(10):
        world.turn()
        seen.append(holders(world))
        world.advance()
    assert all(len(each) == 1 for each in seen) and (seen[0], seen[-1]) == (["old"], ["new"])
    assert told(world)[0] == "Accepted"
    assert world.plan().is_empty


def test_an_operator_that_starts_anew_remembers_who_waits() -> None:
    world = world_with(replicas={"min": 1})
    world.edit("old", alias=None)
    world.settle()
    world.restart_operator()
    world.settle()
    assert holders(world) == ["old"] and told(world)[0] == "AliasWaits"


def test_taking_the_wish_back_leaves_the_alias_where_it_is() -> None:
    world = world_with(replicas={"min": 1})
    world.edit("old", alias=None)
    world.turn()
    world.edit("old", alias="chat")
    world.settle()
    assert holders(world) == ["old"] and told(world, OLD)[0] == "Accepted"
    world.edit("new", alias=None)
    world.settle()
    assert holders(world) == ["old"]


def test_an_alias_that_nobody_wants_any_more_goes_at_once() -> None:
    world = world_with()
    world.edit("new", alias=None)
    world.edit("old", alias=None)
    world.turn()
    assert holders(world) == []


def test_when_the_holder_is_deleted_the_next_one_has_it_at_once() -> None:
    world = world_with(replicas={"min": 1})
    world.delete(OLD)
    world.turn()
    assert holders(world) == ["new"]


def test_a_holder_without_a_ready_copy_keeps_nothing() -> None:
    world = world_with(num_workers=1, copies=1, model={"uri": "pypi://bad"})
    for worker in world.workers.values():
        for name in list(worker.models):
            if name.startswith("old@"):
                worker.models[name].state = "known"
    world.edit("old", alias=None)
    world.turn()
    assert holders(world) == ["new"]


def test_a_model_on_demand_brings_up_the_copies_that_its_alias_waits_for() -> None:
    world = world_with(residency={"policy": "OnDemand"})
    assert set(world.states(world.target("new")).values()) == {"known"}
    world.edit("old", alias=None)
    world.settle()
    assert holders(world) == ["new"]
    assert list(world.states(world.target("new")).values()) == ["ready", "ready"]


def test_two_models_exchange_their_aliases() -> None:
    world = World(p_0="p")
    world.apply(raw_model("a", alias="x"))
    world.apply(raw_model("b", alias="y"))
    world.settle()
    world.edit("a", alias="y")
    world.edit("b", alias="x")
    world.settle()
    assert (holders(world, "x"), holders(world, "y")) == (["b"], ["a"])


def test_a_holder_that_cannot_be_read_keeps_its_alias_while_it_is_there() -> None:
    world = world_with(replicas={"min": 2})
    world.invalid[OLD] = "spec.model.uri: bad"
    world.settle()
    assert holders(world) == ["old"]
    assert told(world) == (
        "AliasWaits", "the alias 'chat' is ModelDeployment default/old's, whose spec cannot be read"
    )  # fmt: skip
    world.delete(OLD)
    world.settle()
    assert holders(world) == ["new"]


def test_waiting_and_moving_are_told_as_events() -> None:
    world = world_with(replicas={"min": 1})
    waiting = world.statuses[NEW]
    accepted = next(each for each in waiting.conditions if each.type == "Accepted")
    assert (accepted.status, accepted.reason) == ("True", "AliasWaits")
    world.edit("old", alias=None)
    world.edit("new", replicas={"min": 2})
    world.settle()
    moved = world.statuses[NEW]
    assert ("AliasMoved", False) in [(event.reason, event.is_warning) for event in model_events(NEW, waiting, moved)]
