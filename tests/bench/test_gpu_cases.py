"""The cases that a GPU is measured with are right by themselves: tiny ones under Triton's interpreter."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from bench.gpu_attention_cases import cache_cases  # noqa: E402
from bench.gpu_cases import KernelCase, Setup, elementwise_cases, product_cases  # noqa: E402
from bench.gpu_run import largest_error, results_of  # noqa: E402
from bench.gpu_sampler_cases import sampler_cases  # noqa: E402

SIZES: dict[str, Any] = {"inner": 96, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "vocab": 200, "batch": 3}


class Still:
    """A GPU's clock that does not go."""

    def hold(self) -> None: ...

    def flush(self) -> None: ...

    def wait(self) -> None: ...

    def mark(self) -> Any:
        return None

    def elapsed_s(self, start: Any, end: Any) -> float:
        return 0.0


def cases() -> list[KernelCase]:
    setup = Setup(torch.device("cpu"), 90, torch.float32, hidden=64, context=40, prompt=24, **SIZES)
    wide = Setup(torch.device("cpu"), 90, torch.float32, hidden=256, prompt=18, **SIZES)
    return list(chain(cache_cases(setup), elementwise_cases(setup), sampler_cases(setup), product_cases(wide)))


def test_every_kernel_gives_what_its_case_expects() -> None:
    found = cases()
    names = [case.name for case in found]
    assert len(set(names)) == len(names) == 9 + 7 + 2 + 15
    for case in found:
        expected = case.expected()
        error = largest_error((case.check or case.run)(), expected)
        assert error <= case.tolerance, case.name
        assert case.bytes > 0


def test_attention_moves_the_cache_once_in_its_own_format() -> None:
    moved = {case.name: case.bytes for case in cases()}
    # 3 sequences of 40 tokens, 2 heads of 32 numbers, keys and values; beside them 3 rows of 4 heads, twice.
    rows = 2 * 3 * 4 * 32 * 4
    assert moved["attention decode, 16 bits"] == 3 * 40 * 2 * 2 * 32 * 4 + rows
    assert moved["attention decode, int8"] == 3 * 40 * 2 * 2 * (32 + 4) + rows
    assert moved["attention decode, fp8"] == 3 * 40 * 2 * 2 * 32 + rows


def test_a_kernel_that_cannot_be_launched_is_a_result_and_the_others_are_measured_all_the_same() -> None:
    def broken() -> Any:
        raise RuntimeError("no such instruction\nand more")

    right = KernelCase("right", lambda: torch.ones(2), lambda: torch.ones(2), 0.0, 8)
    wrong = KernelCase("wrong", lambda: torch.tensor([1.0, torch.nan]), lambda: torch.ones(2), 0.5, 8)
    late = iter([False, False, False, True])
    found = list(
        results_of([KernelCase("broken", broken, broken, 0.0, 8), right, wrong, right], Still(), lambda: next(late))
    )
    assert [(result.name, result.is_right) for result in found] == [
        ("broken", False), ("right", True), ("wrong", False),
    ]  # fmt: skip
    assert found[0].problem == "RuntimeError: no such instruction"


def test_an_error_is_a_part_of_the_largest_magnitude_and_integers_are_equal_or_not() -> None:
    assert largest_error(torch.tensor([1.0, -4.5]), torch.tensor([1.0, -4.0])) == 0.125
    assert largest_error(torch.zeros(2), torch.zeros(2)) == 0.0
    big = torch.tensor([2**30 + 1], dtype=torch.int32)
    assert largest_error(big, big - 1) == 1.0 and largest_error(big, big) == 0.0
