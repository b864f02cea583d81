"""From a GPU's measurements to figures, and both to a page. Pure; called by `gpu`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.gpu_limits import Limits

WANTED: Mapping[str, tuple[str, float]] = {
    "attention decode, 16 bits": ("bandwidth", 0.85),
    "attention prefill, 16 bits": ("operations", 0.60),
}
"""What these kernels are to reach of the measured limits."""
WANTED_OVERHEAD_MS = 0.3


@dataclass(frozen=True, slots=True)
class KernelResult:
    """What came of one kernel."""

    name: str
    error: float
    """Largest, as part of the largest expected magnitude."""
    tolerance: float
    bytes: int
    operations: int
    median_s: float
    p10_s: float
    p90_s: float
    is_fp8: bool = False
    problem: str = ""
    """It could not be launched; then the numbers are 0."""

    @property
    def is_right(self) -> bool:
        """Whether it was launched and its numbers are within the tolerance; not those that are no numbers."""
        return not self.problem and self.error <= self.tolerance


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """Steps that generate, of a whole model."""

    model: str
    batch: int
    context: int
    step_s: float
    """From one step's start to the next one's."""
    kernel_s: float
    """That the GPU was busy in it."""
    predicted_s: float
    """By `naru plan`'s roofline with the GPU's measured limits."""


@dataclass(frozen=True, slots=True)
class Run:
    """All that one run found."""

    gpu: str
    versions: Mapping[str, str]
    date: str
    limits: Limits
    kernels: Sequence[KernelResult]
    decode: Sequence[DecodeResult] = ()
    end_to_end: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Engine to figures."""
    notes: Sequence[str] = ()
    """What was left out, and why."""
    failures: Sequence[str] = ()
    """Parts that ended with an error."""


def fraction(result: KernelResult, limits: Limits) -> tuple[str, float]:
    """Which limit it is nearer to, "bandwidth" or "operations", and which part of that it reaches."""
    if not result.median_s:
        return "bandwidth", 0.0
    moving = result.bytes / result.median_s / limits.bandwidth
    flops = limits.flops_8 if result.is_fp8 and limits.flops_8 else limits.flops_16
    computing = result.operations / result.median_s / flops
    return ("operations", computing) if computing > moving else ("bandwidth", moving)


def as_json(run: Run) -> dict[str, Any]:
    """All of it, with the derived figures."""
    kernels = []
    for result in run.kernels:
        limit, part = fraction(result, run.limits)
        kernels.append({**asdict(result), "is_right": result.is_right, "limit": limit, "fraction": part})
    decode = [{**asdict(each), "overhead_s": each.step_s - each.kernel_s} for each in run.decode]
    return {**asdict(run), "kernels": kernels, "decode": decode, "misses": list(misses(run))}


def misses(run: Run) -> Iterator[str]:
    """What is wrong, or slower than it is to be."""
    yield from run.failures
    for result in run.kernels:
        if not result.is_right:
            yield f"{result.name}: " + (result.problem or f"error {result.error:.2g} above {result.tolerance:.2g}")
        elif result.name in WANTED:
            limit, wanted = WANTED[result.name]
            found = fraction(result, run.limits)
            if found[0] != limit or found[1] < wanted:
                yield f"{result.name}: {found[1]:.0%} of {found[0]}, {wanted:.0%} of {limit} are wanted"
    for step in run.decode:
        overhead_ms = (step.step_s - step.kernel_s) * 1e3
        if overhead_ms > WANTED_OVERHEAD_MS:
            yield (
                f"decode of {step.batch}: {overhead_ms:.2f} ms beyond its kernels, "
                f"at most {WANTED_OVERHEAD_MS} ms are wanted"
            )
    rates = {name: figures.get("output_tok_s", 0.0) for name, figures in run.end_to_end.items()}
    if {"naru", "vllm"} <= rates.keys() and rates["naru"] < rates["vllm"]:
        yield f"end to end: {rates['naru']:.0f} tokens/s, vLLM has {rates['vllm']:.0f}"


def as_markdown(run: Run) -> str:
    """The page."""
    limits = run.limits
    lines = [
        f"# {run.gpu}, {run.date}",
        "",
        ", ".join(f"{name} {version}" for name, version in run.versions.items()) + ".",
        f"Measured limits: {limits.bandwidth / 1e12:.2f} TB/s (copy), {limits.flops_16 / 1e12:.0f} TFLOP/s in 16 bits"
        + (f", {limits.flops_8 / 1e12:.0f} in FP8" if limits.flops_8 else "")
        + ". Parts are of these.",
        "",
        "| kernel | us | GB/s | TFLOP/s | part of limit | error | allowed |",
        "|---|---|---|---|---|---|---|",
        *(_kernel_row(result, limits) for result in run.kernels),
    ]
    if run.decode:
        lines += ["", "| decode step | ms | kernels ms | beyond them ms | roof ms |", "|---|---|---|---|---|"]
        lines += [_decode_row(step) for step in run.decode]
    if run.end_to_end:
        names = sorted({name for figures in run.end_to_end.values() for name in figures})
        lines += ["", f"| end to end | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
        for engine, figures in run.end_to_end.items():
            cells = [f"{figures[name]:.1f}" if name in figures else "-" for name in names]
            lines.append(f"| {engine} | {' | '.join(cells)} |")
    found = list(misses(run))
    lines += ["", "Everything is right and as fast as wanted." if not found else "Wrong, or slower than wanted:"]
    lines += ["", *(f"- {miss}" for miss in found)] if found else []
    lines += ["", *(f"Note: {note}" for note in run.notes)] if run.notes else []
    return "\n".join(lines) + "\n"


def _kernel_row(result: KernelResult, limits: Limits) -> str:
    if result.problem:
        return f"| {result.name} | - | - | - | {result.problem} | - | - |"
    limit, part = fraction(result, limits)
    seconds = result.median_s
    return (
        f"| {result.name} | {seconds * 1e6:.1f} | {result.bytes / seconds / 1e9:.0f} | "
        f"{result.operations / seconds / 1e12:.1f} | {part:.0%} of {limit} | {result.error:.1e} | "
        f"{result.tolerance:.1e} |"
    )


def _decode_row(step: DecodeResult) -> str:
    return (
        f"| {step.model}, {step.batch} x {step.context} tokens | {step.step_s * 1e3:.3f} | {step.kernel_s * 1e3:.3f} | "
        f"{(step.step_s - step.kernel_s) * 1e3:.3f} | {step.predicted_s * 1e3:.3f} |"
    )
