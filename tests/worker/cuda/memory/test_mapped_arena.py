"""Arenas over virtual memory, on a fake device that refuses misuse."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_cuda_memory import FakeCudaMemory
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from naru_worker.adapters.ops.cuda.memory.arena import MappedArena
from naru_worker.adapters.ops.cuda.memory.chunk_pool import ChunkPool
from naru_worker.adapters.ops.cuda.memory.errors import DeviceError, OutOfDeviceMemory
from naru_worker.adapters.ops.cuda.memory.pinned_pool import PinnedPool

CHUNK = 64


def pool_of(num_chunks: int, **device: Any) -> tuple[FakeCudaMemory, ChunkPool]:
    fake = FakeCudaMemory(granularity=CHUNK, **device)
    return fake, ChunkPool(fake, num_chunks * CHUNK, chunk_bytes=CHUNK)


def host_slots(num_slots: int, slot_bytes: int) -> Any:
    return PinnedPool(np.zeros(num_slots * slot_bytes, np.uint8), slot_bytes).take(num_slots)


def test_whole_chunks_come_for_the_bytes_asked_for_and_go_when_nobody_uses_any_of_theirs() -> None:
    fake, pool = pool_of(8)
    arena = MappedArena(pool, 5 * CHUNK - 3)
    assert (arena.reserved_bytes, arena.mapped_bytes, fake.used_bytes) == (5 * CHUNK, 0, 0)
    arena.ensure(CHUNK - 1, 2)
    assert (arena.mapped_bytes, arena.used_bytes) == (2 * CHUNK, 2)
    fake.write(arena.address + CHUNK - 1, b"ab")
    arena.ensure(0, 2 * CHUNK)
    assert fake.read(arena.address + CHUNK - 1, 2) == b"ab", "what was there is not mapped anew"
    # Blocks that are no whole chunks are released one by one: a chunk goes with the last of its blocks.
    assert arena.release(0, 40) == 0
    assert arena.release(40, 40) == CHUNK
    assert arena.release(80, 48) == CHUNK
    assert (arena.mapped_bytes, pool.held_bytes, pool.idle_bytes) == (0, 0, 2 * CHUNK)


def test_access_to_chunks_side_by_side_is_set_in_one_call() -> None:
    fake, pool = pool_of(8)
    arena = MappedArena(pool, 8 * CHUNK)
    arena.ensure(2 * CHUNK, CHUNK)
    fake.calls.clear()
    arena.ensure(0, 6 * CHUNK)
    assert fake.calls.count("cuMemSetAccess") == 2, "on both sides of the one that was there"
    fake.calls.clear()
    arena.ensure(CHUNK, 3 * CHUNK)
    assert fake.calls == [], "nothing is missing"


@pytest.mark.parametrize("where", ["budget", "device"])
def test_where_the_pool_has_no_more_nothing_is_mapped_and_the_error_names_the_bytes(where: str) -> None:
    _, pool = pool_of(3 if where == "budget" else 9, capacity_bytes=3 * CHUNK)
    arena, other = MappedArena(pool, 4 * CHUNK), MappedArena(pool, CHUNK)
    other.ensure(0, 1)
    arena.ensure(0, 1)
    with pytest.raises(OutOfDeviceMemory, match=f"{3 * CHUNK} bytes") as caught:
        arena.ensure(0, 4 * CHUNK)
    assert caught.value.num_bytes == 3 * CHUNK
    assert (arena.mapped_bytes, arena.used_bytes, pool.held_bytes) == (CHUNK, 1, 2 * CHUNK)
    arena.ensure(CHUNK, 1)
    other.close()
    arena.ensure(CHUNK, CHUNK + 1)
    assert arena.mapped_bytes == 3 * CHUNK, "the chunk of one model serves another"


def test_an_arena_that_slept_wakes_at_the_same_addresses_with_its_content_and_others_use_its_memory_meanwhile() -> None:
    fake, pool = pool_of(4)
    arena, other = MappedArena(pool, 6 * CHUNK), MappedArena(pool, 4 * CHUNK)
    arena.ensure(10, 2 * CHUNK)
    arena.ensure(5 * CHUNK, 7)
    content = [bytes(range(2 * CHUNK)), b"weights"]
    fake.write(arena.address + 10, content[0])
    fake.write(arena.address + 5 * CHUNK, content[1])
    with pytest.raises(ValueError, match=f"cannot hold the {2 * CHUNK + 7}"):
        arena.sleep(host_slots(2, CHUNK))
    assert not arena.is_asleep
    assert arena.sleep(host_slots(5, 30)) == 4 * CHUNK
    with pytest.raises(RuntimeError, match="asleep"):
        arena.ensure(0, 1)
    other.ensure(0, 4 * CHUNK)
    fake.write(other.address, b"\xff" * 4 * CHUNK)
    with pytest.raises(OutOfDeviceMemory):
        arena.wake()
    assert arena.is_asleep
    other.release(0, 4 * CHUNK)
    arena.wake()
    assert [fake.read(arena.address + 10, 2 * CHUNK), fake.read(arena.address + 5 * CHUNK, 7)] == content


def test_an_arena_whose_content_is_void_sleeps_without_a_copy_and_wakes_with_what_is_still_used() -> None:
    fake, pool = pool_of(4)
    arena = MappedArena(pool, 4 * CHUNK)
    arena.ensure(0, 4 * CHUNK)
    assert arena.sleep() == 4 * CHUNK
    assert arena.release(CHUNK, 3 * CHUNK) == 0
    arena.wake()
    assert (arena.mapped_bytes, "cuMemcpyDtoH" in fake.calls) == (CHUNK, False)


def test_a_copy_that_fails_leaves_an_arena_awake_or_asleep_as_it_was() -> None:
    fake, pool = pool_of(4)
    arena = MappedArena(pool, 2 * CHUNK)
    arena.ensure(0, 2 * CHUNK)
    fake.write(arena.address, b"x" * 2 * CHUNK)
    fake.fails_always = frozenset({"cuMemcpyDtoH"})
    with pytest.raises(DeviceError, match="cuMemcpyDtoH failed: CUDA_ERROR_UNKNOWN"):
        arena.sleep(host_slots(1, 2 * CHUNK))
    assert (arena.is_asleep, arena.mapped_bytes) == (False, 2 * CHUNK)
    fake.fails_always = frozenset({"cuMemcpyHtoD"})
    arena.sleep(host_slots(1, 2 * CHUNK))
    with pytest.raises(DeviceError, match="cuMemcpyHtoD"):
        arena.wake()
    assert (arena.is_asleep, arena.mapped_bytes) == (True, 0)
    fake.fails_always = frozenset()
    arena.wake()
    assert fake.read(arena.address, 2 * CHUNK) == b"x" * 2 * CHUNK


def test_what_the_device_does_not_let_go_stays_counted_until_it_does() -> None:
    fake, pool = pool_of(4)
    arena = MappedArena(pool, 4 * CHUNK)
    arena.ensure(0, 3 * CHUNK)
    fake.fails_in = 2
    with pytest.raises(DeviceError, match="cuMemUnmap"):
        arena.release(0, 3 * CHUNK)
    assert (arena.mapped_bytes, pool.held_bytes, arena.used_bytes) == (CHUNK, CHUNK, 0)
    assert arena.release(0, 0) == CHUNK, "the next release tries again"
    fake.fails_always = frozenset({"cuMemRelease"})
    with pytest.raises(DeviceError):
        pool.trim()
    assert pool.idle_bytes == fake.used_bytes == 3 * CHUNK
    fake.fails_always = frozenset()
    assert (pool.trim(CHUNK), pool.trim(), fake.used_bytes) == (2 * CHUNK, CHUNK, 0)


def test_a_closed_arena_gives_back_its_addresses_once_and_refuses_everything_else() -> None:
    fake, pool = pool_of(4)
    arena = MappedArena(pool, 2 * CHUNK)
    arena.ensure(0, 1)
    with pytest.raises(ValueError, match="outside"):
        arena.ensure(CHUNK, CHUNK + 1)
    fake.fails_always = frozenset({"cuMemAddressFree"})
    with pytest.raises(DeviceError):
        arena.close()
    fake.fails_always = frozenset()
    arena.close()
    arena.close()
    assert (fake.ranges, fake.mappings) == ({}, {})
    for call in (lambda: arena.ensure(0, 1), lambda: arena.release(0, 1), arena.sleep, arena.wake):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_a_pool_keeps_so_much_for_reuse_and_sizes_that_do_not_fit_are_refused() -> None:
    fake = FakeCudaMemory(granularity=CHUNK)
    pool = ChunkPool(fake, 8 * CHUNK, max_idle_bytes=2 * CHUNK, chunk_bytes=CHUNK)
    pool.give_back(pool.take(5))
    assert (pool.idle_bytes, fake.used_bytes, pool.free_bytes) == (2 * CHUNK, 2 * CHUNK, 8 * CHUNK)
    assert sorted(pool.take(2)) == sorted(fake.chunks), "kept chunks come first"
    sizes: dict[str, Any] = {"budget_bytes": 0, "chunk_bytes": CHUNK}
    for wrong in ({"chunk_bytes": CHUNK + 1}, {"budget_bytes": -1}, {"max_idle_bytes": -1}):
        with pytest.raises(ValueError, match=r"chunk_bytes is|budget_bytes is"):
            ChunkPool(fake, **(sizes | wrong))


def test_threads_that_take_and_give_at_once_never_pass_the_budget_and_lose_nothing() -> None:
    fake, pool = pool_of(6)
    lock, over, refused = threading.Lock(), [], []

    def locked(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            with lock:  # the fake itself is not thread-safe
                result = call(*args)
                over.extend([fake.used_bytes] if fake.used_bytes > 6 * CHUNK else [])
                return result

        return wrapped

    shared = SimpleNamespace(
        granularity=CHUNK, create=locked(fake.create), destroy=locked(fake.destroy), reserve=locked(fake.reserve)
    )
    pool = ChunkPool(shared, 6 * CHUNK, max_idle_bytes=CHUNK, chunk_bytes=CHUNK)

    def work() -> None:
        for n in (1, 3, 2, 4) * 20:
            try:
                pool.give_back(pool.take(n))
            except OutOfDeviceMemory:
                refused.append(n)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (over, pool.held_bytes, pool.idle_bytes) == ([], 0, fake.used_bytes)


ARENA_CHUNKS = 5


class ArenaMachine(RuleBasedStateMachine):
    """Any order of calls by several arenas, with calls to the device that fail, against a plain model of bytes."""

    arenas = Bundle("arenas")

    @initialize(budget=st.integers(2, 9), capacity=st.integers(2, 9), max_idle=st.integers(0, 9))
    def begin(self, budget: int, capacity: int, max_idle: int) -> None:
        self.fake = FakeCudaMemory(granularity=CHUNK, capacity_bytes=capacity * CHUNK)
        self.pool = ChunkPool(self.fake, budget * CHUNK, max_idle * CHUNK, CHUNK)
        self.used: dict[MappedArena, set[int]] = {}
        """Bytes in use, by arena."""
        self.marks: dict[MappedArena, dict[int, int]] = {}
        """Bytes that were written, and have not become void since."""
        self.kept: dict[MappedArena, Any] = {}
        self.may_be_stuck: set[MappedArena] = set()
        """The device has refused to let some of its chunks go."""
        self.counter = 0

    @rule(target=arenas)
    def make(self) -> Any:
        try:
            arena = MappedArena(self.pool, ARENA_CHUNKS * CHUNK)
        except DeviceError:
            return multiple()
        self.used[arena], self.marks[arena] = set(), {}
        return arena

    @rule(arena=arenas, start=st.integers(0, ARENA_CHUNKS * CHUNK), num_bytes=st.integers(0, 3 * CHUNK))
    def ensure(self, arena: MappedArena, start: int, num_bytes: int) -> None:
        wanted = set(range(start, min(start + num_bytes, ARENA_CHUNKS * CHUNK)))
        before = arena.mapped_bytes
        try:
            arena.ensure(start, len(wanted))
        except RuntimeError:
            assert arena.is_asleep
        except OutOfDeviceMemory as exc:
            lacking = exc.num_bytes + self.pool.held_bytes
            assert lacking > self.pool.budget_bytes or lacking > self.fake.capacity_bytes
            assert arena.mapped_bytes == before
        except DeviceError:
            if arena.mapped_bytes > before:
                self.may_be_stuck.add(arena)
        else:
            self.used[arena] |= wanted
            for offset in sorted(wanted)[:: CHUNK - 1]:
                self.counter = (self.counter + 1) % 256
                self.fake.write(arena.address + offset, bytes([self.counter]))
                self.marks[arena][offset] = self.counter

    @rule(arena=arenas, start=st.integers(0, ARENA_CHUNKS * CHUNK), num_bytes=st.integers(0, 3 * CHUNK))
    def release(self, arena: MappedArena, start: int, num_bytes: int) -> None:
        gone = range(start, min(start + num_bytes, ARENA_CHUNKS * CHUNK))
        before = arena.mapped_bytes
        try:
            freed = arena.release(start, len(gone))
        except RuntimeError:
            assert self.kept.get(arena) is not None
            return
        except DeviceError:
            self.may_be_stuck.add(arena)
        else:
            assert arena.mapped_bytes == before - freed
            if not arena.is_asleep:
                self.may_be_stuck.discard(arena)
        self.used[arena].difference_update(gone)
        self.marks[arena] = {at: mark for at, mark in self.marks[arena].items() if at not in gone}

    @rule(arena=arenas, with_copy=st.booleans())
    def sleep(self, arena: MappedArena, with_copy: bool) -> None:
        if arena.is_asleep:
            return
        spans = host_slots(-(-max(1, arena.used_bytes) // 50), 50) if with_copy else None
        try:
            arena.sleep(spans)
        except DeviceError:
            self.may_be_stuck.add(arena)
        if arena.is_asleep:
            self.kept[arena] = spans
            if spans is None:
                self.marks[arena].clear()

    @rule(arena=arenas)
    def wake(self, arena: MappedArena) -> None:
        try:
            arena.wake()
        except OutOfDeviceMemory:
            assert arena.is_asleep
        except DeviceError:
            assert arena.is_asleep
            self.may_be_stuck.add(arena)
        else:
            self.kept.pop(arena, None)

    @rule(arena=consumes(arenas))
    def close(self, arena: MappedArena) -> None:
        self._close(arena)

    @rule()
    def trim(self) -> None:
        try:
            self.pool.trim()
        except DeviceError:
            return
        assert self.pool.idle_bytes == 0

    @rule(num_calls=st.integers(1, 6))
    def a_call_will_fail(self, num_calls: int) -> None:
        self.fake.fails_in = num_calls

    @rule(name=st.sampled_from(["cuMemMap", "cuMemUnmap", "cuMemSetAccess", "cuMemCreate", "cuMemRelease", ""]))
    def calls_fail_until_further_notice(self, name: str) -> None:
        self.fake.fails_always = frozenset({name} - {""})

    @invariant()
    def chunks_are_held_idle_or_gone_and_within_the_budget(self) -> None:
        held, idle = self.pool.held_bytes, self.pool.idle_bytes
        assert held == sum(arena.mapped_bytes for arena in self.used)
        assert held == sum(mapping.num_bytes for mapping in self.fake.mappings.values())
        assert self.fake.used_bytes == held + idle <= self.pool.budget_bytes

    @invariant()
    def exactly_the_used_bytes_have_memory_and_keep_their_content(self) -> None:
        for arena, used in self.used.items():
            assert arena.used_bytes == len(used)
            if arena.is_asleep:
                continue
            chunks = {at // CHUNK for at in used}
            if arena in self.may_be_stuck:
                assert arena.mapped_bytes >= len(chunks) * CHUNK
            else:
                assert arena.mapped_bytes == len(chunks) * CHUNK
            for at, mark in self.marks[arena].items():
                assert self.fake.read(arena.address + at, 1) == bytes([mark])

    def teardown(self) -> None:
        self.fake.fails_in, self.fake.fails_always = 0, frozenset()
        for arena in list(self.used):
            self._close(arena)
        self.pool.trim()
        assert (self.fake.ranges, self.fake.mappings, self.fake.chunks) == ({}, {}, {})

    def _close(self, arena: MappedArena) -> None:
        for _ in range(2):
            try:
                arena.close()
                break
            except DeviceError:
                self.fake.fails_in, self.fake.fails_always = 0, frozenset()
        del self.used[arena], self.marks[arena]
        self.kept.pop(arena, None)
        self.may_be_stuck.discard(arena)


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=60, stateful_step_count=30)
