"""`naru plan`: whether a model fits a GPU, and how fast it could be at best. The numbers come from `core.roofline`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click

from naru_operator.adapters.model_files import find_model
from naru_operator.cli.text import human_bytes, table
from naru_operator.core.roofline.formats import WEIGHTS, Weights, weights_named
from naru_operator.core.roofline.gpus import Gpu, gpus_named
from naru_operator.core.roofline.models import Model
from naru_operator.core.roofline.prediction import Fit, StepTime, active_weight_bytes, decode_time, fit, prefill_time
from naru_proto.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What a user asked for."""

    model: str
    gpus: str
    is_roofline: bool
    batch: int
    context: int
    prompt: int
    weights: str | None
    """None: as the model's files have them."""
    kv: str
    launch_us: float
    is_json: bool


@dataclass(frozen=True, slots=True)
class _GpuPlan:
    gpu: Gpu
    fit: Fit
    notes: tuple[str, ...]
    missing_bytes: int
    """That the weights and `batch` requests of `context` tokens lack."""
    decode: StepTime | None
    prefill: StepTime | None


def run_plan(options: PlanOptions) -> int:
    """Prints what fits, and with `is_roofline` the times.

    Raises:
        InvalidRequest: the model, a GPU, a format or a number is not one that can be planned for.
        InternalError: the model's files could not be read.
    """
    model = find_model(options.model)
    weights = _weights(model, options.weights)
    plans = [_plan(model, weights, gpu, options) for gpu in gpus_named(options.gpus)]
    if options.is_json:
        click.echo(json.dumps(_as_json(model, weights, options, plans), indent=2))
        return 0
    click.echo(_summary(model, weights, options, plans))
    if options.is_roofline:
        for plan in plans:
            for block in _roofline(plan, options):
                click.echo(f"\n{block}")
    return 0


def _weights(model: Model, asked: str | None) -> Weights:
    if asked is not None:
        return weights_named(asked)
    if model.weights not in WEIGHTS:
        raise InvalidRequest(
            f"the weights of {model.name} have a format that GPUs are not planned for: give --weights, one of "
            f"{', '.join(WEIGHTS)}",
            param="weights",
        )
    return WEIGHTS[model.weights]


def _plan(model: Model, weights: Weights, gpu: Gpu, options: PlanOptions) -> _GpuPlan:
    found = fit(model, weights, options.kv, gpu)
    needed = found.weight_bytes + options.batch * options.context * found.kv_token_bytes
    notes = []
    if weights.is_fp8 and not gpu.flops_8:
        notes.append(f"{gpu.title} has no FP8 units: weights of 8 bits, activations of 16")
    missing = max(needed - found.usable_bytes, 0)
    launch_s = options.launch_us * 1e-6
    decode: StepTime | None = decode_time(
        model, weights, options.kv, gpu, batch=options.batch, context=options.context, launch_s=launch_s
    )
    prefill: StepTime | None = prefill_time(model, weights, options.kv, gpu, prompt=options.prompt, launch_s=launch_s)
    if missing or not options.is_roofline:
        decode = prefill = None
    return _GpuPlan(gpu, found, tuple(notes), missing, decode, prefill)


def _summary(model: Model, weights: Weights, options: PlanOptions, plans: Sequence[_GpuPlan]) -> str:
    found = plans[0].fit
    active = ""
    if model.shape.num_experts:
        active = f", {human_bytes(active_weight_bytes(model, weights))} of them for a token"
    head = (
        f"{model.name}: weights {human_bytes(found.weight_bytes)} ({weights.name}){active}, "
        f"KV cache {human_bytes(found.kv_token_bytes)} a token ({options.kv})"
    )
    rows = [
        (
            plan.gpu.name,
            human_bytes(plan.fit.usable_bytes),
            f"{plan.fit.kv_tokens}",
            f"{plan.fit.kv_tokens // options.context}",
            "; ".join((*_lack(plan, options), *plan.notes)) or "-",
        )
        for plan in plans
    ]
    header = ("GPU", "USABLE", "KV TOKENS", f"REQUESTS OF {options.context}", "NOTES")
    return f"{head}\n{table(header, rows)}"


