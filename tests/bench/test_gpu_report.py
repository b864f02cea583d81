"""What is said of a GPU's measurements: parts of limits, what is wrong, what is slower than wanted."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

from bench.gpu_limits import Limits  # noqa: E402
from bench.gpu_report import (  # noqa: E402
    DecodeResult,
    KernelResult,
    Run,
    as_json,
    as_markdown,
    fraction,
    misses,
)

LIMITS = Limits(bandwidth=4e12, flops_16=800e12, flops_8=0.0)
DECODE = KernelResult("attention decode, 16 bits", 1e-3, 6e-2, 4_000_000_000, 10**9, 1.1e-3, 1e-3, 1.2e-3)
PREFILL = KernelResult("attention prefill, 16 bits", 1e-3, 6e-2, 10**8, 5 * 10**11, 1e-3, 1e-3, 1e-3)
STEP = DecodeResult("llama-3.2-1b", 16, 1024, step_s=1.5e-3, kernel_s=1.3e-3, predicted_s=0.8e-3)
RUN = Run("NVIDIA H200", {"torch": "2.11"}, "2026-11-30", LIMITS, [DECODE, PREFILL], [STEP])


def test_a_kernel_is_held_against_the_limit_that_it_is_nearer_to() -> None:
    (moving, bytes_part), (computing, operations_part) = fraction(DECODE, LIMITS), fraction(PREFILL, LIMITS)
    assert (moving, computing) == ("bandwidth", "operations")
    assert [bytes_part, operations_part] == pytest.approx([4e9 / 1.1e-3 / 4e12, 5e11 / 1e-3 / 800e12])
    assert fraction(replace(DECODE, median_s=0.0), LIMITS)[1] == 0.0
    with_fp8 = replace(LIMITS, flops_8=1600e12)
    assert fraction(replace(PREFILL, is_fp8=True), with_fp8)[1] == pytest.approx(operations_part / 2)
    assert fraction(PREFILL, with_fp8)[1] == pytest.approx(operations_part)


def test_a_run_that_reaches_all_that_is_wanted_says_so() -> None:
    assert list(misses(RUN)) == []
    page = as_markdown(RUN)
    assert page.startswith("# NVIDIA H200, 2026-11-30\n\ntorch 2.11.\n")
    assert "Measured limits: 4.00 TB/s (copy), 800 TFLOP/s in 16 bits. Parts are of these." in page
    assert "| attention decode, 16 bits | 1100.0 | 3636 | 0.9 | 91% of bandwidth | 1.0e-03 | 6.0e-02 |" in page
    assert "| llama-3.2-1b, 16 x 1024 tokens | 1.500 | 1.300 | 0.200 | 0.800 |" in page
    assert "Everything is right and as fast as wanted." in page


def test_what_is_wrong_or_slower_than_wanted_is_listed_with_its_value() -> None:
    run = replace(
        RUN,
        kernels=[
            replace(DECODE, median_s=2e-3),
            replace(PREFILL, median_s=2e-3),
            replace(DECODE, name="attention decode, int8", error=0.1),
            replace(DECODE, name="attention decode, fp8", error=math.nan),
            replace(DECODE, name="embed, decode", problem="RuntimeError: out of registers", median_s=0.0),
        ],
        decode=[replace(STEP, step_s=2e-3)],
        end_to_end={"naru": {"output_tok_s": 900.0}, "vllm": {"output_tok_s": 1000.0, "itl_p99_ms": 12.0}},
        notes=["a note"],
        failures=["steps of a whole model: ValueError: no"],
    )
    found = list(misses(run))
    assert found == [
        "steps of a whole model: ValueError: no",
        "attention decode, 16 bits: 50% of bandwidth, 85% of bandwidth are wanted",
        "attention prefill, 16 bits: 31% of operations, 60% of operations are wanted",
        "attention decode, int8: error 0.1 above 0.06",
        "attention decode, fp8: error nan above 0.06",
        "embed, decode: RuntimeError: out of registers",
        "decode of 16: 0.70 ms beyond its kernels, at most 0.3 ms are wanted",
        "end to end: 900 tokens/s, vLLM has 1000",
    ]
    page = as_markdown(run)
    assert all(f"- {miss}" in page for miss in found)
    assert "| end to end | itl_p99_ms | output_tok_s |" in page and "| naru | - | 900.0 |" in page
    assert "Note: a note" in page
    assert "| embed, decode | - | - | - | RuntimeError: out of registers | - | - |" in page


def test_json_has_the_derived_figures() -> None:
    stored = json.loads(json.dumps(as_json(RUN)))
    assert stored["kernels"][0]["fraction"] == pytest.approx(fraction(DECODE, LIMITS)[1])
    assert (stored["kernels"][0]["limit"], stored["kernels"][0]["is_right"]) == ("bandwidth", True)
    assert stored["decode"][0]["overhead_s"] == pytest.approx(0.2e-3)
    assert stored["limits"]["bandwidth"] == 4e12 and stored["misses"] == []
