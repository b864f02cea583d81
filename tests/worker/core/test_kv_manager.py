"""Block tables: hits, copy-on-write, forks, giving back."""

from __future__ import annotations

import pytest

from naru_worker.core.kv_manager import KVManager
from naru_worker.core.prompt_marks import NO_MARKS, PromptMarks
from naru_worker.core.request import Request, RequestId, Sequence, SequenceState
from naru_worker.core.route_marks import KeyChanges
from naru_worker.core.sampling import SamplingParams

BLOCK = 4


def make_kv(num_blocks: int = 16, *, enable_prefix_caching: bool = True) -> KVManager:
    return KVManager(num_blocks, BLOCK, model_revision="rev", enable_prefix_caching=enable_prefix_caching)


def sequences(
    prompt: range | list[int],
    n: int = 1,
    adapter: str = "",
    cache_salt: bytes = b"",
    marks: PromptMarks = NO_MARKS,
) -> list[Sequence]:
    request = Request(
        RequestId("r"),
        tuple(prompt),
        SamplingParams(n=n),
        seed=0,
        arrival=0,
        adapter=adapter,
        cache_salt=cache_salt,
        marks=marks,
    )
    return request.sequences


def compute(kv: KVManager, sequence: Sequence, num_tokens: int | None = None) -> None:
    """Admits if need be, and computes."""
    kv.forget_copies()
    if not sequence.block_table:
        match = kv.match(sequence)
        num_tokens = num_tokens or len(sequence.token_ids) - match.num_tokens
        assert kv.admit(sequence, match, num_tokens, 0)
    else:
        num_tokens = num_tokens or sequence.num_missing_tokens
        assert kv.allocate(sequence, num_tokens)
    before = sequence.num_computed_tokens
    sequence.num_computed_tokens += num_tokens
    kv.publish(sequence, before)


@pytest.mark.parametrize(
    ("length", "hit"),
    [(1, 0), (BLOCK - 1, 0), (BLOCK, 3), (BLOCK + 1, 4), (2 * BLOCK, 7), (2 * BLOCK + 1, 8), (5 * BLOCK + 3, 20)],
)
def test_a_known_prompt_is_hit_but_for_its_last_token(length: int, hit: int) -> None:
    kv = make_kv()
    (first,) = sequences(range(length))
    compute(kv, first)
    kv.free(first)
    (second,) = sequences(range(length))
    match = kv.match(second)
    assert match.num_tokens == hit
    assert len(match.blocks) == -(-hit // BLOCK)


def test_a_block_size_of_one_never_offers_the_last_token_for_writing() -> None:
    kv = KVManager(8, 1, model_revision="rev")
    (first,) = sequences(range(3))
    compute(kv, first)
    (second,) = sequences(range(3))
    compute(kv, second)
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] != first.block_table[2]


def test_a_whole_prompt_hit_on_a_block_in_use_copies_it() -> None:
    kv = make_kv()
    (first,) = sequences(range(8))
    compute(kv, first)
    (second,) = sequences(range(8))
    compute(kv, second)
    assert kv.copies() == ((first.block_table[1], second.block_table[1]),)
    assert first.block_table[0] == second.block_table[0]
    kv.check([first, second])


def test_a_whole_prompt_hit_on_a_block_nobody_uses_takes_it_over() -> None:
    kv = make_kv(num_blocks=3)
    (first,) = sequences(range(8))
    compute(kv, first)
    table = list(first.block_table)
    kv.free(first)
    (second,) = sequences(range(8))
    kv.forget_copies()
    assert kv.admit(second, kv.match(second), 1, 0)
    assert (second.block_table, kv.copies()) == (table, ())
    # While its last token is computed again, nobody else may read the block.
    (third,) = sequences([*range(8), 9])
    assert kv.match(third).num_tokens == 4
    second.num_computed_tokens = 8
    kv.publish(second, 7)
    assert kv.match(third).num_tokens == 8
    kv.check([second])


@pytest.mark.parametrize(("adapter", "cache_salt"), [("lora", b""), ("", b"tenant")])
def test_another_adapter_or_tenant_never_hits(adapter: str, cache_salt: bytes) -> None:
    kv = make_kv()
    compute(kv, sequences(range(9))[0])
    (other,) = sequences(range(9), adapter=adapter, cache_salt=cache_salt)
    assert kv.match(other).num_tokens == 0
    (same,) = sequences(range(9))
    assert kv.match(same).num_tokens == 8


def test_nothing_is_hit_after_a_reset_and_the_epoch_grows() -> None:
    kv = make_kv()
    (first,) = sequences(range(9))
    compute(kv, first)
    kv.free(first)
    kv.reset()
    assert kv.epoch == 1
    assert kv.match(sequences(range(9))[0]).num_tokens == 0
    assert kv.stats([]).num_cached_blocks == 0
    kv.check([])