def _lack(plan: _GpuPlan, options: PlanOptions) -> Iterator[str]:
    if plan.missing_bytes:
        yield (
            f"does not fit: {options.batch} x {options.context} tokens lack {human_bytes(plan.missing_bytes)}; "
            "take a smaller --batch, --context, --weights or --kv"
        )


def _roofline(plan: _GpuPlan, options: PlanOptions) -> Iterator[str]:
    if plan.decode is not None:
        yield _step(plan, f"decode, batch {options.batch}, context {options.context}", plan.decode)
    if plan.prefill is not None:
        yield _step(plan, f"prefill, {options.prompt} tokens", plan.prefill)


def _step(plan: _GpuPlan, what: str, step: StepTime) -> str:
    head = (
        f"{plan.gpu.title}, {what}: {step.seconds * 1e3:.3f} ms, {step.tokens_per_s:.0f} tokens/s, "
        f"MBU {step.mbu:.1%}, MFU {step.mfu:.1%}"
    )
    rows: list[tuple[str, ...]] = [
        (
            kernel.work.name,
            f"{kernel.work.launches}",
            f"{kernel.seconds * 1e6:.1f}",
            f"{kernel.seconds / step.seconds:.1%}",
            f"{kernel.work.bytes / 1e6:.1f}",
            f"{kernel.work.operations / 1e9:.1f}",
            kernel.bound,
        )
        for kernel in step.kernels
    ]
    count = sum(kernel.work.launches for kernel in step.kernels)
    rows.append(
        ("launches", f"{count}", f"{step.launch_s * 1e6:.1f}", f"{step.launch_s / step.seconds:.1%}", "", "", "-")
    )
    return f"{head}\n{table(('KERNEL', 'LAUNCHES', 'US', 'SHARE', 'MB', 'GFLOP', 'BOUND'), rows)}"


def _as_json(model: Model, weights: Weights, options: PlanOptions, plans: Sequence[_GpuPlan]) -> dict[str, Any]:
    return {
        "model": model.name,
        "weights": weights.name,
        "kv": options.kv,
        "weight_bytes": plans[0].fit.weight_bytes,
        "active_weight_bytes": active_weight_bytes(model, weights),
        "kv_token_bytes": plans[0].fit.kv_token_bytes,
        "batch": options.batch,
        "context": options.context,
        "prompt": options.prompt,
        "gpus": [
            {
                "gpu": plan.gpu.name,
                "title": plan.gpu.title,
                "bandwidth_bytes_per_s": plan.gpu.bandwidth,
                "flops_16_per_s": plan.gpu.flops_16,
                "flops_8_per_s": plan.gpu.flops_8,
                "usable_bytes": plan.fit.usable_bytes,
                "kv_tokens": plan.fit.kv_tokens,
                "missing_bytes": plan.missing_bytes,
                "notes": list(plan.notes),
                **({} if plan.decode is None else {"decode": _step_json(plan.decode)}),
                **({} if plan.prefill is None else {"prefill": _step_json(plan.prefill)}),
            }
            for plan in plans
        ],
    }


def _step_json(step: StepTime) -> dict[str, Any]:
    return {
        "seconds": step.seconds,
        "kernel_s": step.kernel_s,
        "launch_s": step.launch_s,
        "tokens_per_s": step.tokens_per_s,
        "mbu": step.mbu,
        "mfu": step.mfu,
        "kernels": [
            {
                "name": kernel.work.name,
                "launches": kernel.work.launches,
                "seconds": kernel.seconds,
                "bytes": kernel.work.bytes,
                "operations": kernel.work.operations,
                "bound": kernel.bound,
            }
            for kernel in step.kernels
        ],
    }
