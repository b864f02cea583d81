"""Linear layers of every variant and format, against numpy in double precision."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from memory_models import random_tensor

from naru_proto.errors import LoadError
from naru_worker.adapters.ops.cpu_batch import address
from naru_worker.adapters.ops.cpu_device import open_device
from naru_worker.adapters.ops.cpu_pack import matrix_bytes, pack_matrix
from naru_worker.adapters.ops.native_lib import ModelSpec, load_variant
from naru_worker.adapters.ops.protocol import RawTensor, TensorFormat

pytestmark = pytest.mark.timeout(600)  # the first use of a variant compiles it

FORMATS: tuple[TensorFormat, ...] = ("f32", "f16", "bf16", "q4_0", "q4_1", "q8_0", "q4_k", "q6_k")
ROWS = (1, 2, 3, 4, 5, 8, 9, 12, 13, 16, 17, 33, 40, 47, 65)
"""Numbers of activation rows: below, at and above every switch of a kernel."""
FLOAT_TILE_ROWS = 40
"""From this many rows on the amx variant multiplies quantized weights as bf16."""
TOLERANCE = 2e-5
"""Of the sum of absolute products: float32 accumulation."""


@contextmanager
def packed(
    variant: str, parts: Sequence[RawTensor], biases: Sequence[RawTensor | None], threads: int = 2
) -> Iterator[Any]:
    """A model that holds one matrix; gives a function x -> x @ W.T + bias, and one that reads a row."""
    library = load_variant(variant)
    spec = ModelSpec(
        weight_bytes=matrix_bytes(library, parts, biases),
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=16,
        vocab_size=16,
        block_size=16,
        num_blocks=2,
        kv_element_bytes=2,
        max_num_tokens=16,
        max_num_seqs=1,
        max_model_len=16,
        num_threads=threads,
        rotary_dim=0,
        rope_factor=1.0,
    )
    model = library.naru_model_new(open_device(threads, variant).handle, ctypes.byref(spec), None)
    assert model
    try:
        matrix = pack_matrix(library, model, parts, biases)

        def multiply(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
            x = np.ascontiguousarray(x)
            out = np.full((len(x), matrix.num_rows), np.nan, np.float32)
            assert library.naru_linear(model, matrix.id, address(x), len(x), address(out), 1) == 0
            return out

        def row(index: int) -> npt.NDArray[np.float32]:
            out = np.full(matrix.num_columns, np.nan, np.float32)
            library.naru_matrix_row(model, matrix.id, index, address(out))
            return out

        yield multiply, row
    finally:
        library.naru_model_free(model)


def as_bf16(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Rounded to bf16, halves up, as the kernel rounds weights."""
    bits = (values.astype(np.float32).view(np.uint32) + np.uint32(0x8000)) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(np.float64)


