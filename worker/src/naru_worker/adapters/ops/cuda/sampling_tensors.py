"""What the sampler's kernels read: a `SamplingBatch` in one buffer of bytes, which goes to the GPU in one copy.

The buffer is filled in pinned memory by numpy alone; `SamplingTensors` are views of its copy on the device. A layout
has room to spare, so that it and its views stay the same from step to step.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from naru_worker.adapters.ops.cuda.kernels.sampling_numbers import DRAWS, EDITED, IMPOSSIBLE, SCORED
from naru_worker.adapters.ops.protocol import Int32Array, SamplingBatch
from naru_worker.adapters.ops.sampling_ref import GREEDY_BELOW

_ALIGNMENT = 16
_SPARE_PENALTIES = 256
"""Tokens to be penalised come one by one, and make a new layout once in so many."""
_TYPES = {"i4": torch.int32, "f4": torch.float32, "i8": torch.int64}


@dataclass(frozen=True, slots=True)
class SamplingLayout:
    """Room for the entries of a batch."""

    num_rows: int
    num_biases: int
    num_penalties: int
    num_banned: int
    num_masks: int
    words_per_mask: int

    @staticmethod
    def of(batch: SamplingBatch) -> SamplingLayout:
        """The room that a batch needs, and some more for what grows with each token."""
        shape = (0, 0) if batch.masks is None else batch.masks.words.shape
        num_penalties = -(-len(batch.penalty_ids) // _SPARE_PENALTIES) * _SPARE_PENALTIES
        return SamplingLayout(
            len(batch.target), len(batch.bias_ids), num_penalties, len(batch.banned_ids), shape[0], shape[1]
        )

    def fits(self, batch: SamplingBatch) -> bool:
        """Whether a batch has no more entries than there is room for, and masks of the same width."""
        asked = SamplingLayout.of(batch)
        sizes = ("num_rows", "num_biases", "num_banned", "num_masks")
        has_words = asked.num_masks == 0 or asked.words_per_mask == self.words_per_mask
        has_room = len(batch.penalty_ids) <= self.num_penalties
        return has_words and has_room and all(getattr(asked, name) <= getattr(self, name) for name in sizes)

    def places(self) -> dict[str, tuple[int, str, int]]:
        """First byte, type and number of entries of each field of `SamplingTensors`. Read only."""
        return _places(self)

    @property
    def num_bytes(self) -> int:
        """Size of the buffer, at least one alignment."""
        offset, kind, count = list(self.places().values())[-1]
        return max(_ALIGNMENT, offset + -(-count * int(kind[1]) // _ALIGNMENT) * _ALIGNMENT)


@lru_cache(maxsize=64)
def _places(layout: SamplingLayout) -> dict[str, tuple[int, str, int]]:
    rows = layout.num_rows
    counts = {"seed": rows, "counter": rows}
    counts |= dict.fromkeys((f.name for f in fields(SamplingTensors) if f.name not in counts), rows)
    counts |= dict.fromkeys(("bias_start", "penalty_start", "banned_start"), rows + 1)
    counts |= dict.fromkeys(("bias_ids", "bias_values"), layout.num_biases)
    counts |= dict.fromkeys(("penalty_ids", "penalty_output_counts"), layout.num_penalties)
    counts |= {"banned_ids": layout.num_banned, "mask_words": layout.num_masks * layout.words_per_mask}
    found, offset = {}, 0
    for name, count in counts.items():
        kind = "i8" if name in ("seed", "counter") else "f4" if name in _FLOATS else "i4"
        found[name] = (offset, kind, count)
        offset += -(-count * int(kind[1]) // _ALIGNMENT) * _ALIGNMENT
    return found


@dataclass(frozen=True, slots=True)
class SamplingKinds:
    """What the rows of a batch need at most: kernels that none of them needs are not launched."""

    has_edits: bool
    has_masks: bool
    has_draws: bool
    """Whether a row's token is left to chance."""
    has_scores: bool
    max_logprobs: int
    vocab_limit: int

    @staticmethod
    def of(batch: SamplingBatch, flags: Int32Array) -> SamplingKinds:
        """Of a batch as it is; `flags`: its `row_flags`."""
        return SamplingKinds(
            has_edits=bool((flags & EDITED).any()),
            has_masks=batch.masks is not None,
            has_draws=bool((flags & DRAWS).any()),
            has_scores=bool((flags & SCORED).any()),
            max_logprobs=max(0, batch.max_logprobs),
            vocab_limit=batch.vocab_limit,
        )


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """`SamplingBatch` on the device, field by field. Rows beyond the batch's have no flags."""

    seed: Tensor  # (R,) int64, the bits of the unsigned number
    counter: Tensor  # (R,) int64
    flags: Tensor  # (R,) int32, of `kernels.sampling_numbers`
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    repetition_penalty: Tensor
    target: Tensor
    num_logprobs: Tensor
    mask_rows: Tensor  # (R,) int32, -1: none
    bias_start: Tensor  # (R + 1,)
    penalty_start: Tensor
    banned_start: Tensor
    bias_ids: Tensor
    bias_values: Tensor
    penalty_ids: Tensor
    penalty_output_counts: Tensor
    banned_ids: Tensor
    mask_words: Tensor  # (masks, W) int32

    @staticmethod
    def views(layout: SamplingLayout, buffer: Tensor) -> SamplingTensors:
        """Of a buffer of bytes (uint8, on any device) that `pack` filled, or will."""
        parts, wide = {}, {kind: buffer.view(dtype) for kind, dtype in _TYPES.items()}
        for name, (offset, kind, count) in layout.places().items():
            first = offset // int(kind[1])
            parts[name] = wide[kind][first : first + count]
        parts["mask_words"] = parts["mask_words"].view(layout.num_masks, layout.words_per_mask)
        return SamplingTensors(**parts)


