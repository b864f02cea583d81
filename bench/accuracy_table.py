"""Rows of the accuracy comparison and how they are printed. Pure; called by `accuracy` and who shows its results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from bench.divergence import Divergence

Kind = Literal["prompt", "generated"]
KINDS: tuple[Kind, ...] = ("prompt", "generated")

HEADER = (
    f"{'weights':8}{'KV':6}{'rows':11}{'engine':10}{'ISA':12}{'perplexity':>11}{'mean KL':>10}{'p99 KL':>10}"
    f"{'same top':>10}{'from source':>13}   KL in 10⁻³ nats"
)


@dataclass(frozen=True, slots=True)
class Row:
    """One engine on one file."""

    engine: str
    isa: str
    weights: str
    kv: str
    kind: Kind
    own: Divergence
    """From float32 arithmetic on the same file."""
    source_mean_kl: float
    """From the float32 weights the file was made from."""
    source_p99_kl: float


def line(row: Row) -> str:
    """One row of the table."""
    own = row.own
    return (
        f"{row.weights:8}{row.kv:6}{row.kind:11}{row.engine:10}{row.isa:12}{own.perplexity:11.4f}"
        f"{1e3 * own.mean_kl:10.4f}{1e3 * own.p99_kl:10.4f}{own.same_top:10.2%}{1e3 * row.source_mean_kl:13.4f}"
    )


def table(data: dict[str, Any]) -> str:
    """One line a row of the results file, in its order; KL in units of 10**-3 nats."""
    return "\n".join([HEADER, *(line(row_of(row)) for row in data["rows"])])


def row_of(data: dict[str, Any]) -> Row:
    """From the results file."""
    return Row(**{**data, "own": Divergence(**data["own"])})
