"""Which workers hold which route keys, as they last told: the beginning of a prompt leads to those that have it.

Written by the news adapter, asked once for each request. Per model a table from key to a bit mask of workers, so that
the look-up of a prompt is a few operations a key however many workers there are. A worker's keys of a model are voided
at once by taking its bit off the living; what is left of them in the table is swept later, a little with each update.

Bounded: a worker that tells too much loses its own oldest keys, and where all together are too many, the one that
told most does. Nothing here knows of time or connections.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from naru_proto.errors import InvalidRequest
from naru_proto.route_keys import KEY_BYTES, unpack_keys

MAX_KEYS = 2_000_000
"""Of all workers together, about 300 MB."""
MAX_WORKER_KEYS = 250_000
"""A cache of four million tokens."""
SWEEP_KEYS = 2
"""Void keys that are swept for each key that comes: they are gone before they can pile up."""
_BATCH_SHARE = 64
"""Of a bound, what is dropped beside the surplus where it is passed: finding the oldest, or the largest, is dear."""


class DamagedUpdate(ValueError):
    """An update that cannot be of a sound stream; what was known of the model on the worker is void."""


class PrefixIndex:
    """Mutable. Counters only grow."""

    def __init__(self, *, max_keys: int = MAX_KEYS, max_worker_keys: int = MAX_WORKER_KEYS) -> None:
        self._max_keys = max_keys
        self._max_worker_keys = max_worker_keys
        self._tables: dict[str, _Table] = {}
        self._holdings: dict[str, dict[str, _Holding]] = {}
        """By worker and model."""
        self._counts: dict[str, int] = {}
        """Keys by worker."""
        self._void: deque[_Holding] = deque()
        self._num_void = 0
        self.num_keys = 0
        """(worker, key) pairs that a look-up can find."""
        self.num_dropped = 0
        """Keys that had to give way to a bound."""

    def match(self, model: str, keys: Sequence[bytes]) -> dict[str, int]:
        """How many leading keys each worker holds; workers that hold none are left out."""
        table = self._tables.get(model)
        return {} if table is None else table.match(keys)

    def epoch(self, worker_id: str, model: str) -> int | None:
        """Under which epoch a worker's keys of a model were told; None: nothing was."""
        holding = self._holdings.get(worker_id, {}).get(model)
        return None if holding is None else holding.epoch

    def num_worker_keys(self, worker_id: str) -> int:
        """Keys that a worker has told and still holds."""
        return self._counts.get(worker_id, 0)

    def update(
        self, worker_id: str, model: str, epoch: int, *, is_snapshot: bool, added: bytes = b"", removed: bytes = b""
    ) -> None:
        """Takes one update in the order of its stream; `added` and `removed` are packed, removals come first.

        Raises:
            DamagedUpdate: no whole keys, an epoch of the past, or the first word of a model and no snapshot.
        """
        holding = self._holdings.get(worker_id, {}).get(model)
        if holding is not None and epoch < holding.epoch:
            raise DamagedUpdate(f"epoch {epoch} of model {model[:80]!r} came behind {holding.epoch}")
        if len(added) % KEY_BYTES or len(removed) % KEY_BYTES:
            self.void(worker_id, model)
            raise DamagedUpdate(f"an update of model {model[:80]!r} has a part of a key")
        if holding is None and not is_snapshot:
            raise DamagedUpdate(f"the first update of model {model[:80]!r} is no snapshot")
        if holding is None or is_snapshot or epoch != holding.epoch:
            self.void(worker_id, model)
            holding = self._open(worker_id, model, epoch)
        self._remove(holding, _unpacked(removed))
        self._add(holding, _unpacked(added))
        self._sweep(SWEEP_KEYS * (1 + len(added) // KEY_BYTES))
        self._hold_bounds(worker_id)

    def void(self, worker_id: str, model: str) -> None:
        """Forgets a worker's keys of a model, however many."""
        holdings = self._holdings.get(worker_id)
        holding = None if holdings is None else holdings.pop(model, None)
        if holdings is None or holding is None:
            return
        if not holdings:
            del self._holdings[worker_id]
        self._count(worker_id, -len(holding.keys))
        holding.table.living &= ~holding.bit
        self._num_void += len(holding.keys)
        self._void.append(holding)

    def void_worker(self, worker_id: str) -> None:
        """Forgets all that a worker has told: its stream broke, or it is gone."""
        for model in tuple(self._holdings.get(worker_id, ())):
            self.void(worker_id, model)

    def check(self) -> None:
        """Asserts that all parts agree (for tests: O(keys))."""
        living = [holding for holdings in self._holdings.values() for holding in holdings.values()]
        assert self.num_keys == sum(len(holding.keys) for holding in living) == sum(self._counts.values())
        assert self._num_void == sum(len(holding.keys) for holding in self._void)
        for table in self._tables.values():
            parts = [holding for holding in (*living, *self._void) if holding.table is table]
            assert table.num_holdings == len(parts) > 0
            assert len({holding.bit for holding in parts}) == len(parts), "two holdings have one bit"
            expected: dict[bytes, int] = {}
            for holding in parts:
                for key in holding.keys:
                    expected[key] = expected.get(key, 0) | holding.bit
            assert table.masks == expected, "the table and what workers hold differ"
            assert table.living == sum(holding.bit for holding in living if holding.table is table)

    # --- parts ----------------------------------------------------------------------------------------------------

    def _open(self, worker_id: str, model: str, epoch: int) -> _Holding:
        table = self._tables.setdefault(model, _Table(model))
        holding = _Holding(worker_id, table, table.take_bit(worker_id), epoch)
        self._holdings.setdefault(worker_id, {})[model] = holding
        return holding

    def _add(self, holding: _Holding, keys: Sequence[bytes]) -> None:
        masks, bit, held = holding.table.masks, holding.bit, holding.keys
        before = len(held)
        for key in keys:
            if key not in held:
                held[key] = None
                masks[key] = masks.get(key, 0) | bit
        self._count(holding.worker_id, len(held) - before)

    def _remove(self, holding: _Holding, keys: Sequence[bytes]) -> None:
        before = len(holding.keys)
        for key in keys:
            if key in holding.keys:
                holding.drop(key)
        self._count(holding.worker_id, len(holding.keys) - before)

    def _count(self, worker_id: str, change: int) -> None:
        self.num_keys += change
        count = self._counts.get(worker_id, 0) + change
        if count:
            self._counts[worker_id] = count
        else:
            self._counts.pop(worker_id, None)

    def _hold_bounds(self, worker_id: str) -> None:
        surplus = self.num_worker_keys(worker_id) - self._max_worker_keys
        if surplus > 0:
            self._drop_oldest(worker_id, surplus + self._max_worker_keys // _BATCH_SHARE)
        surplus = self.num_keys + self._num_void - self._max_keys
        if surplus > 0:
            self._sweep(surplus)
        while self.num_keys + self._num_void > self._max_keys:
            batch = self.num_keys + self._num_void - self._max_keys + self._max_keys // _BATCH_SHARE
            self._drop_oldest(max(self._counts, key=self._counts.__getitem__), batch)

    def _drop_oldest(self, worker_id: str, count: int) -> None:
        """Of a worker, from the model of which it has told most."""
        while count > 0 and self.num_worker_keys(worker_id):
            holding = max(self._holdings[worker_id].values(), key=lambda each: len(each.keys))
            oldest = [key for key, _ in zip(holding.keys, range(count), strict=False)]
            self._remove(holding, oldest)
            self.num_dropped += len(oldest)
            count -= len(oldest)

    def _sweep(self, count: int) -> None:
        while self._void:
            holding = self._void[0]
            while holding.keys and count > 0:
                holding.drop_newest()
                self._num_void -= 1
                count -= 1
            if holding.keys:
                return
            self._void.popleft()
            if holding.table.give_bit(holding.bit):
                del self._tables[holding.table.model]


class _Table:
    """One model's keys."""

    __slots__ = ("_free_bits", "living", "masks", "model", "num_holdings", "owners")

    def __init__(self, model: str) -> None:
        self.model = model
        self.masks: dict[bytes, int] = {}
        """Key to the bits of the holdings that have it, void ones included."""
        self.living = 0
        """Bits of holdings that count."""
        self.owners: dict[int, str] = {}
        self.num_holdings = 0
        self._free_bits: list[int] = []

    def match(self, keys: Sequence[bytes]) -> dict[str, int]:
        found: dict[str, int] = {}
        get, owners = self.masks.get, self.owners
        left = self.living
        for num_held, key in enumerate(keys):
            now = left & get(key, 0)
            if now != left:
                if num_held:
                    self._note(found, left ^ now, num_held)
                if not now:
                    return found
                left = now
        while left and keys:
            bit = left & -left
            found[owners[bit]] = len(keys)
            left ^= bit
        return found

    def take_bit(self, worker_id: str) -> int:
        """A bit for a new holding, which counts from now on."""
        bit = self._free_bits.pop() if self._free_bits else 1 << self.num_holdings
        self.num_holdings += 1
        self.owners[bit] = worker_id
        self.living |= bit
        return bit

    def give_bit(self, bit: int) -> bool:
        """A holding is swept. True: it was the last one."""
        del self.owners[bit]
        self._free_bits.append(bit)
        self.num_holdings -= 1
        return not self.num_holdings

    def _note(self, found: dict[str, int], bits: int, num_held: int) -> None:
        while bits:
            bit = bits & -bits
            found[self.owners[bit]] = num_held
            bits ^= bit


class _Holding:
    """What one worker has told of one model under one epoch."""

    __slots__ = ("bit", "epoch", "keys", "table", "worker_id")

    def __init__(self, worker_id: str, table: _Table, bit: int, epoch: int) -> None:
        self.worker_id = worker_id
        self.table = table
        self.bit = bit
        self.epoch = epoch
        self.keys: dict[bytes, None] = {}
        """Oldest first."""

    def drop(self, key: bytes) -> None:
        """Takes a key that is here off the table."""
        del self.keys[key]
        self._take_off(key)

    def drop_newest(self) -> None:
        """Takes the last key off the table."""
        self._take_off(self.keys.popitem()[0])

    def _take_off(self, key: bytes) -> None:
        masks = self.table.masks
        mask = masks[key] & ~self.bit
        if mask:
            masks[key] = mask
        else:
            del masks[key]


def _unpacked(packed: bytes) -> Sequence[bytes]:
    try:
        return unpack_keys(packed, max_keys=None)
    except InvalidRequest as exc:
        raise DamagedUpdate(exc.message) from exc