_FLOATS = frozenset("temperature top_p min_p presence_penalty frequency_penalty repetition_penalty bias_values".split())


def row_flags(batch: SamplingBatch, *, has_pending: bool = False) -> Int32Array:
    """(R,) what each row needs; `has_pending`: one more token is to be penalised than the batch counts."""
    is_drawn = batch.target < 0
    is_greedy = (batch.temperature < np.float32(GREEDY_BELOW)) | (batch.top_k == 1)
    is_greedy |= (batch.top_p == 0.0) | (batch.min_p == 1.0)
    is_edited = np.zeros_like(is_drawn)
    for starts in (batch.bias_start, batch.penalty_start, batch.banned_start):
        is_edited |= starts[1:] > starts[:-1]
    if has_pending:
        is_edited |= (batch.presence_penalty != 0.0) | (batch.frequency_penalty != 0.0)
        is_edited |= batch.repetition_penalty != 1.0
    flags = np.zeros(len(is_drawn), np.int32)
    is_lost = np.zeros_like(is_drawn)
    if batch.masks is not None:
        is_edited |= batch.masks.rows >= 0
        is_lost = is_drawn & (batch.masks.rows >= 0) & (batch.masks.gate[0] != 1)
    flags[is_drawn & ~is_greedy] |= DRAWS
    flags[is_drawn & is_edited] |= EDITED
    flags[(batch.num_logprobs >= 0) | ~is_drawn] |= SCORED
    flags[is_lost] = IMPOSSIBLE
    return flags


def pack(batch: SamplingBatch, layout: SamplingLayout, buffer: npt.NDArray[np.uint8], flags: Int32Array) -> None:
    """Writes a batch into a buffer of `layout.num_bytes` bytes, of the host.

    Masks have to be there, or given up: rows whose gate is not open get token -1. `flags`: the batch's `row_flags`;
    with `has_pending` the batch was counted for penalties before the last step's tokens were known, and `sample` gets
    them.
    """
    assert layout.fits(batch) and len(buffer) >= layout.num_bytes
    places = layout.places()

    def part(name: str) -> npt.NDArray[np.generic]:
        offset, kind, count = places[name]
        return buffer[offset : offset + count * int(kind[1])].view(kind)

    num_rows = len(batch.target)
    part("flags")[num_rows:] = 0
    part("flags")[:num_rows] = flags
    part("seed")[:num_rows] = batch.seed.view(np.int64)
    pack_counters(batch, layout, buffer)
    for name in ("bias_start", "penalty_start", "banned_start"):
        starts = part(name)
        starts[: num_rows + 1] = getattr(batch, name)
        starts[num_rows + 1 :] = starts[num_rows]
    written = {"flags", "seed", "counter", "bias_start", "penalty_start", "banned_start", "mask_rows", "mask_words"}
    for name in places:
        if name not in written:
            values = getattr(batch, name)
            part(name)[: len(values)] = values
    if batch.masks is None:
        part("mask_rows")[:] = -1
        return
    part("mask_rows")[:num_rows] = batch.masks.rows
    words = batch.masks.words
    part("mask_words")[: words.size] = words.view(np.int32).ravel()


def pack_counters(batch: SamplingBatch, layout: SamplingLayout, buffer: npt.NDArray[np.uint8]) -> slice:
    """Writes the rows' counters alone; returns the bytes that they take."""
    offset, _, count = layout.places()["counter"]
    place = slice(offset, offset + 8 * count)
    buffer[place].view(np.int64)[: len(batch.counter)] = batch.counter.view(np.int64)
    return place
