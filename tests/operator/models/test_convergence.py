"""Whatever happens to objects, workers and the operator, models come to what is asked and requests are never let down.

Every turn is checked by the world itself: an entry leads to a record that exists, it never moves to fewer ready copies,
generations never fall, and workers that leave are left alone.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from model_world import Held, Worker, World, raw_model, raw_pool, revision_of, without_memory

from naru_operator.core.kube import ObjectKey
from naru_operator.core.model_plan import AT_REST, EVICTED, KNOWN
from naru_operator.core.models.plan import plan_models
from naru_proto import names

KEYS = [ObjectKey("x", "a"), ObjectKey("x", "b"), ObjectKey("y", "a")]
URIS = ["pypi://one", "pypi://two", "pypi://bad"]


@st.composite
def specs(draw: st.DrawFn) -> dict[str, Any]:
    policy = draw(st.sampled_from(["Preferred", "Preferred", "OnDemand", "Pinned"]))
    num_copies = draw(st.integers(1 if policy == "Pinned" else 0, 3))
    most = draw(st.sampled_from([max(1, num_copies), num_copies + 1, None]))
    spec: dict[str, Any] = {
        "model": {"uri": draw(st.sampled_from(URIS))},
        "replicas": {"min": num_copies, "max": most},
        "residency": {"policy": policy, "priority": draw(st.sampled_from([100, 200]))},
        "rollout": {"strategy": draw(st.sampled_from(["Surge", "Surge", "Recreate"])), "historyLimit": 1},
        "placement": {"poolSelector": {"matchLabels": draw(st.sampled_from([{}, {}, {"tier": "q"}]))}},
    }
    if draw(st.booleans()):
        spec["alias"] = draw(st.sampled_from(["a", "b", "c"]))
    return spec


ACTIONS = st.sampled_from(
    ["apply", "apply", "apply", "delete", "evict", "restart worker", "leave", "join", "request", "restart operator",
     "lose registry", "wait"]
)  # fmt: skip


def act(world: World, action: str, data: st.DataObject) -> None:
    match action:
        case "apply":
            key = data.draw(st.sampled_from(KEYS))
            spec = data.draw(specs())
            if spec.get("alias") == key.name:
                del spec["alias"]
            created_s = data.draw(st.integers(1_700_000_000, 1_700_000_002))
            world.apply(raw_model(key.name, key.namespace, created_s, **spec))
        case "delete" if world.objects:
            world.delete(data.draw(st.sampled_from(sorted(world.objects))))
        case "restart worker":
            worker = world.workers[data.draw(st.sampled_from(sorted(world.workers)))]
            worker.models.clear()
            worker.newest.clear()
        case "leave" if len(world.workers) > 1:
            worker_id = data.draw(st.sampled_from(sorted(world.workers)))
            if world.workers[worker_id].leaving:
                del world.workers[worker_id]
            else:
                world.workers[worker_id].leaving = True
        case "join":
            pool = data.draw(st.sampled_from(["p", "q"]))
            world.workers[f"{pool}-{len(world.workers)}-{world.now_s}"] = Worker(pool)
        case "evict" | "request":
            before, after = (("ready",), EVICTED) if action == "evict" else (AT_REST, "loading")
            for held in (held for worker in world.workers.values() for held in worker.models.values()):
                if held.state in before and data.draw(st.booleans()):
                    held.state = after
        case "restart operator":
            world.restart_operator()
        case "lose registry":
            world.records.clear()


def check_rest(world: World) -> None:
    assert world.plan().is_empty, world.plan().reasons
    assert plan_models(without_memory(world), now_s=world.now_s).is_empty
    wanted: set[str] = set()
    verdicts = world.plan().verdicts
    for key, verdict in verdicts.items():
        if not verdict.is_accepted:
            # What it served before goes on, if its name is still its own.
            if verdict.reason != "NameConflict" or verdict.current:
                wanted |= {names.revision_name(key.name, verdict.current)} if verdict.current else set()
            continue
        raw = world.objects[key]
        update, spec = revision_of(world, key.name, key.namespace), raw["spec"]
        wanted.add(update)
        target = world.target(key.name)
        wanted.add(target)
        selector = spec["placement"]["poolSelector"]["matchLabels"]
        eligible = {w for w, each in world.workers.items() if not selector or each.pool == "q"}
        if "bad" in spec["model"]["uri"] or not eligible:
            continue  # what served before goes on
        assert target == update, verdict
        states = world.states(update)
        if spec["residency"]["policy"] == "OnDemand" or spec["replicas"]["min"] == 0:
            assert set(states) >= eligible
        else:
            num_copies = min(spec["replicas"]["min"], len(eligible))
            copies = {worker_id for worker_id in eligible & states.keys() if states[worker_id] != KNOWN}
            may_grow = spec["replicas"].get("max") != spec["replicas"]["min"]
            # What requests and the keeper have brought up beside them is theirs.
            assert len(copies) >= num_copies if may_grow else len(copies) == num_copies
            assert set(states) >= eligible if may_grow else copies == set(states) & eligible
            assert set(verdict.placed_on) <= copies
            assert len(verdict.placed_on) == num_copies
    held = {name for worker in world.workers.values() for name in worker.models}
    assert held <= wanted
    assert {name for name, record in world.records.items() if record.is_revision} <= wanted
    entries = {name for name, record in world.records.items() if not record.is_revision}
    assert entries == {key.name for key, verdict in verdicts.items() if verdict.current or verdict.is_accepted}
    for key in world.objects:
        own = [r for r in world.revisions.values() if r["metadata"]["annotations"][names.ANNOTATION_MODEL_NAME] ==
               key.name and r["metadata"]["namespace"] == key.namespace]  # fmt: skip
        assert len(own) <= 3  # serves, wanted, and one earlier


@settings(max_examples=60, deadline=None)
@given(st.lists(ACTIONS, min_size=3, max_size=14), st.data())
def test_after_any_sequence_of_changes_models_rest_where_they_should(actions: list[str], data: st.DataObject) -> None:
    world = World(raw_pool("p"), raw_pool("q", {"tier": "q"}), p_0="p", p_1="p", q_0="q")
    world.is_uneven = True
    for action in ["apply", *actions]:
        act(world, action, data)
        for _ in range(data.draw(st.integers(0, 3))):
            world.turn()
            world.advance()
    for worker_id in [w for w, worker in world.workers.items() if worker.leaving]:
        del world.workers[worker_id]
    world.settle()
    check_rest(world)
    statuses = dict(world.statuses)
    world.turn()
    assert world.statuses == statuses


@settings(max_examples=25, deadline=None)
@given(st.lists(specs(), min_size=2, max_size=5), st.lists(st.integers(0, 4), min_size=5, max_size=5))
def test_an_operator_killed_at_any_turn_goes_on_where_it_was(edits: list[dict[str, Any]], pauses: list[int]) -> None:
    world = World(raw_pool("p"), raw_pool("q", {"tier": "q"}), p_0="p", p_1="p", q_0="q")
    world.is_uneven = True
    loaded = {"replicas": {"min": 2}, "residency": {"policy": "Preferred"}, "placement": {}}
    world.apply(raw_model("m", **{**edits[0], **loaded}))
    world.settle()
    for spec, pause in zip(edits, pauses, strict=False):
        world.apply(raw_model("m", **{**spec, **loaded, "alias": "c"}))
        for _ in range(pause):
            world.turn()
            world.advance()
            world.restart_operator()
    world.settle()
    assert world.plan().is_empty
    if "bad" not in edits[-1]["model"]["uri"]:
        assert world.target("m") == revision_of(world, "m")


@settings(max_examples=25, deadline=None)
@given(st.permutations(["p-0", "p-1", "p-2", "q-0"]), st.randoms(use_true_random=False))
def test_the_order_in_which_things_are_seen_does_not_matter(order: list[str], random: Any) -> None:
    world = World(raw_pool("p"), raw_pool("q", {"tier": "q"}), p_0="p", p_1="p", p_2="p", q_0="q")
    for index, policy in enumerate(["Preferred", "OnDemand", "Preferred"]):
        world.apply(raw_model(f"m{index}", residency={"policy": policy}, replicas={"min": index + 1}))
    turned = World(*reversed(world.pools.values()), **{w.replace("-", "_"): w[0] for w in order})
    keys = list(world.objects)
    random.shuffle(keys)
    for key in keys:
        turned.apply(world.objects[key])
    for _ in range(4):
        first, second = world.turn(), turned.turn()
        assert first.put_records == second.put_records
        assert sorted(map(repr, first.load_models)) == sorted(map(repr, second.load_models))
        world.advance()
        turned.advance()


def test_a_copy_that_nobody_knows_of_is_taken_down() -> None:
    world = World(p_0="p")
    world.workers["p-0"].models["stray"] = Held("ready", 7, "pypi://stray")
    plan = world.turn()
    assert [(unload.model, unload.generation) for unload in plan.unload_models] == [("stray", 7)]