def test_without_caching_nothing_is_hashed() -> None:
    kv = make_kv(enable_prefix_caching=False)
    (first,) = sequences(range(9))
    compute(kv, first)
    assert (first.block_hashes, len(kv.cache)) == ([], 0)
    assert kv.match(sequences(range(9))[0]).num_tokens == 0


def test_only_full_and_computed_blocks_are_offered() -> None:
    kv = make_kv()
    (first,) = sequences(range(11))
    (second,) = sequences(range(11))
    for num_tokens, hit in ((3, 0), (2, 4), (2, 4), (1, 8), (3, 8)):
        compute(kv, first, num_tokens)
        assert kv.match(second).num_tokens == hit


def test_a_block_in_the_making_is_worth_waiting_for() -> None:
    kv = make_kv()
    (first,) = sequences(range(9))
    compute(kv, first, 3)
    (second,) = sequences(range(9))
    match = kv.match(second)
    assert match.awaited_hash is not None
    assert kv.is_computing(match.awaited_hash)
    kv.free(first)
    assert not kv.is_computing(match.awaited_hash)
    assert kv.match(second).awaited_hash is None


def test_an_admission_that_does_not_fit_changes_nothing() -> None:
    kv = make_kv(num_blocks=6)
    (first,) = sequences(range(8))
    compute(kv, first)
    (second,) = sequences([*range(8), *range(50, 64)])
    kv.forget_copies()
    assert not kv.admit(second, kv.match(second), 2, 0)
    assert (second.block_table, second.num_computed_tokens) == ([], 0)
    kv.check([first])
    assert not kv.admit(sequences([1, 2])[0], kv.match(sequences([1, 2])[0]), 2, 3)


@pytest.mark.parametrize(("num_blocks", "fits"), [(3, False), (4, True)])
def test_a_hit_that_must_be_copied_counts_the_copy(num_blocks: int, fits: bool) -> None:
    kv = make_kv(num_blocks=num_blocks)
    (first,) = sequences(range(8))
    compute(kv, first)
    (second,) = sequences(range(8))
    kv.forget_copies()
    assert kv.admit(second, kv.match(second), 1, 0) == fits
    assert len(kv.copies()) == fits


def test_forks_share_all_but_the_block_of_the_last_prompt_token() -> None:
    kv = make_kv()
    elder, second, third = family = sequences(range(6), n=3)
    compute(kv, elder)
    for sibling in family[1:]:
        kv.fork(elder, sibling, 5)
        sibling.state = SequenceState.RUNNING
        assert sibling.block_table == elder.block_table
    kv.check(family)
    assert kv.stats(family).num_used_blocks == 2
    kv.forget_copies()
    shared, tail = elder.block_table
    elder.token_ids.append(7)
    for sequence in family:
        assert kv.allocate(sequence, 1)
    # The last holder keeps the block.
    assert [source for source, _ in kv.copies()] == [tail, tail]
    assert third.block_table == [shared, tail]
    assert len({sequence.block_table[1] for sequence in family}) == 3
    for sequence in family:
        sequence.num_computed_tokens += 1
    kv.check(family)
    for sequence in (second, elder, third):
        kv.free(sequence)
    kv.check([])
    kv.forget_copies()
    assert kv.num_free_blocks == 15


def test_a_prompt_that_ends_a_block_is_forked_without_its_last_block_if_that_holds_only_the_last_token() -> None:
    kv = make_kv()
    elder, sibling = sequences(range(5), n=2)
    compute(kv, elder)
    kv.fork(elder, sibling, 4)
    assert sibling.block_table == elder.block_table[:1]


def test_a_block_still_to_be_copied_from_is_not_given_out_in_the_same_step() -> None:
    kv = make_kv(num_blocks=6)
    elder, sibling = family = sequences(range(6), n=2)
    compute(kv, elder)
    kv.fork(elder, sibling, 5)
    kv.forget_copies()
    tail = elder.block_table[1]
    assert kv.allocate(sibling, 1)
    ((source, _),) = kv.copies()
    assert source == tail
    kv.free(elder)
    (other,) = sequences(range(50, 62))
    taken = kv.admit(other, kv.match(other), 12, 0)
    assert not taken
    kv.forget_copies()
    assert kv.admit(other, kv.match(other), 12, 0)
    assert tail in other.block_table
    sibling.num_computed_tokens = 6
    kv.check([sibling, other])
    assert family


def test_tails_are_evicted_before_heads() -> None:
    kv = make_kv(num_blocks=5)
    (first,) = sequences(range(16))
    compute(kv, first)
    kv.free(first)
    (other,) = sequences(range(50, 58))
    compute(kv, other)
    (again,) = sequences(range(16))
    assert kv.match(again).num_tokens == 8


