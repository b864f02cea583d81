"""The native sampler of every variant against the plain reference, and the reference against what is documented."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampling_batches import sampling_batch, token_masks

from naru_worker.adapters.ops import sampling_ref
from naru_worker.adapters.ops.cpu_batch import address, sampling_inputs, sampling_outputs
from naru_worker.adapters.ops.native_lib import load_variant
from naru_worker.adapters.ops.protocol import SampleOutput, SamplingBatch

pytestmark = pytest.mark.timeout(600)  # the first use of a variant compiles it

Logits = npt.NDArray[np.float32]
Sampler = Callable[[Logits, SamplingBatch], SampleOutput]
PROBABILITIES = (0.40, 0.22, 0.14, 0.08, 0.06, 0.05, 0.05)


def native(variant: str) -> Sampler:
    library = load_variant(variant)

    def sample(logits: Logits, batch: SamplingBatch) -> SampleOutput:
        logits = np.ascontiguousarray(logits)
        inputs, alive = sampling_inputs(batch, len(logits))
        output, outputs = sampling_outputs(len(logits), batch.max_logprobs)
        library.naru_sample(ctypes.byref(inputs), ctypes.byref(outputs), len(logits), address(logits), logits.shape[1])
        del alive
        return output

    return sample


@pytest.fixture
def sampler(variant: str) -> Sampler:
    return native(variant)


def one(sampler: Sampler, logits: Any, vocab_limit: int | None = None, **row: Any) -> int:
    array = np.array([logits], np.float32)
    return int(sampler(array, sampling_batch([row], vocab_limit or array.shape[1])).token_ids[0])


ROW = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-7, 1e-4, 1e-2, 0.3, 1.0, 1.7, 100.0]),
        "top_k": st.sampled_from([0, 1, 2, 5, 50, 10**9]),
        "top_p": st.sampled_from([0.0, 1e-9, 0.1, 0.5, 0.93, 1.0]),
        "min_p": st.sampled_from([0.0, 0.01, 0.3, 1.0]),
        "presence_penalty": st.sampled_from([0.0, 0.5, -2.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.25, 2.0]),
        "repetition_penalty": st.sampled_from([1.0, 2.0, 0.5]),
        "seed": st.integers(0, 2**64 - 1),
        "counter": st.integers(0, 2**40),
        "num_logprobs": st.integers(-1, 5),
        "target": st.sampled_from([-1, -1, -1, 0]),
        "bias": st.lists(st.tuples(st.integers(0, 299), st.sampled_from([-100.0, -1.0, 2.5, 100.0])), max_size=3),
        "penalties": st.lists(
            st.tuples(st.integers(0, 299), st.integers(0, 4)), max_size=6, unique_by=lambda entry: entry[0]
        ),
        "banned": st.lists(st.integers(0, 299), max_size=4),
        "mask": st.none() | st.lists(st.integers(0, 299), max_size=5) | st.just(list(range(20, 300))),
    }
)


@given(
    rows=st.lists(ROW, min_size=1, max_size=4),
    seed=st.integers(0, 1000),
    shape=st.sampled_from("flat steep ties".split()),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_native_and_reference_agree_on_any_batch(
    sampler: Sampler, rows: list[dict[str, Any]], seed: int, shape: str
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((len(rows), 301)).astype(np.float32) * {"flat": 0.1, "steep": 8.0, "ties": 3.0}[shape]
    if shape == "ties":
        logits = np.round(logits)
    logits[rng.random(logits.shape) < 0.02] = -np.inf
    logits[rng.random(logits.shape) < 0.01] = np.nan
    batch = sampling_batch(rows, 300, max_logprobs=5)
    expected, actual = sampling_ref.sample(logits, batch), sampler(logits, batch)
    np.testing.assert_array_equal(actual.token_ids, expected.token_ids)
    for i, row in enumerate(rows):
        if row["num_logprobs"] < 0 and row["target"] < 0:
            continue
        assert actual.ranks[i] == expected.ranks[i]
        np.testing.assert_allclose(actual.logprobs[i], expected.logprobs[i], atol=1e-5)
        np.testing.assert_array_equal(actual.top_ids[i], expected.top_ids[i])
        np.testing.assert_allclose(actual.top_logprobs[i], expected.top_logprobs[i], atol=1e-5)


def test_native_and_reference_agree_on_a_large_vocabulary(sampler: Sampler) -> None:
    rng = np.random.default_rng(1)
    logits = (rng.standard_normal((12, 50_000)) * 4).astype(np.float32)
    rows = [
        {"temperature": t, "top_k": k, "top_p": p, "seed": i, "counter": 9, "num_logprobs": 3}
        for i, (t, k, p) in enumerate((t, k, p) for t in (0.5, 1.0, 3.0) for k in (0, 40) for p in (1.0, 0.9))
    ]
    batch = sampling_batch(rows, 49_990, max_logprobs=3)
    expected, actual = sampling_ref.sample(logits, batch), sampler(logits, batch)
    np.testing.assert_array_equal(actual.token_ids, expected.token_ids)
    np.testing.assert_array_equal(actual.ranks, expected.ranks)
    np.testing.assert_array_equal(actual.top_ids, expected.top_ids)
    np.testing.assert_allclose(actual.logprobs, expected.logprobs, atol=1e-5)


def test_a_mask_costs_unmasked_rows_nothing_and_large_ones_agree(sampler: Sampler) -> None:
    rng = np.random.default_rng(2)
    logits = (rng.standard_normal((6, 50_000)) * 4).astype(np.float32)
    masks: list[list[int] | None] = [None, [7], list(range(0, 49_990, 3)), list(range(100, 49_990)), [49_989, 3], None]
    rows = [{"temperature": t, "seed": i, "mask": masks[i]} for i, t in enumerate((0.0, 1.0, 1.0, 0.0, 2.0, 1.0))]
    expected = sampling_ref.sample(logits, sampling_batch(rows, 49_990))
    np.testing.assert_array_equal(sampler(logits, sampling_batch(rows, 49_990)).token_ids, expected.token_ids)
    plain = sampler(logits, sampling_batch([{**row, "mask": None} for row in rows], 49_990)).token_ids
    assert (expected.token_ids[0], expected.token_ids[5]) == (plain[0], plain[5])


@pytest.fixture(params=["reference", "native"])
def any_sampler(request: pytest.FixtureRequest) -> Sampler:
    from naru_worker.native.isa import detect_isa

    return sampling_ref.sample if request.param == "reference" else native(detect_isa())


@pytest.mark.parametrize("temperature", [0.0, 1e-7, 1e-6])
def test_tiny_temperatures_are_greedy_and_ties_go_to_the_lowest_id(any_sampler: Sampler, temperature: float) -> None:
    assert one(any_sampler, [1.0, 3.0, 3.0, 2.0], temperature=temperature, seed=5) == 1


@pytest.mark.parametrize("row", [{"top_p": 0.0}, {"top_p": 1e-9}, {"min_p": 1.0}, {"top_k": 1}, {"temperature": 1e-4}])
def test_settings_that_leave_one_candidate_keep_the_best(any_sampler: Sampler, row: dict[str, Any]) -> None:
    for counter in range(30):
        assert one(any_sampler, [0.0, 0.5, 0.4], counter=counter, **row) == 1


def test_a_hot_row_still_gives_valid_ids_and_spreads(any_sampler: Sampler) -> None:
    seen = {one(any_sampler, [0.0, 1.0, 2.0], temperature=100.0, counter=counter) for counter in range(60)}
    assert seen == {0, 1, 2}


@pytest.mark.parametrize("bad", [-math.inf, math.nan])
def test_impossible_tokens_are_never_drawn(any_sampler: Sampler, bad: float) -> None:
    assert {one(any_sampler, [bad, 0.0, bad], temperature=2.0, counter=counter) for counter in range(20)} == {1}


def test_nothing_possible_gives_the_lowest_id_that_is_allowed(any_sampler: Sampler) -> None:
    nothing = [math.nan, -math.inf, math.nan]
    for temperature in (0.0, 1.0):
        assert one(any_sampler, nothing, temperature=temperature) == 0
        assert one(any_sampler, nothing, temperature=temperature, banned=[0, 1]) == 2
        assert one(any_sampler, nothing, temperature=temperature, banned=[0, 1, 2]) == 0


def test_plus_infinity_wins_without_nan(any_sampler: Sampler) -> None:
    assert one(any_sampler, [0.0, math.inf, 5.0], num_logprobs=0) == 1


def test_ids_above_the_vocabulary_are_neither_drawn_nor_reported(any_sampler: Sampler) -> None:
    logits = np.array([[1.0, 2.0, 0.0, 99.0, 99.0]], np.float32)
    for temperature in (0.0, 5.0):
        row = {"temperature": temperature, "num_logprobs": 5, "counter": 3}
        output = any_sampler(logits, sampling_batch([row], 3, max_logprobs=5))
        assert output.token_ids[0] < 3
        assert output.top_ids[0].tolist() == [1, 0, 2, -1, -1]


def support(sampler: Sampler, **row: Any) -> set[int]:
    logits = np.log(np.array([PROBABILITIES], np.float32))
    batch = [{"seed": 3, "counter": counter, **row} for counter in range(400)]
    drawn = sampler(np.repeat(logits, 400, axis=0), sampling_batch(batch, len(PROBABILITIES)))
    return set(drawn.token_ids.tolist())


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        # Renormalised after top-k: 0.40 / 0.76 = 0.53 and 0.22 / 0.76 = 0.29 reach 0.75.
        ({"top_k": 3, "top_p": 0.75}, {0, 1}),
        ({"top_p": 0.75}, {0, 1, 2}),
        ({"min_p": 0.3}, {0, 1, 2}),
        ({"min_p": 0.3, "top_k": 2}, {0, 1}),
        ({"top_k": 6}, {0, 1, 2, 3, 4, 5}),  # of the two equal last ones the lower id stays
        ({}, {0, 1, 2, 3, 4, 5, 6}),
    ],
)
def test_cuts_follow_the_documented_order(any_sampler: Sampler, row: dict[str, Any], expected: set[int]) -> None:
    assert support(any_sampler, **row) == expected


def test_draws_follow_the_distribution(any_sampler: Sampler) -> None:
    """20000 draws; each frequency within five standard deviations (a chance failure: below one in 100000)."""
    count = 20_000
    logits = np.repeat(np.log(np.array([PROBABILITIES], np.float32)), count, axis=0)
    rows = [{"seed": 11, "counter": counter} for counter in range(count)]
    drawn = Counter(any_sampler(logits, sampling_batch(rows, len(PROBABILITIES))).token_ids.tolist())
    for token, probability in enumerate(PROBABILITIES):
        deviation = math.sqrt(count * probability * (1 - probability))
        assert abs(drawn[token] - count * probability) < 5 * deviation


def test_a_row_draws_the_same_whatever_stands_beside_it(any_sampler: Sampler) -> None:
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((6, 200)).astype(np.float32)
    rows: list[dict[str, Any]] = [
        {"seed": 42, "counter": 7},
        {"repetition_penalty": 1.8, "penalties": [(3, 1), (4, 0)], "temperature": 0.0},
        {"top_p": 0.3, "seed": 1},
        {"banned": [5, 6], "min_p": 0.2},
        {"bias": [(9, 50.0)]},
        {"temperature": 0.0},
    ]
    together = any_sampler(logits, sampling_batch(rows, 200)).token_ids
    alone = [any_sampler(logits[i : i + 1], sampling_batch([row], 200)).token_ids[0] for i, row in enumerate(rows)]
    backwards = any_sampler(logits[::-1], sampling_batch(rows[::-1], 200)).token_ids[::-1]
    assert together.tolist() == alone == backwards.tolist()


def test_penalties_and_bias_follow_their_formulas(any_sampler: Sampler) -> None:
    def best(logits: list[float], **row: Any) -> int:
        return one(any_sampler, logits, temperature=0.0, **row)

    # A positive logit is divided, a negative one multiplied; the prompt counts.
    assert best([2.0, 1.5], repetition_penalty=2.0, penalties=[(0, 0)]) == 1
    assert best([-1.0, -1.5], repetition_penalty=2.0, penalties=[(0, 0)]) == 1
    # Presence and frequency count the output only.
    assert best([2.0, 1.5], presence_penalty=1.0, penalties=[(0, 0)]) == 0
    assert best([2.0, 1.5], presence_penalty=1.0, penalties=[(0, 1)]) == 1
    assert best([2.0, 1.5], frequency_penalty=0.2, penalties=[(0, 2)]) == 0
    assert best([2.0, 1.5], frequency_penalty=0.2, penalties=[(0, 3)]) == 1
    assert best([2.0, 1.5], bias=[(1, 0.75)]) == 1
    assert best([2.0, 1.5, 1.0], banned=[0]) == 1
    # A bias does not lift a ban.
    assert best([2.0, 1.5], bias=[(0, 100.0)], banned=[0]) == 1


def test_logprobs_are_those_of_the_raw_distribution(any_sampler: Sampler) -> None:
    logits = np.log(np.array([PROBABILITIES], np.float32)) + 3
    row = {"temperature": 0.0, "bias": [(6, 100.0)], "num_logprobs": 2}
    output = any_sampler(logits, sampling_batch([row], 7, max_logprobs=2))
    assert (output.token_ids[0], output.ranks[0]) == (6, 7), "of two equal logits the lower id ranks first"
    np.testing.assert_allclose(output.logprobs[0], math.log(0.05), atol=1e-5)
    assert output.top_ids[0].tolist() == [0, 1]
    np.testing.assert_allclose(output.top_logprobs[0], np.log([0.40, 0.22]), atol=1e-5)


def test_a_target_is_scored_and_nothing_is_drawn(any_sampler: Sampler) -> None:
    logits = np.array([[0.0, -math.inf, 1.0]], np.float32)
    output = any_sampler(logits, sampling_batch([{"target": 1, "num_logprobs": 0}], 3))
    assert (output.token_ids[0], output.logprobs[0], output.ranks[0]) == (1, -9999.0, 3)


def test_uniform_numbers_are_the_same_in_both_and_differ_by_seed_and_counter(variant: str) -> None:
    library = load_variant(variant)
    points = [(0, 0), (0, 1), (1, 0), (2**64 - 1, 2**64 - 1), (42, 7 << 32)]
    values = [sampling_ref.uniform(seed, counter) for seed, counter in points]
    assert values == [library.naru_uniform(seed, counter) for seed, counter in points]
    assert len(set(values)) == len(points) and all(0.0 <= value < 1.0 for value in values)


def test_uniform_numbers_cover_the_interval_evenly() -> None:
    """Sixteen bins of 4096 numbers, along seeds and along counters: within five standard deviations."""
    for along in ([(seed, 3) for seed in range(4096)], [(3, counter) for counter in range(4096)]):
        bins = Counter(int(sampling_ref.uniform(*point) * 16) for point in along)
        assert all(abs(bins[i] - 256) < 5 * math.sqrt(256) for i in range(16))


def test_a_mask_comes_before_bias_and_logprobs_are_those_of_the_raw_distribution(any_sampler: Sampler) -> None:
    logits = np.array([[5.0, 1.0, 2.0, 0.0]], np.float32)
    row = {"temperature": 0.0, "mask": [1, 3], "bias": [(0, 100.0), (3, 2.0)], "num_logprobs": 2}
    output = any_sampler(logits, sampling_batch([row], 4, max_logprobs=2))
    raw = logits[0] - math.log(np.exp(logits[0]).sum())
    assert output.token_ids.tolist() == [3]
    assert output.ranks.tolist() == [4]
    np.testing.assert_allclose(output.logprobs, raw[3:], atol=1e-5)
    assert output.top_ids.tolist() == [[0, 2]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_a_ban_or_nan_leaves_nothing_of_a_mask_the_mask_wins(any_sampler: Sampler, temperature: float) -> None:
    assert one(any_sampler, [1.0, 1.0, 1.0], temperature=temperature, mask=[2], banned=[2]) == 2
    assert one(any_sampler, [1.0, 1.0, 1.0], temperature=temperature, mask=[1, 2], banned=[1]) == 2
    assert one(any_sampler, [1.0, math.nan, -math.inf], temperature=temperature, mask=[1, 2]) == 1
    assert one(any_sampler, [1.0, math.nan, -math.inf], temperature=temperature, mask=[1, 2], banned=[1]) == 2


def test_a_row_whose_mask_does_not_come_is_given_up_and_the_others_are_sampled(any_sampler: Sampler) -> None:
    batch = sampling_batch([{"temperature": 0.0}] * 3, 4)
    batch = dataclasses.replace(batch, masks=token_masks([None, [1], None], 4, is_open=False))
    logits = np.array([[0, 1, 2, 3], [0, 1, 2, 3], [3, 2, 1, 0]], np.float32)
    assert any_sampler(logits, batch).token_ids.tolist() == [3, -1, 0]


def test_a_step_waits_for_all_its_masks_together(any_sampler: Sampler) -> None:
    masks = token_masks([[0]] * 3, 4, is_open=False)
    assert masks is not None
    batch = dataclasses.replace(sampling_batch([{"temperature": 0.0}] * 3, 4), masks=masks)
    logits = np.zeros((3, 4), np.float32)
    assert any_sampler(logits, batch).token_ids.tolist() == [-1, -1, -1]
    assert masks.gate[0] == -1, "the first row that gives up does so for all"
    # Here nobody waits any more, however long one may.
    batch = dataclasses.replace(batch, masks=dataclasses.replace(masks, wait_s=1e5))
    assert any_sampler(logits, batch).token_ids.tolist() == [-1, -1, -1]


def test_a_row_waits_for_its_mask(any_sampler: Sampler) -> None:
    masks = token_masks([[0]], 4, is_open=False)
    assert masks is not None
    masks = dataclasses.replace(masks, wait_s=30.0)
    batch = dataclasses.replace(sampling_batch([{"temperature": 0.0}], 4), masks=masks)

    def write() -> None:
        masks.words[0, 0] = 1 << 2
        masks.gate[0] = 1

    writer = threading.Timer(0.01, write)
    writer.start()
    assert any_sampler(np.array([[0, 1, 2, 3]], np.float32), batch).token_ids.tolist() == [2]
    writer.join()
