"""Attention of prompt tokens, alone: every shape and border against numpy, and the same bits however it is cut."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import pytest
from memory_models import Float64Array
from prompt_attention import FloatArray, PromptAttention, Shape, queries

pytestmark = pytest.mark.timeout(600)  # the first use of a variant compiles it

SHAPES = (
    Shape(9, 3, 64),
    Shape(2, 2, 32, 32),
    Shape(4, 2, 80),
    Shape(4, 1, 96),
    Shape(7, 1, 128),
    Shape(8, 1, 256),
    Shape(40, 1, 20),
    Shape(9, 3, 64, kv_format="f32"),
    Shape(7, 1, 80, kv_format="f32"),
)


@contextmanager
def attention(
    variant: str, shape: Shape, length: int, num_threads: int = 1, spread: float = 1.0
) -> Iterator[PromptAttention]:
    made = PromptAttention(variant, shape, length, num_threads, spread)
    try:
        yield made
    finally:
        made.close()


def tolerance(variant: str, shape: Shape) -> float:
    """Of an output of values about 1: bf16 has eight bits, a long vector in integers of sixteen about ten."""
    if shape.kv_format == "f32":
        return 2e-5
    return {"amx": 2e-2, "avx512_bf16": 2e-2, "avx2": 2e-3}.get(variant, 2e-5)


def assert_close(actual: FloatArray, expected: Float64Array, bound: float) -> None:
    assert np.abs(actual - expected).max() < bound
    assert np.sqrt(np.mean((actual - expected) ** 2)) < bound / 4


LENGTH = 640
BORDERS = ((1, 0), (15, 1), (17, 47), (64, 0), (65, 63), (130, 126), (1, 639), (512, 128))


@cache
def expected_numbers(shape: Shape) -> dict[tuple[int, int, int], FloatArray]:
    """By rows, first position and window: the same for all variants, and slower than any of them."""
    found = {}
    with attention("plain", shape, LENGTH) as kernel:
        for count, position in BORDERS:
            for window in (0, 40) if count == 512 else (0, 1, 40, 200):
                exact = kernel.expected(queries(shape, count), position, window)
                found[count, position, window] = exact.astype(np.float32)
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_and_border_gives_numpys_numbers(variant: str, shape: Shape) -> None:
    with attention(variant, shape, LENGTH) as kernel:
        for (count, position, window), expected in expected_numbers(shape).items():
            actual = kernel.run(queries(shape, count), position, window)
            assert_close(actual, expected.astype(np.float64), tolerance(variant, shape))


@pytest.mark.parametrize("kv_format", ["f16", "f32"])
@pytest.mark.parametrize("spread", [12.0, 150.0])
def test_scores_that_leave_the_range_of_an_exponent_give_numpys_numbers(
    variant: str, spread: float, kv_format: str
) -> None:
    """The best score grows by hundreds along the context, and lies far below 0 at first."""
    shape = Shape(3, 1, 64, kv_format=kv_format)
    with attention(variant, shape, 400, spread=spread) as kernel:
        q = queries(shape, 200)
        # Rounded as the kernel rounds, or one token of two would win by the rounding alone.
        bits = (q * np.float32(64**-0.5 * 1.44269504)).view(np.uint32)
        rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)
        is_rounded = tolerance(variant, shape) > 1e-2
        if is_rounded:
            kernel.keys[:] = (kernel.keys.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
            kernel.refill()
        exact = rounded / np.float32(64**-0.5 * 1.44269504) if is_rounded else q
        actual = kernel.run(q, 200)
        assert np.isfinite(actual).all()
        # Integers of sixteen bits are right to a part of the largest score.
        bound = spread * 6e-4 if variant == "avx2" and kv_format == "f16" else 2e-3
        assert_close(actual, kernel.expected(exact, 200), 3e-2 if is_rounded else bound)


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[4], SHAPES[7]], ids=str)
def test_a_row_has_the_same_bits_in_every_cut_window_and_number_of_threads(variant: str, shape: Shape) -> None:
    q = queries(shape, 500)
    for window in (0, 100):
        with attention(variant, shape, 540, 1, 6.0) as kernel:
            whole = kernel.run(q, 40, window)
            for chunk in (1, 3, 37, 256):
                for first in range(0, 500, chunk if chunk > 3 else 71):
                    part = kernel.run(q[first : first + chunk], 40 + first, window)
                    np.testing.assert_array_equal(part, whole[first : first + chunk], f"{chunk} from {first}")
        with attention(variant, shape, 540, 3, 6.0) as kernel:
            np.testing.assert_array_equal(kernel.run(q, 40, window), whole)
