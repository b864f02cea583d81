"""Carries out the cases of a GPU's kernels: first whether they are right, then how long they take. Called by `gpu`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from bench.gpu_cases import KernelCase
from bench.gpu_report import KernelResult
from bench.gpu_timing import Clock, Timing, timed


def results_of(cases: Iterable[KernelCase], clock: Clock, is_late: Callable[[], bool]) -> Iterator[KernelResult]:
    """The result of each case, made when it is its turn; ends early when `is_late` says so."""
    for case in cases:
        if is_late():
            return
        yield _result(case, clock)


def largest_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference as part of the largest expected magnitude; not a number where a result is none."""
    # In float32, but integers as they are: those of 32 bits would be rounded.
    if not actual.is_floating_point():
        return float((actual != expected).any())
    wide, right = actual.float(), expected.float()
    largest = right.abs().max().item() or 1.0
    return float((wide - right).abs().max().item() / largest)


def _result(case: KernelCase, clock: Clock) -> KernelResult:
    problem = ""
    try:
        expected = case.expected()
        error = largest_error((case.check or case.run)(), expected)
        del expected
        timing = timed(case.run, clock)
    except Exception as exc:  # a kernel that cannot be launched is a result, too; the others are still measured
        problem = f"{type(exc).__name__}: {str(exc).strip().splitlines()[0] if str(exc).strip() else ''}"[:160]
        error, timing = 0.0, Timing(0.0, 0.0, 0.0, 0)
    return KernelResult(
        case.name, error, case.tolerance, case.bytes, case.operations, timing.median_s, timing.p10_s, timing.p90_s,
        case.is_fp8, problem,
    )  # fmt: skip
