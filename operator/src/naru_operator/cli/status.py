"""`naru status`: the route map as two tables."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import click

from naru_operator.adapters.route_map import Board, open_route_map
from naru_operator.adapters.run_state import RunState, naru_home, running
from naru_proto.registry import ModelRecord, ResidentRecord

EXIT_NOTHING_RUNS = 1


def run_status(redis_url: str | None) -> int:
    """Prints the tables; 1 where nothing runs.

    Raises:
        Unavailable: the Redis does not answer.
    """
    if redis_url:
        click.echo(render(asyncio.run(_read(redis_url))))
        return 0
    states = running(naru_home())
    if not states:
        click.echo("nothing runs here; start with `naru up PATH`, or give --redis-url", err=True)
        return EXIT_NOTHING_RUNS
    click.echo("\n\n".join(f"{_headline(state)}\n\n{render(asyncio.run(_read(state.redis_url)))}" for state in states))
    return 0


def _headline(state: RunState) -> str:
    return f"{state.http_url} · gRPC {state.grpc_address} · process {state.pid} · logs {state.log_dir}"


async def _read(redis_url: str) -> Board:
    route_map = open_route_map(redis_url)
    try:
        return await route_map.read()
    finally:
        await route_map.close()


def render(board: Board) -> str:
    """The board as text, all in name order."""
    models = [_model_row(record, board) for _, record in sorted(board.models.items())]
    workers = [
        (
            worker.worker_id,
            worker.pool,
            "draining" if worker.draining else "serving",
            worker.address,
            str(worker.num_running),
            str(worker.num_waiting),
            ", ".join(sorted(worker.models)) or "-",
        )
        for _, worker in sorted(board.workers.items())
    ]
    return "\n\n".join(
        (
            table(("MODEL", "ALIASES", "STATE", "COPIES", "URI"), models),
            table(("WORKER", "POOL", "STATE", "ADDRESS", "RUNNING", "WAITING", "MODELS"), workers),
        )
    )


def _model_row(record: ModelRecord, board: Board) -> tuple[str, ...]:
    held = [worker.models[record.name] for worker in board.workers.values() if record.name in worker.models]
    num_ready = sum(resident.state == "ready" for resident in held)
    aliases = ", ".join(record.aliases) or "-"
    return (record.name, aliases, _state(held), f"{num_ready}/{max(1, record.min_replicas)}", record.uri)


def _state(held: list[ResidentRecord]) -> str:
    """The best copy's state, with its progress or error."""
    order = ("ready", "draining", "loading", "fetching", "failed", "cold")
    ranked = sorted(held, key=lambda resident: order.index(resident.state) if resident.state in order else len(order))
    if not ranked:
        return "waiting"
    best = ranked[0]
    if best.state == "failed":
        return f"failed: {best.error}"
    if best.state in ("fetching", "loading") and best.bytes_total:
        return f"{best.state} {100 * best.bytes_done // best.bytes_total} %"
    return best.state


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Columns two blanks apart, the last one open."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header) - 1)]
    lines = []
    for row in (header, *rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join((*cells, row[-1])).rstrip())
    return "\n".join(lines)
