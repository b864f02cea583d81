"""KV memory between block pool, ledger and runner: booked before use, given back before unbooked."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from naru_worker.adapters.memory.kv_space import KVReclaimer, make_kv_space
from naru_worker.adapters.memory.ledger import MemoryLedger
from naru_worker.adapters.ops.protocol import Runner
from naru_worker.core.kv_growth import kv_layout
from naru_worker.core.kv_manager import KVManager
from naru_worker.core.request import Request, RequestId, Sequence
from naru_worker.core.sampling import SamplingParams

BLOCK_BYTES = 1 << 20
BLOCK = 4


class Releases:
    """A runner that only gives blocks back, and sees what is booked at that moment."""

    def __init__(self, ledger: MemoryLedger) -> None:
        self.ledger = ledger
        self.released: list[tuple[int, int]] = []
        self.booked: list[int] = []
        self.error: Exception | None = None

    def release_blocks(self, first_block: int, num_blocks: int) -> None:
        if self.error is not None:
            raise self.error
        self.released.append((first_block, num_blocks))
        self.booked.append(self.ledger.view().used_bytes)


class Model:
    """KV manager and space of one model; its floor is booked."""

    def __init__(self, ledger: MemoryLedger, name: str = "m", num_blocks: int = 9, floor_blocks: int = 2) -> None:
        layout = kv_layout(BLOCK_BYTES, num_blocks, floor_blocks)
        assert ledger.book_kv(name, layout.floor_bytes)
        self.ledger, self.name = ledger, name
        self.runner = Releases(ledger)
        self.space = make_kv_space(
            name, ledger, cast("Runner", self.runner), BLOCK_BYTES, num_blocks, floor_blocks=floor_blocks
        )
        self.kv = KVManager(num_blocks, BLOCK, model_revision=name, growth=self.space)
        self.changes = 0
        self.space.attach(self.kv, self.changed)
        self.sequences: list[Sequence] = []
        self._num_prompts = 0

    def changed(self) -> None:
        self.changes += 1

    def hold(self, num_blocks: int) -> bool:
        """Computes a prompt of so many blocks, and holds them."""
        self.kv.forget_copies()
        first = 1000 * self._num_prompts
        self._num_prompts += 1
        prompt = tuple(range(first, first + num_blocks * BLOCK))
        request = Request(RequestId(f"{self.name}{first}"), prompt, SamplingParams(), seed=0, arrival=0)
        (sequence,) = request.sequences
        if not self.kv.admit(sequence, self.kv.match(sequence), len(prompt), 0):
            return False
        sequence.num_computed_tokens = len(prompt)
        self.kv.publish(sequence, 0)
        self.sequences.append(sequence)
        return True

    def let_go(self) -> None:
        """The oldest prompt is done: its blocks are cached."""
        self.kv.free(self.sequences.pop(0))

    def check(self) -> None:
        self.kv.check(self.sequences)
        assert self.ledger.kv_bytes(self.name) == self.space.committed_bytes


def ledger_of(num_blocks: int, soft_ratio: float = 1.0) -> MemoryLedger:
    return MemoryLedger(num_blocks * BLOCK_BYTES, soft_ratio)


def test_a_chunk_is_booked_before_a_block_of_it_is_given_out() -> None:
    ledger = ledger_of(8)
    model = Model(ledger)
    # Two blocks of 1 MiB are a chunk; the first chunk has the null block.
    assert (model.space.chunk_blocks, ledger.kv_bytes("m") // BLOCK_BYTES) == (2, 2)
    assert model.hold(1)
    assert ledger.kv_bytes("m") // BLOCK_BYTES == 2
    assert model.hold(2)
    assert ledger.kv_bytes("m") // BLOCK_BYTES == 4
    assert (model.space.num_grows, model.space.committed_bytes) == (1, 4 * BLOCK_BYTES)


def test_nothing_is_ever_overbooked_and_a_refusal_changes_nothing() -> None:
    ledger = ledger_of(5)
    model = Model(ledger)
    assert not model.hold(5)
    model.check()
    assert model.hold(3)
    assert not model.hold(1)
    assert ledger.free_bytes() == BLOCK_BYTES, "half a chunk is none"
    model.check()


def test_memory_is_back_at_the_machine_before_it_is_free_in_the_ledger() -> None:
    ledger = ledger_of(8)
    model = Model(ledger)
    assert model.hold(7)
    model.let_go()
    assert model.space.trim(3 * BLOCK_BYTES) == 4 * BLOCK_BYTES
    # Oldest content first; two neighbours go in one call.
    assert model.runner.released == [(4, 4)]
    assert model.runner.booked == [8 * BLOCK_BYTES]
    assert ledger.kv_bytes("m") == 4 * BLOCK_BYTES
    assert (model.space.num_shrinks, model.changes) == (1, 1)
    model.check()


def test_the_floor_and_what_sequences_hold_stay() -> None:
    ledger = ledger_of(8)
    model = Model(ledger)
    assert model.hold(3)
    assert model.hold(2)
    model.let_go()
    assert model.space.reclaimable_bytes == 2 * BLOCK_BYTES
    assert model.space.trim(1 << 40) == 2 * BLOCK_BYTES
    assert model.space.trim(1 << 40) == 0
    model.let_go()
    assert model.space.trim(1 << 40) == 2 * BLOCK_BYTES
    assert model.space.committed_bytes == model.space.layout.floor_bytes == 2 * BLOCK_BYTES
    model.check()


@pytest.mark.parametrize("num_bytes", [0, -5])
def test_trimming_nothing_does_nothing(num_bytes: int) -> None:
    model = Model(ledger_of(8))
    assert model.hold(5)
    model.let_go()
    assert model.space.trim(num_bytes) == 0
    assert model.runner.released == []


def test_a_smaller_last_chunk_is_booked_for_what_it_is() -> None:
    ledger = ledger_of(9)
    model = Model(ledger, num_blocks=9)
    assert model.hold(8), "a model that has the budget for itself gets its last block"
    assert ledger.free_bytes() == 0
    model.check()
    model.let_go()
    assert model.space.reclaimable_bytes == 7 * BLOCK_BYTES
    assert model.space.trim(1) == BLOCK_BYTES, "the tail of the chain, of one block"
    model.check()
    assert model.space.trim(2 * BLOCK_BYTES + 1) == 4 * BLOCK_BYTES
    assert model.hold(8)
    assert ledger.free_bytes() == 0
    model.check()


def test_above_the_soft_limit_own_prefixes_go_before_memory_is_taken() -> None:
    ledger = ledger_of(8, soft_ratio=0.5)
    model = Model(ledger)
    assert model.hold(3)
    model.let_go()
    assert model.hold(2)
    assert ledger.kv_bytes("m") == 4 * BLOCK_BYTES
    assert len(model.kv.cache.hashes()) == 3
    assert model.hold(2), "what must be, is taken above it"
    assert ledger.kv_bytes("m") == 6 * BLOCK_BYTES
    model.check()


def test_a_frozen_space_gives_nothing_up() -> None:
    model = Model(ledger_of(8))
    assert model.hold(5)
    model.let_go()
    model.space.is_frozen = True
    assert (model.space.reclaimable_bytes, model.space.trim(1)) == (0, 0)
    model.space.is_frozen = False
    assert model.space.trim(1) > 0


def test_memory_that_does_not_come_back_stays_booked() -> None:
    ledger = ledger_of(8)
    model = Model(ledger)
    assert model.hold(5)
    model.let_go()
    model.runner.error = OSError("no")
    assert model.space.trim(1) == 0
    assert ledger.kv_bytes("m") == 6 * BLOCK_BYTES
    assert model.space.committed_bytes == 4 * BLOCK_BYTES
    model.kv.check([])


def test_a_space_and_a_kv_manager_that_do_not_belong_together_are_refused() -> None:
    model = Model(ledger_of(8))
    with pytest.raises(ValueError, match="grows elsewhere"):
        model.space.attach(KVManager(9, BLOCK, model_revision="m"), model.changed)


# --- among models -----------------------------------------------------------------------------------------------------


def loop_of(*models: Model) -> KVReclaimer:
    reclaimer = KVReclaimer()
    for model in models:
        reclaimer.add(model.space)
    return reclaimer


def test_what_one_model_must_have_comes_from_prefixes_of_the_model_not_used_for_longest() -> None:
    ledger = ledger_of(14)
    asker, older, newer, busy = models = [Model(ledger, name) for name in ("asker", "older", "newer", "busy")]
    loop_of(*models)
    for model in (older, newer, busy):
        assert model.hold(3)
        model.let_go()
    older.space.last_used_s, newer.space.last_used_s, busy.space.last_used_s = 5.0, 6.0, 1.0
    busy.space.is_busy = True
    assert ledger.free_bytes() == 0
    for model in (older, newer, busy):
        assert asker.hold(2)
        assert ledger.kv_bytes(model.name) == 2 * BLOCK_BYTES
        assert ledger.free_bytes() == 0
    assert not asker.hold(2)
    for model in models:
        model.check()


def test_what_would_not_be_enough_is_not_taken() -> None:
    ledger = ledger_of(6)
    asker, other = models = [Model(ledger, "asker"), Model(ledger, "other")]
    loop_of(*models)
    assert other.hold(3)
    other.let_go()
    assert not asker.hold(4)
    assert (other.runner.released, len(other.kv.cache.hashes())) == ([], 3)
    assert asker.hold(3)
    assert ledger.free_bytes() == 0
    for model in models:
        model.check()


def test_a_model_that_has_left_is_neither_asked_nor_heard() -> None:
    ledger = ledger_of(6)
    asker, gone = models = [Model(ledger, "asker"), Model(ledger, "gone")]
    reclaimer = loop_of(*models)
    assert gone.hold(3)
    gone.let_go()
    reclaimer.remove(gone.space)
    reclaimer.remove(gone.space)
    assert not asker.hold(3)
    assert gone.space.trim(1 << 30) == 0
    assert gone.runner.released == []


class SpacesMachine(RuleBasedStateMachine):
    """Three models in one budget, beside weights that come and go."""

    @initialize(
        budget_blocks=st.integers(8, 40),
        soft_ratio=st.sampled_from([0.0, 0.7, 1.0]),
        sizes=st.lists(st.tuples(st.integers(3, 20), st.integers(2, 4)), min_size=3, max_size=3),
    )
    def start(self, budget_blocks: int, soft_ratio: float, sizes: list[tuple[int, int]]) -> None:
        self.ledger = ledger_of(max(budget_blocks, 12), soft_ratio)
        self.models = [Model(self.ledger, f"m{i}", blocks, floor) for i, (blocks, floor) in enumerate(sizes)]
        loop_of(*self.models)

    @rule(index=st.integers(0, 2), num_blocks=st.integers(1, 8))
    def hold(self, index: int, num_blocks: int) -> None:
        model = self.models[index]
        others_held = {m.name: [list(s.block_table) for s in m.sequences] for m in self.models}
        can = self.can_hold(model, num_blocks)
        assert model.hold(num_blocks) == can
        if can:
            others_held[model.name].append(list(model.sequences[-1].block_table))
        assert {m.name: [list(s.block_table) for s in m.sequences] for m in self.models} == others_held

    def can_hold(self, model: Model, num_blocks: int) -> bool:
        """Its own free blocks, and whole chunks from what is free and what others only keep."""
        missing = num_blocks - model.kv.num_free_blocks
        absent = model.kv.max_usable_blocks - model.kv.num_usable_blocks
        if not 0 < missing <= absent:
            return missing <= 0
        chunks = -(-missing // model.space.chunk_blocks)
        num_bytes = min(chunks * model.space.layout.chunk_bytes, absent * BLOCK_BYTES)
        kept = sum(m.space.reclaimable_bytes for m in self.models if m is not model)
        return num_bytes <= self.ledger.free_bytes() + kept

    @rule(index=st.integers(0, 2))
    def let_go(self, index: int) -> None:
        if self.models[index].sequences:
            self.models[index].let_go()

    @rule(index=st.integers(0, 2), num_bytes=st.integers(0, 9 * BLOCK_BYTES))
    def trim(self, index: int, num_bytes: int) -> None:
        model = self.models[index]
        free, could = self.ledger.free_bytes(), model.space.reclaimable_bytes
        freed = model.space.trim(num_bytes)
        assert self.ledger.free_bytes() == free + freed
        assert freed >= min(num_bytes, could)

    @rule(num_blocks=st.integers(1, 10))
    def weights_come(self, num_blocks: int) -> None:
        self.ledger.book("weights", num_blocks * BLOCK_BYTES)

    @rule()
    def weights_go(self) -> None:
        self.ledger.unbook("weights")

    @invariant()
    def all_bytes_are_booked(self) -> None:
        for model in getattr(self, "models", []):
            model.check()
            assert model.space.layout.floor_bytes <= model.space.committed_bytes
            blocks = [b.block_id for b in model.kv._pool.committed()]
            assert model.space.committed_bytes == (len(blocks) + 1) * BLOCK_BYTES


TestSpacesMachine = SpacesMachine.TestCase
