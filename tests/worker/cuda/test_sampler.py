"""The sampler's kernels under Triton's interpreter, against the plain reference, token by token."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
from sampling_batches import sampling_batch, token_masks

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from naru_worker.adapters.ops import sampling_ref  # noqa: E402
from naru_worker.adapters.ops.cuda.kernels.sampler import SamplerSpace, sample  # noqa: E402
from naru_worker.adapters.ops.cuda.kernels.sampling_levels import CANDIDATES  # noqa: E402
from naru_worker.adapters.ops.cuda.kernels.sampling_numbers import CHUNK, uniform  # noqa: E402
from naru_worker.adapters.ops.cuda.sampling_tensors import (  # noqa: E402
    SamplingKinds,
    SamplingLayout,
    SamplingTensors,
    pack,
    row_flags,
)
from naru_worker.adapters.ops.protocol import SamplingBatch  # noqa: E402

Logits = npt.NDArray[np.float32]


def sampled(
    logits: Tensor,
    batch: SamplingBatch,
    layout: SamplingLayout | None = None,
    kinds: SamplingKinds | None = None,
    pending: Tensor | None = None,
) -> SamplerSpace:
    """Results of the kernels. Whatever they do not write is not a number, or 77."""
    layout = layout or SamplingLayout.of(batch)
    flags = row_flags(batch, has_pending=pending is not None)
    kinds = kinds or SamplingKinds.of(batch, flags)
    buffer = np.full(layout.num_bytes, 0x55, np.uint8)
    pack(batch, layout, buffer, flags)
    tensors = SamplingTensors.views(layout, torch.from_numpy(buffer))
    space = SamplerSpace.make(len(logits), batch.vocab_limit, kinds.max_logprobs, "cpu")
    for field in dataclasses.fields(space):
        scratch = getattr(space, field.name)
        scratch.fill_(torch.nan if scratch.is_floating_point() else 77)
    sample(logits, tensors, kinds, space, pending=pending)
    return space


def assert_as_reference(logits: Logits, batch: SamplingBatch, dtype: Any = None) -> None:
    given = torch.from_numpy(logits) if dtype is None else torch.from_numpy(logits).to(dtype)
    expected, actual = sampling_ref.sample(given.float().numpy(), batch), sampled(given, batch)
    np.testing.assert_array_equal(actual.token_ids.numpy(), expected.token_ids)
    for i in np.flatnonzero((batch.num_logprobs >= 0) | (batch.target >= 0)):
        if expected.token_ids[i] < 0:
            continue
        assert actual.ranks[i] == expected.ranks[i]
        np.testing.assert_allclose(actual.logprobs[i].numpy(), expected.logprobs[i], atol=2e-5)
        np.testing.assert_array_equal(actual.top_ids[i].numpy(), expected.top_ids[i])
        np.testing.assert_allclose(actual.top_logprobs[i].numpy(), expected.top_logprobs[i], atol=2e-5)


def random_row(rng: np.random.Generator, vocab: int) -> dict[str, Any]:
    """Any setting beside any other, those that do nothing more often."""

    def pick(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    def ids(most: int) -> list[int]:
        return [int(i) for i in rng.choice(vocab + 3, int(rng.integers(0, most)), replace=False)]

    return {
        "temperature": pick(0.0, 1e-7, 1e-4, 1e-2, 0.3, 1.0, 1.0, 1.7, 100.0),
        "top_k": pick(0, 0, 0, 1, 2, 5, 50, 10**9),
        "top_p": pick(0.0, 1e-9, 0.1, 0.5, 0.93, 1.0, 1.0),
        "min_p": pick(0.0, 0.0, 0.0, 0.01, 0.3, 1.0),
        "presence_penalty": pick(0.0, 0.5, -2.0),
        "frequency_penalty": pick(0.0, 0.25, 2.0),
        "repetition_penalty": pick(1.0, 2.0, 0.5),
        "seed": int(rng.integers(2**64, dtype=np.uint64)),
        "counter": int(rng.integers(2**40)),
        "num_logprobs": int(rng.integers(-1, 6)),
        "target": pick(-1, -1, -1, -1, 0, vocab + 5),
        "bias": [(i, pick(-100.0, -1.0, 2.5, 100.0)) for i in [*ids(3), 7, 7][: int(rng.integers(0, 4))]],
        "penalties": [(i, int(rng.integers(0, 4))) for i in ids(6)],
        "banned": ids(4),
        "mask": pick(None, None, ids(6), list(range(20, vocab))),
    }


@pytest.mark.parametrize("shape", ["flat", "steep", "ties"])
def test_any_batch_is_sampled_as_the_reference_does(shape: str) -> None:
    rng = np.random.default_rng(len(shape))
    batch = sampling_batch([random_row(rng, 300) for _ in range(20)], 300, max_logprobs=5)
    logits = rng.standard_normal((20, 301)).astype(np.float32) * {"flat": 0.1, "steep": 8.0, "ties": 3.0}[shape]
    logits = np.round(logits) if shape == "ties" else logits
    logits[rng.random(logits.shape) < 0.02] = -np.inf
    logits[rng.random(logits.shape) < 0.01] = np.nan
    assert_as_reference(logits, batch)


@pytest.mark.parametrize("scale", [0.01, 4.0])
def test_thresholds_are_found_over_several_chunks_and_beyond_the_candidates(scale: float) -> None:
    """With little difference between the tokens what decides lies behind more of them than are moved together."""
    vocab = 2 * CHUNK + 77
    assert vocab > 3 * CANDIDATES
    cuts: list[dict[str, Any]] = [
        {},
        {"top_p": 0.9},
        {"top_k": 3 * CANDIDATES, "top_p": 0.95},
        {"top_k": 40, "min_p": 0.97},
        {"bias": [(5000, 9.0)]},
    ]
    cuts = cuts if scale < 1.0 else [cuts[0], cuts[2]]
    rows = [{"seed": i, "num_logprobs": i % 4, **cut} for i, cut in enumerate(cuts)]
    rng = np.random.default_rng(1)
    logits = (rng.standard_normal((len(rows), vocab)) * scale).astype(np.float32)
    assert_as_reference(logits, sampling_batch(rows, vocab - 5, max_logprobs=3))


def test_half_precision_logits_are_looked_at_as_they_are() -> None:
    rng = np.random.default_rng(3)
    rows: list[dict[str, Any]] = [{"seed": i, "num_logprobs": 2, "top_p": 0.8 + 0.02 * i} for i in range(6)]
    rows += [{"temperature": 0.0, "mask": [4, 9, 30]}, {"target": 3}, {"bias": [(8, 3.0)], "seed": 4}]
    logits = (rng.standard_normal((len(rows), 500)) * 2).astype(np.float32)
    assert_as_reference(logits, sampling_batch(rows, 500, max_logprobs=2), torch.float16)


def test_room_to_spare_changes_nothing_and_rows_beyond_the_batch_do_no_harm() -> None:
    rng = np.random.default_rng(4)
    rows = [random_row(rng, 60) for _ in range(8)]
    batch = sampling_batch(rows, 60, max_logprobs=5)
    logits = torch.from_numpy(rng.standard_normal((8, 60)).astype(np.float32))
    layout = SamplingLayout(num_rows=11, num_biases=50, num_penalties=90, num_banned=70, num_masks=9, words_per_mask=2)
    assert layout.fits(batch)
    kinds = SamplingKinds(True, True, True, True, 5, 60)
    padded = torch.cat([logits, torch.full((3, 60), torch.nan)])
    exact, roomy = sampled(logits, batch), sampled(padded, batch, layout, kinds)
    assert torch.equal(exact.token_ids, roomy.token_ids[:8])
    asked = torch.from_numpy(batch.num_logprobs) >= 0
    assert torch.equal(exact.top_ids[asked], roomy.top_ids[:8][asked])
    assert torch.equal(exact.ranks[asked], roomy.ranks[:8][asked])
    alone = [int(sampled(logits[i : i + 1], sampling_batch([row], 60, 5)).token_ids) for i, row in enumerate(rows)]
    assert exact.token_ids.tolist() == alone


def test_a_layout_says_what_does_not_fit_it() -> None:
    batch = sampling_batch([{"bias": [(1, 2.0)], "mask": [1]}], 60)
    layout = SamplingLayout.of(batch)
    assert layout.fits(batch)
    for change in ({"num_rows": 0}, {"num_biases": 0}, {"num_masks": 0}, {"words_per_mask": 3}):
        assert not dataclasses.replace(layout, **change).fits(batch)


def test_nothing_possible_gives_the_lowest_id_that_is_allowed() -> None:
    vocab = CHUNK + 10
    rows: list[dict[str, Any]] = [
        {},
        {"banned": [0, 1]},
        {"banned": [0], "temperature": 0.0, "mask": [0, 5, 8]},
        {"banned": [5, 5], "mask": [5]},
        {"mask": [vocab - 2], "num_logprobs": 1},
        {"target": 4, "num_logprobs": 2},
    ]
    logits = np.full((len(rows), vocab), -np.inf, np.float32)
    logits[:, ::3] = np.nan
    assert_as_reference(logits, sampling_batch(rows, vocab, max_logprobs=2))
    everything = sampling_batch([{"banned": [0, 1, 2]}], 3)
    assert_as_reference(logits[:1, :3].copy(), everything)


def test_plus_infinity_wins_without_nan() -> None:
    logits = np.array([[0.0, np.inf, 5.0, -np.inf]] * 2, np.float32)
    with np.errstate(all="ignore"):
        assert_as_reference(logits, sampling_batch([{"num_logprobs": 2}, {"temperature": 0.0}], 4, max_logprobs=2))


def test_rows_whose_mask_never_came_have_no_token() -> None:
    rows: list[dict[str, Any]] = [{"mask": [3], "num_logprobs": 0}, {"temperature": 0.0}, {"target": 2, "mask": [1]}]
    batch = sampling_batch(rows, 8)
    masks = token_masks([[3], None, [1]], 8, is_open=False)
    assert masks is not None
    masks.gate[0] = -1
    batch = dataclasses.replace(batch, masks=masks)
    logits = torch.arange(8).float().repeat(3, 1)
    assert sampled(logits, batch).token_ids.tolist() == [-1, 7, 2]


def test_a_token_that_the_host_does_not_know_yet_is_penalised_as_if_it_did() -> None:
    """Seen before in the output, in the prompt, or never; none; one beyond the vocabulary; and no penalties at all."""
    penalties: dict[str, Any] = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
    before = [[(3, 2), (5, 1)], [(3, 0)], [], [(3, 2)], [(3, 2)], []]
    after = [[(3, 3), (5, 1)], [(3, 1)], [(3, 1)], [(3, 2)], [(3, 2)], []]
    pending = torch.tensor([3, 3, 3, -1, 30, 3], dtype=torch.int32)

    def batch(counted: list[list[tuple[int, int]]]) -> SamplingBatch:
        rows = [{"seed": i, "penalties": entries, **penalties} for i, entries in enumerate(counted)]
        return sampling_batch([*rows[:5], {"temperature": 0.0}], 20)

    logits = torch.zeros(6, 20)
    logits[:, 3] = torch.tensor([4.0, 2.0, 3.0, 4.0, 4.0, 1.0])
    early, late = sampled(logits, batch(before), pending=pending), sampled(logits, batch(after))
    assert torch.equal(early.token_ids, late.token_ids)
    assert early.work is not None and late.work is not None
    assert torch.equal(early.work[:5, :20], late.work[:5, :20])


def test_random_numbers_are_those_of_the_reference() -> None:
    @triton.jit  # type: ignore[untyped-decorator]
    def fill(seeds: Any, counters: Any, out: Any) -> None:
        row = tl.program_id(0)
        tl.store(out + row, uniform(tl.load(seeds + row), tl.load(counters + row)))

    pairs = [(0, 0), (1, 0), (2**64 - 1, 2**64 - 1), (2**63, 5 << 32 | 7), (12345678901234567890, 99)]
    seeds, counters = (
        torch.from_numpy(np.array(column, np.uint64).view(np.int64)) for column in zip(*pairs, strict=True)
    )
    out = torch.empty(len(pairs), dtype=torch.float64)
    fill[(len(pairs),)](seeds, counters, out)
    assert out.tolist() == [sampling_ref.uniform(*pair) for pair in pairs]
