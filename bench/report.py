"""From measurements to figures, ratios and the printed table. Pure; called by `engine`.

A ratio above 1 is in Naru's favour everywhere: Naru ÷ peer for rates, peer ÷ Naru for times. What was not measured is
None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bench.measure import Measurement
from bench.stats import best, median, percentile, ratio
from bench.stream import Timing

Figures = dict[str, float]
"""Figures of one case on one engine, by name; the unit is the end of the name."""
EngineFigures = Mapping[str, Figures]
"""By case."""

RATE_OF_CASE: Mapping[str, str] = {
    "single": "output_tok_s",
    "conc16": "output_tok_s",
    "prefill": "prefill_tok_s",
    "shared": "output_tok_s",
    "prefill8k": "prefill_tok_s",
    "decode8k": "decode_tok_s",
}
"""Which rate stands for a case; more is better."""
TIMES: Mapping[str, tuple[str, str]] = {
    "ttft_p99": ("conc16", "ttft_p99_ms"),
    "itl_p99": ("conc16", "itl_p99_ms"),
    "mixed_itl_p99": ("mixed", "itl_p99_ms"),
    "mixed_ttft": ("mixed", "long_ttft_ms"),
}
"""Times that are compared, by name: their case and figure; less is better."""
NAMES_OF_TIME: Mapping[str, str] = {
    "ttft_p99": "TTFT p99, 16 at once (ms)",
    "itl_p99": "ITL p99, 16 at once (ms)",
    "mixed_itl_p99": "ITL p99 of 8 streams while 2048 tokens arrive (ms)",
    "mixed_ttft": "TTFT of those 2048 tokens (ms)",
}
NAMES_OF_CASE: Mapping[str, str] = {
    "single": "single stream, 128 in, 128 out",
    "conc16": "16 at once, 64 to 184 in, 128 out",
    "prefill": "prefill of 2048 tokens",
    "shared": "16 at once on a cached prefix",
    "prefill8k": "prefill of 8000 tokens",
    "decode8k": "decode after 8000 tokens",
}
MAX_CLIENT_CPU_SHARE = 0.05
"""Above this part of a core the client is no longer light, and the report says so."""


def figures(measurements: Sequence[Measurement]) -> Figures:
    """Figures of one case: medians over repeats, percentiles over all requests of all repeats.

    Batches that only prepare a cache count in ``prime_wall_s`` alone. Latencies in milliseconds. Of the case ``mixed``,
    times between tokens are those of the streams while the long prompt is computed.
    """
    measured = [m for m in measurements if m.measured]
    timings = [timing for m in measured for timing in m.timings]
    out_tokens = [sum(t.completion_tokens for t in m.timings) for m in measured]
    in_tokens = [sum(t.prompt_tokens for t in m.timings) for m in measured]
    ttft_ms = [1000 * timing.ttft_s for timing in timings]
    gaps_ms = [1000 * gap for timing in timings for gap in timing.gaps_s]
    result: Figures = {
        "wall_s": median([m.wall_s for m in measured]),
        "wall_min_s": min(m.wall_s for m in measured),
        "wall_max_s": max(m.wall_s for m in measured),
        "output_tok_s": median([n / m.wall_s for n, m in zip(out_tokens, measured, strict=True)]),
        "prefill_tok_s": median(
            [n / max(t.ttft_s for t in m.timings) for n, m in zip(in_tokens, measured, strict=True)]
        ),
        "ttft_p50_ms": percentile(ttft_ms, 50),
        "ttft_p99_ms": percentile(ttft_ms, 99),
        "cached_prompt_share": sum(t.cached_tokens for t in timings) / sum(in_tokens),
        "client_cpu_share": max(m.client_cpu_s / m.wall_s for m in measured),
        "server_cpu_cores": median([m.server_cpu_s / m.wall_s for m in measured]),
    }
    if gaps_ms:
        rates = [(t.completion_tokens - 1) / sum(t.gaps_s) for t in timings if t.gaps_s]
        result |= {
            "itl_p50_ms": percentile(gaps_ms, 50),
            "itl_p99_ms": percentile(gaps_ms, 99),
            "decode_tok_s": median(rates),
            "tokens_per_chunk": sum(out_tokens) / sum(t.num_chunks for t in timings),
        }
    if measured and measured[0].case == "mixed":
        result |= _mixed_figures([m.timings for m in measured])
    priming = [m.wall_s for m in measurements if not m.measured]
    if priming:
        result["prime_wall_s"] = median(priming)
    return result


def _mixed_figures(batches: Sequence[Sequence[Timing]]) -> Figures:
    """Gaps of the streams that meet the time from sending the long prompt to its first token, and that time."""
    gaps_ms: list[float] = []
    for *streams, long in batches:
        for stream in streams:
            end_s = stream.sent_s + stream.ttft_s
            for gap in stream.gaps_s:
                start_s, end_s = end_s, end_s + gap
                if end_s >= long.sent_s and start_s <= long.sent_s + long.ttft_s:
                    gaps_ms.append(1000 * gap)
    result = {"long_ttft_ms": median([1000 * long.ttft_s for *_, long in batches])}
    if gaps_ms:
        result |= {f"itl_p{percent}_ms": percentile(gaps_ms, percent) for percent in (50, 99)}
        result["itl_max_ms"] = max(gaps_ms)
    return result


def best_of(settings: Sequence[EngineFigures]) -> tuple[dict[str, Figures], dict[str, int]]:
    """Of each case the figures of the setting that did best in it, and which setting that was."""
    figures: dict[str, Figures] = {}
    chosen: dict[str, int] = {}
    for index, cases in enumerate(settings):
        for case, values in cases.items():
            if case not in figures or merit(case, values) > merit(case, figures[case]):
                figures[case], chosen[case] = values, index
    return figures, chosen


def merit(case: str, values: Figures) -> float:
    """More is better: a case's rate, or for ``mixed`` less of its streams' longest gaps."""
    return values[RATE_OF_CASE[case]] if case in RATE_OF_CASE else -values.get("itl_p99_ms", math.inf)


def ratios(engines: Mapping[str, EngineFigures], peers: Sequence[str]) -> dict[str, float | None]:
    """``CASE_vs_PEER`` and ``CASE_vs_best`` for each case's rate, and the same for the `TIMES`.

    ``best`` needs every peer: with one missing it is None, since the missing one might have been the better.
    """
    result: dict[str, float | None] = {}
    for case, name in RATE_OF_CASE.items():
        ours = _figure(engines, "naru", case, name)
        theirs = {peer: _figure(engines, peer, case, name) for peer in peers}
        for peer, value in theirs.items():
            result[f"{case}_vs_{peer}"] = ratio(ours, value)
        result[f"{case}_vs_best"] = ratio(ours, best(list(theirs.values())))
    for short, (case, name) in TIMES.items():
        ours = _figure(engines, "naru", case, name)
        theirs = {peer: _figure(engines, peer, case, name) for peer in peers}
        for peer, value in theirs.items():
            result[f"{short}_vs_{peer}"] = ratio(value, ours)
        result[f"{short}_vs_best"] = ratio(best(list(theirs.values()), lowest=True), ours)
    return {name: None if value is None else round(value, 3) for name, value in result.items()}


def table(engines: Mapping[str, EngineFigures], peers: Sequence[str], computed: Mapping[str, float | None]) -> str:
    """The table of one run: a row for each figure that is compared, a column for each engine, then the ratios."""
    header = ["", "naru", *peers, *(f"÷ {peer}" for peer in peers), "÷ best"]
    rows = [header]
    for case, name in RATE_OF_CASE.items():
        label = f"{NAMES_OF_CASE[case]} (tok/s)"
        if any(_figure(engines, engine, case, name) is not None for engine in engines):
            cells = [computed.get(f"{case}_vs_{p}") for p in (*peers, "best")]
            rows.append(_row(label, engines, peers, case, name, cells))
    for short, (case, name) in TIMES.items():
        if any(_figure(engines, engine, case, name) is not None for engine in engines):
            cells = [computed.get(f"{short}_vs_{p}") for p in (*peers, "best")]
            rows.append(_row(NAMES_OF_TIME[short], engines, peers, case, name, cells))
    for case in ("single", "conc16", "shared"):
        for short in ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99"):
            has_any = any(_figure(engines, name, case, f"{short}_ms") is not None for name in ("naru", *peers))
            if has_any and not (case == "conc16" and short.endswith("p99")):
                rows.append(_row(f"{_title(short)}, {case} (ms)", engines, peers, case, f"{short}_ms", []))
    return _aligned(rows)


def warnings(engines: Mapping[str, EngineFigures], load_average: float) -> list[str]:
    """What a reader of the figures has to know, in sentences."""
    found = []
    if load_average > 0.5:
        found.append(f"the machine was busy before the run (load average {load_average:.2f}): the figures are noisy")
    for engine, cases in engines.items():
        for case, values in cases.items():
            if values.get("client_cpu_share", 0.0) > MAX_CLIENT_CPU_SHARE:
                share = values["client_cpu_share"]
                found.append(f"{engine}, {case}: the client took {share:.0%} of a core, which the engine then lacked")
            if values.get("tokens_per_chunk", 1.0) > 1.1:
                size = values["tokens_per_chunk"]
                found.append(f"{engine}, {case}: a chunk held {size:.1f} tokens, so ITL is between chunks, not tokens")
    return found


def rounded(values: Any) -> Any:
    """The same structure with floats cut to six significant digits, for a results file that can be read."""
    if isinstance(values, float):
        return float(f"{values:.6g}")
    if isinstance(values, dict):
        return {key: rounded(value) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [rounded(value) for value in values]
    return values


def _figure(engines: Mapping[str, EngineFigures], engine: str, case: str, name: str) -> float | None:
    return engines.get(engine, {}).get(case, {}).get(name)


def _row(
    label: str,
    engines: Mapping[str, EngineFigures],
    peers: Sequence[str],
    case: str,
    name: str,
    shown_ratios: Sequence[float | None],
) -> list[str]:
    values = [_figure(engines, engine, case, name) for engine in ("naru", *peers)]
    blank = [""] * (len(peers) + 1 - len(shown_ratios))
    return [label, *(_number(value) for value in values), *(_times(value) for value in shown_ratios), *blank]


def _title(short: str) -> str:
    kind, percent = short.split("_")
    return f"{kind.upper()} {percent}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}×"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        first = row[0].ljust(widths[0])
        lines.append("  ".join([first, *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]))
    lines.insert(1, "-" * max(len(line) for line in lines))
    return "\n".join(line.rstrip() for line in lines)