def activations(rows: int, columns: int, seed: int) -> npt.NDArray[np.float32]:
    """Activations that every form holds exactly: up to 127 times a power of two, per 32 columns."""
    rng = np.random.default_rng(seed)
    groups = -(-columns // 32)
    quants = rng.integers(-127, 128, (rows, groups, 32)).astype(np.float32)
    quants[:, :, 5] = 127.0
    powers = 2.0 ** rng.integers(-9, -3, (rows, groups, 1))
    return np.ascontiguousarray((quants * powers).astype(np.float32).reshape(rows, -1)[:, :columns])


def columns_of(tensor_format: TensorFormat) -> tuple[int, ...]:
    if tensor_format in ("q4_k", "q6_k"):
        return (256, 768)
    return (32, 96, 576) if tensor_format.startswith("q") else (1, 33, 96)


def close(actual: npt.NDArray[Any], x: npt.NDArray[Any], w: npt.NDArray[Any], tolerance: float = TOLERANCE) -> bool:
    bound = tolerance * (np.abs(x) @ np.abs(w).T) + 1e-6
    return bool(np.all(np.abs(actual - x @ w.T) <= bound))


def seen_weights(variant: str, tensor_format: TensorFormat, rows: int, w: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The weights that a product of so many rows works with."""
    is_bf16 = variant == "amx" and tensor_format.startswith("q") and rows >= FLOAT_TILE_ROWS
    return as_bf16(w) if is_bf16 else w


@pytest.mark.parametrize("tensor_format", FORMATS)
def test_products_equal_numpys(variant: str, tensor_format: TensorFormat) -> None:
    rng = np.random.default_rng(3)
    for columns in columns_of(tensor_format):
        for num_outputs in (1, 16, 50):
            tensor, w = random_tensor("w", tensor_format, (num_outputs, columns), rng)
            with packed(variant, [tensor], [None]) as (multiply, _):
                for rows in ROWS:
                    x = activations(rows, columns, rows)
                    weights = seen_weights(variant, tensor_format, rows, w)
                    assert close(multiply(x), x, weights), (columns, num_outputs, rows)


@pytest.mark.parametrize("tensor_format", [f for f in FORMATS if f.startswith("q")])
def test_rounding_of_activations_stays_within_its_bound(variant: str, tensor_format: TensorFormat) -> None:
    tensor, w = random_tensor("w", tensor_format, (50, 768), np.random.default_rng(11))
    x = np.random.default_rng(12).standard_normal((64, 768)).astype(np.float32)
    x[:, ::7] *= 10  # outliers, as real activations have
    # Half a step of 8 bits per group of 32 columns; a group's step is its largest value / 127.
    top = np.repeat(np.abs(x.reshape(64, -1, 32)).max(-1), 32, axis=1)
    half_step = top / 254 @ np.abs(w).T
    # bf16 has 8 bits: both factors are off by at most 2^-9, halves by 2^-8 together.
    halves = 2.0**-7.9 * (np.abs(x) @ np.abs(w).T)
    with packed(variant, [tensor], [None]) as (multiply, _):
        for rows in (1, 9, 64):
            bound = halves if variant == "amx" and rows >= FLOAT_TILE_ROWS else half_step
            assert np.all(np.abs(multiply(x[:rows]) - x[:rows] @ w.T) <= bound[:rows] * 1.01 + 1e-5)


@pytest.mark.parametrize("tensor_format", FORMATS)
def test_a_row_looked_up_is_the_row_of_the_file(variant: str, tensor_format: TensorFormat) -> None:
    columns = columns_of(tensor_format)[-1]
    tensor, w = random_tensor("w", tensor_format, (37, columns), np.random.default_rng(4))
    with packed(variant, [tensor], [None]) as (_, row):
        for index in (0, 15, 16, 36):
            np.testing.assert_allclose(row(index), w[index], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("tensor_format", FORMATS)
def test_a_rows_result_does_not_depend_on_the_rows_beside_it(variant: str, tensor_format: TensorFormat) -> None:
    columns = columns_of(tensor_format)[-1]
    tensor, _ = random_tensor("w", tensor_format, (50, columns), np.random.default_rng(5))
    # Rows are of no kind here: on amx so many go another way than few.
    x = activations(FLOAT_TILE_ROWS - 1 if variant == "amx" else 200, columns, 6)
    with packed(variant, [tensor], [None]) as (multiply, _):
        together = multiply(x)
        for rows in (1, 2, 5, 6, 8, 11, 16, 17, 31, 63, 64):
            np.testing.assert_array_equal(multiply(x[:rows]), together[:rows])


def test_parts_of_different_formats_stack_with_their_biases(variant: str) -> None:
    rng = np.random.default_rng(7)
    kinds: tuple[tuple[TensorFormat, int], ...] = (("q4_k", 48), ("q6_k", 5), ("f16", 17), ("q8_0", 16), ("q4_k", 3))
    pairs = [random_tensor(f"p{i}", kind, (rows, 256), rng) for i, (kind, rows) in enumerate(kinds)]
    bias, bias_values = random_tensor("b", "f32", (17,), rng)
    parts = [tensor for tensor, _ in pairs]
    with packed(variant, parts, [None, None, bias, None, None]) as (multiply, row):
        for rows in (1, 7, 20, 64):
            x = activations(rows, 256, rows)
            out, first = multiply(x), 0
            for tensor, w in pairs:
                mine = out[:, first : first + len(w)] - (bias_values if tensor.name == "p2" else 0.0)
                assert close(mine, x, seen_weights(variant, tensor.format, rows, w)), (tensor.name, rows)
                np.testing.assert_allclose(row(first), w[0], rtol=1e-6, atol=1e-7)
                first += len(w)


@pytest.mark.parametrize("tensor_format", ["q4_1", "q8_0"])
def test_many_rows_and_columns_are_cut_into_blocks_and_summed_whole(variant: str, tensor_format: TensorFormat) -> None:
    """More rows than a member takes at once, more columns than are unpacked at once, an odd panel at the end."""
    tensor, w = random_tensor("w", tensor_format, (50, 1248), np.random.default_rng(13))
    x = activations(512, 1248, 14)
    with packed(variant, [tensor], [None]) as (multiply, _):
        whole = multiply(x)
        assert close(whole, x, seen_weights(variant, tensor_format, 512, w))
        for rows in (256, 257, 300):
            np.testing.assert_array_equal(multiply(x[:rows]), whole[:rows])


def test_extreme_bytes_do_not_saturate(variant: str) -> None:
    """Products of 16 bits overflow when -128 or 255 meet 127 twice in a row."""
    blocks = np.zeros((16, 1, 34), np.uint8)
    blocks[..., 0:2] = np.float16(1.0).reshape(1).view(np.uint8)
    blocks[..., 2:] = np.int8(-128).view(np.uint8)
    blocks[8:, :, 2:] = 127
    tensor = RawTensor("w", "q8_0", (16, 32), memoryview(blocks.tobytes()))
    nibbles = np.full((16, 1, 18), 0xFF, np.uint8)
    nibbles[..., 0:2] = np.float16(1.0).reshape(1).view(np.uint8)
    small = RawTensor("w", "q4_0", (16, 32), memoryview(nibbles.tobytes()))
    x = np.full((8, 32), 127.0, np.float32)
    x[1] = -127.0
    signs = np.ones(8)
    signs[1] = -1
    with packed(variant, [tensor], [None]) as (multiply, _):
        for rows in (1, 8):
            out = multiply(x[:rows])
            np.testing.assert_array_equal(out[:, :8], np.outer(signs[:rows], np.full(8, -128.0 * 127 * 32)))
            np.testing.assert_array_equal(out[:, 8:], np.outer(signs[:rows], np.full(8, 127.0 * 127 * 32)))
    with packed(variant, [small], [None]) as (multiply, _):
        for rows in (1, 8):
            np.testing.assert_array_equal(multiply(x[:rows]), np.outer(signs[:rows], np.full(16, 7.0 * 127 * 32)))


def test_rows_of_zeros_give_zeros(variant: str) -> None:
    tensor, _ = random_tensor("w", "q4_1", (20, 64), np.random.default_rng(8))
    with packed(variant, [tensor], [None]) as (multiply, _):
        np.testing.assert_array_equal(multiply(np.zeros((3, 64), np.float32)), np.zeros((3, 20)))


@pytest.mark.parametrize("threads", [1, 3, 7])
def test_the_number_of_threads_changes_nothing(variant: str, threads: int) -> None:
    tensor, _ = random_tensor("w", "q4_1", (200, 96), np.random.default_rng(9))
    x = activations(9, 96, 10)
    with packed(variant, [tensor], [None], 2) as (multiply, _):
        expected = multiply(x)
    with packed(variant, [tensor], [None], threads) as (multiply, _):
        np.testing.assert_array_equal(multiply(x), expected)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (RawTensor("w", "f32", (4,), memoryview(bytes(16))), "a matrix"),
        (RawTensor("w", "q4_0", (1, 48), memoryview(bytes(27))), "48 columns, no multiple of the 32"),
        (RawTensor("w", "f32", (2, 8), memoryview(bytes(60))), "60 bytes of data; 64 are needed"),
        (RawTensor("w", "f32", (0, 8), memoryview(b"")), "a matrix"),
    ],
)
def test_a_tensor_that_does_not_fit_is_a_load_error_that_names_it(tensor: RawTensor, message: str) -> None:
    with pytest.raises(LoadError, match=f"tensor 'w'.*{message}"), packed("plain", [tensor], [None]):
        pass
