"""Whatever happens to pods and spec, a pool comes to what is asked, and never does what it must not on the way."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st
from pool_world import Cluster, raw_pool

from naru_operator.core.pools.model import PoolPlan
from naru_operator.core.pools.template_hash import template_hash
from naru_proto import names
from naru_proto.crd.v1alpha1 import WorkerPool

GOOD = ("a", "b", "c")
BAD = "bad"
"""An image whose pods never become ready."""


class Checked:
    """A cluster whose every turn is held against what must never happen."""

    def __init__(self, num_workers: int, max_surge: int) -> None:
        self.cluster = Cluster(raw_pool(workers={"min": num_workers}, rollout={"maxSurge": max_surge}, image="a"))
        self.max_surge = max_surge

    @property
    def num_desired(self) -> int:
        return int(self.cluster.raw["spec"]["workers"]["min"])

    def change(self, **spec: object) -> None:
        self.cluster.raw = {**self.cluster.raw, "spec": {**self.cluster.raw["spec"], **spec}}

    def turn(self) -> PoolPlan:
        ready_before = self.cluster.ready() if self.cluster.has_registry else []
        plan = self.cluster.turn()  # asserts that no name is used twice, so no slot has two pods
        assert len(self.cluster.living()) <= self.num_desired + self.max_surge
        floor = min(len(ready_before), self.num_desired - (self.max_surge == 0))
        if self.cluster.has_registry:
            assert len(self.cluster.ready()) >= floor, plan.reasons
        slots = [self.cluster.pods[name]["metadata"]["labels"][names.LABEL_SLOT] for name in self.cluster.pods]
        assert len(slots) == len(set(slots))
        assert set(plan.reasons) or not (plan.create or plan.delete)
        return plan

    def is_good(self, name: str) -> bool:
        return bool(self.cluster.pods[name]["spec"]["containers"][0]["image"] != BAD)

    # --- what may happen -------------------------------------------------------------------------------------------

    def start(self, pick: int) -> None:
        waiting = [n for n in self.cluster.living() if n not in self.cluster.ready() and self.is_good(n)]
        if waiting:
            self.cluster.become_ready(waiting[pick % len(waiting)], num_running=pick % 3)

    def crash(self, pick: int) -> None:
        if living := self.cluster.living():
            self.cluster.become_unready(living[pick % len(living)])

    def evict(self, pick: int) -> None:
        if living := self.cluster.living():
            self.cluster.evict(living[pick % len(living)])

    def drain(self, pick: int) -> None:
        if living := self.cluster.living():
            self.cluster.terminate(living[pick % len(living)])

    def end(self, pick: int) -> None:
        if going := self.cluster.terminating():
            self.cluster.vanish(going[pick % len(going)])

    def vanish(self, pick: int) -> None:
        if living := self.cluster.living():
            self.cluster.vanish(living[pick % len(living)])

    def scale(self, pick: int) -> None:
        self.change(workers={"min": pick % 5})

    def roll(self, pick: int) -> None:
        self.change(image=(*GOOD, BAD)[pick % 4])

    def lose_registry(self, pick: int) -> None:
        self.cluster.has_registry = pick % 2 == 0

    def wait(self, pick: int) -> None:
        self.cluster.now_s += (1.0, 40.0, 400.0, 2000.0)[pick % 4]


EVENTS: tuple[Callable[[Checked, int], None], ...] = (
    Checked.start, Checked.start, Checked.crash, Checked.evict, Checked.drain, Checked.end, Checked.vanish,
    Checked.scale, Checked.roll, Checked.roll, Checked.lose_registry, Checked.wait,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    num_workers=st.integers(0, 4),
    max_surge=st.integers(0, 3),
    events=st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 11)), max_size=25),
    image=st.sampled_from(GOOD),
)
def test_a_pool_converges_and_never_goes_too_low_or_too_high(
    num_workers: int, max_surge: int, events: list[tuple[Callable[[Checked, int], None], int]], image: str
) -> None:
    world = Checked(num_workers, max_surge)
    for event, pick in events:
        event(world, pick)
        world.turn()
    world.cluster.has_registry = True
    world.change(image=image)
    for _ in range(60):
        plan = world.turn()
        cluster = world.cluster
        if not (plan.create or plan.delete or cluster.terminating()) and cluster.ready() == sorted(cluster.pods):
            break
        for name in cluster.terminating():
            cluster.vanish(name)
        for name in set(cluster.living()) - set(cluster.ready()):
            if world.is_good(name):
                cluster.become_ready(name)
        cluster.now_s += 31.0
    cluster = world.cluster
    current = template_hash(WorkerPool.model_validate(cluster.raw), cluster.settings)
    hashes = [pod["metadata"]["labels"][names.LABEL_TEMPLATE_HASH] for pod in cluster.pods.values()]
    assert len(cluster.ready()) == world.num_desired
    assert hashes == [current] * world.num_desired
    plan = world.turn()
    assert (plan.create, plan.delete, plan.reasons, plan.problem) == ((), (), (), "")


def test_a_bad_image_never_takes_the_last_good_workers() -> None:
    for max_surge in (0, 1, 2):
        world = Checked(3, max_surge)
        world.cluster.settle()
        world.change(image=BAD)
        for _ in range(10):
            world.turn()
            for name in world.cluster.terminating():
                world.cluster.vanish(name)
            world.cluster.now_s += 400.0
        assert len(world.cluster.ready()) == (2 if max_surge == 0 else 3)
        assert world.turn().problem_reason == "RolloutStuck"