def test_waste_counts_each_slot_once() -> None:
    kv = make_kv()
    elder, sibling = family = sequences(range(8), n=2)
    compute(kv, elder)
    assert kv.stats([elder]).num_wasted_slots == 0
    kv.fork(elder, sibling, 7)
    stats = kv.stats(family)
    assert (stats.num_used_blocks, stats.num_used_slots, stats.num_wasted_slots) == (2, 8, 0)
    (other,) = sequences(range(50, 55))
    compute(kv, other)
    stats = kv.stats([*family, other])
    assert (stats.num_used_blocks, stats.num_free_blocks, stats.num_wasted_slots) == (4, 11, 3)
    assert stats.waste_ratio == 3 / 16
    assert stats.usage_ratio == 4 / 15
    for sequence in (*family, other):
        kv.free(sequence)
    stats = kv.stats([])
    assert (stats.num_used_blocks, stats.num_cached_blocks, stats.waste_ratio) == (0, 3, 0.0)


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="block_size is 0"):
        KVManager(4, 0, model_revision="rev")
    kv = make_kv(num_blocks=5)
    assert kv.can_ever_fit(16)
    assert not kv.can_ever_fit(17)


def shared(num_blocks: int) -> PromptMarks:
    return PromptMarks(num_shared_blocks=num_blocks)


def test_tenants_share_the_blocks_of_the_shared_part_and_nothing_behind_it() -> None:
    kv = make_kv(num_blocks=64)
    (first,) = sequences(range(4 * BLOCK + 1), cache_salt=b"a", marks=shared(2))
    compute(kv, first)

    def num_hits(prompt: range, salt: bytes, num_shared: int) -> int:
        (sequence,) = sequences(prompt, cache_salt=salt, marks=shared(num_shared))
        return kv.match(sequence).num_tokens // BLOCK

    whole = range(4 * BLOCK + 1)
    assert num_hits(whole, b"a", 2) == 4
    assert num_hits(whole, b"b", 2) == 2
    assert num_hits(whole, b"", 2) == 2
    assert num_hits(whole, b"b", 1) == 1
    # Whoever calls more of it shared, or nothing, finds no more of it.
    assert num_hits(whole, b"b", 4) == 2
    assert num_hits(whole, b"a", 0) == num_hits(whole, b"", 0) == num_hits(whole, b"b", 0) == 0


def test_what_others_cached_without_a_shared_part_is_not_found_by_calling_it_shared() -> None:
    kv = make_kv(num_blocks=64)
    whole = range(4 * BLOCK + 1)
    for salt in (b"", b"a"):
        (first,) = sequences(whole, cache_salt=salt)
        compute(kv, first)
    for num_shared in (1, 2, 4):
        (probe,) = sequences(whole, cache_salt=b"b", marks=shared(num_shared))
        assert kv.match(probe).num_tokens == 0


def test_a_block_that_is_being_computed_behind_the_shared_part_is_not_waited_for_by_others() -> None:
    kv = make_kv(num_blocks=64)
    (first,) = sequences(range(4 * BLOCK), cache_salt=b"a", marks=shared(2))
    assert kv.admit(first, kv.match(first), 4 * BLOCK, 0)
    (other,) = sequences(range(4 * BLOCK), cache_salt=b"b", marks=shared(2))
    assert kv.match(other).awaited_hash == first.block_hashes[0]
    first.num_computed_tokens = 2 * BLOCK
    kv.publish(first, 0)
    (other,) = sequences(range(4 * BLOCK), cache_salt=b"b", marks=shared(2))
    assert (kv.match(other).num_tokens, kv.match(other).awaited_hash) == (2 * BLOCK, None)


def test_route_keys_are_held_from_the_moment_their_block_is_full_until_it_is_given_out() -> None:
    kv = make_kv(num_blocks=5)
    marks = kv.cache.marks
    (first,) = sequences(range(3 * BLOCK), marks=PromptMarks({0: (b"k0", b"k1"), 2: (b"k2",)}))
    compute(kv, first, BLOCK - 1)
    assert not marks.has_changes
    compute(kv, first, BLOCK)
    assert marks.take() == KeyChanges((b"k0", b"k1"))
    compute(kv, first)
    assert marks.take() == KeyChanges((b"k2",))
    kv.free(first)
    (other,) = sequences(range(100, 100 + 2 * BLOCK))
    compute(kv, other)
    assert marks.take() == KeyChanges((), (b"k2",))
    kv.free(other)
    kv.reset()
    assert marks.take() == KeyChanges((), (b"k0", b"k1"))


def test_blocks_that_are_there_already_are_marked_when_a_request_hits_them() -> None:
    kv = make_kv()
    (first,) = sequences(range(2 * BLOCK))
    compute(kv, first)
    (second,) = sequences(range(2 * BLOCK + 1), marks=PromptMarks({0: (b"k0",), 1: (b"k1",)}))
    compute(kv, second)
    assert kv.cache.marks.take() == KeyChanges((b"k0", b"k1"))
    # Its last block is computed again in place: the key goes and comes with it, and nothing is told.
    kv.free(first)
    kv.free(second)
    (third,) = sequences(range(2 * BLOCK), marks=PromptMarks({0: (b"k0",), 1: (b"k1",)}))
    compute(kv, third)
    assert kv.cache.marks.take() == KeyChanges()
    assert b"k1" in kv.cache.marks
