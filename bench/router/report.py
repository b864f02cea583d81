"""From the figures of each router to ratios, targets and the printed table. Pure; called by `bench.router`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bench.router.cases import Figures
from bench.router.decision import DecisionTimes

RUST = ("vllm-router", "sglang-router")
DIRECT = "the backend itself"

TARGETS: Mapping[str, float] = {
    "streamed_vs_best_rust": 1.2,
    "plain_vs_best_rust": 0.7,
    "p99_half_peak_s": 0.003,
    "decision_p99_s": 150e-6,
    "rss_growth_bytes": 8e6,
}
"""Ratios are at least that, the others at most; `added_p50_s` is at most `best_rust_added_p50_s`."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What is compared; see README.md."""

    streamed_vs_best_rust: float | None
    plain_vs_best_rust: float | None
    added_p50_s: float
    best_rust_added_p50_s: float | None
    p99_half_peak_s: float
    decision_p99_s: float
    rss_growth_bytes: int | None


def summarize(routers: Mapping[str, Figures], decision: DecisionTimes) -> Summary:
    """Naru beside the better Rust router of each figure; None where one of those was not measured."""
    ours, direct_s = routers["naru"], routers[DIRECT].one_p50_s
    rust = [routers[name] for name in RUST if name in routers]
    has_all = len(rust) == len(RUST)
    return Summary(
        streamed_vs_best_rust=ours.stream_tokens_per_s / max(r.stream_tokens_per_s for r in rust) if has_all else None,
        plain_vs_best_rust=ours.plain_per_s / max(r.plain_per_s for r in rust) if has_all else None,
        added_p50_s=ours.one_p50_s - direct_s,
        best_rust_added_p50_s=min(r.one_p50_s for r in rust) - direct_s if has_all else None,
        p99_half_peak_s=ours.half_peak_p99_s,
        decision_p99_s=decision.p99_s,
        rss_growth_bytes=ours.rss_growth_bytes,
    )


def missed(summary: Summary) -> list[str]:
    """Names of the figures that are not as they should be; what was not measured is not among them."""
    found = []
    for name, target in TARGETS.items():
        value = getattr(summary, name)
        if value is not None and (value < target if name.endswith("_rust") else value > target):
            found.append(name)
    if summary.best_rust_added_p50_s is not None and summary.added_p50_s > summary.best_rust_added_p50_s:
        found.append("added_p50_s")
    return found


def table(routers: Mapping[str, Figures], summary: Summary, decision: DecisionTimes) -> str:
    """One row a figure, one column a router."""
    direct_s = routers[DIRECT].one_p50_s
    rows = [
        ["", *routers],
        ["plain chats/s, 32 connections", *(f"{r.plain_per_s:.0f}" for r in routers.values())],
        ["streamed tokens/s, 32 connections", *(f"{r.stream_tokens_per_s:.0f}" for r in routers.values())],
        ["tokens/s of whole answers of 128", *(f"{r.long_plain_tokens_per_s:.0f}" for r in routers.values())],
        ["p50 added on one connection (µs)", *(_us(r.one_p50_s - direct_s) for r in routers.values())],
        ["p99 at half of its peak (ms)", *(f"{1000 * r.half_peak_p99_s:.2f}" for r in routers.values())],
        ["processor time a plain chat (µs)", *(_us(r.cpu_per_plain_s) for r in routers.values())],
        ["processor time a streamed token (µs)", *(f"{1e6 * r.cpu_per_token_s:.2f}" for r in routers.values())],
        ["memory (MB)", *(f"{r.rss_bytes / 1e6:.0f}" for r in routers.values())],
        ["memory growth (MB)", *(_mb(r.rss_growth_bytes) for r in routers.values())],
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(widths[0]) if i == 0 else cell.rjust(widths[i]) for i, cell in enumerate(row)).rstrip()
        for row in rows
    ]
    lines.insert(1, "-" * max(map(len, lines)))
    lines += ["", f"one decision: p50 {_us(decision.p50_s)} µs, p99 {_us(decision.p99_s)} µs"]
    for name in ("streamed_vs_best_rust", "plain_vs_best_rust"):
        value = getattr(summary, name)
        lines.append(f"{name}: {'-' if value is None else f'{value:.2f}'} (target {TARGETS[name]:g})")
    return "\n".join(lines)


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:.0f}"


def _mb(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 1e6:.1f}"
