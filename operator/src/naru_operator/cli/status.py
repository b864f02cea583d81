"""`naru status`: the route map as two tables. `naru explain` words states as it does."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import click

from naru_operator.adapters.route_map import Board, open_route_map
from naru_operator.adapters.run_state import RunState, naru_home, running
from naru_operator.cli.text import human_bytes, listed, table
from naru_proto.registry import ModelRecord, ResidentRecord, WorkerRecord

EXIT_NOTHING_RUNS = 1

_MODEL_HEADER = ("MODEL", "ALIASES", "STATE", "COPIES", "BYTES", "URI")
_WORKER_HEADER = ("WORKER", "POOL", "STATE", "ADDRESS", "RUNNING", "WAITING", "USED/BUDGET", "KNOWN", "MODELS")
_MAX_MODELS_SHOWN = 8
_STATES = ("ready", "loading", "host", "fetching", "draining", "failed", "cold")
"""From serving to nothing."""


def run_status(redis_url: str | None) -> int:
    """Prints the tables; 1 where nothing runs.

    Raises:
        Unavailable: the Redis does not answer.
    """
    if redis_url:
        click.echo(render(asyncio.run(_read(redis_url))))
        return 0
    states = running_here()
    if not states:
        return EXIT_NOTHING_RUNS
    click.echo("\n\n".join(f"{_headline(state)}\n\n{render(asyncio.run(_read(state.redis_url)))}" for state in states))
    return 0


def running_here() -> list[RunState]:
    """The instances that run here; says so where there is none."""
    states = running(naru_home())
    if not states:
        click.echo("nothing runs here; start with `naru up PATH`, or give --redis-url", err=True)
    return states


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
    workers = [_worker_row(worker) for _, worker in sorted(board.workers.items())]
    return "\n\n".join((table(_MODEL_HEADER, models), table(_WORKER_HEADER, workers)))


def _model_row(record: ModelRecord, board: Board) -> tuple[str, ...]:
    held = [worker.models[record.name] for worker in board.workers.values() if record.name in worker.models]
    num_ready = sum(resident.state == "ready" for resident in held)
    num_bytes = sum(resident.num_bytes for resident in held)
    return (
        record.name,
        ", ".join(record.aliases) or "-",
        _model_state(record, held),
        str(num_ready) if record.on_demand else f"{num_ready}/{max(1, record.min_replicas)}",
        human_bytes(num_bytes) if num_bytes else "-",
        record.uri,
    )


def _worker_row(worker: WorkerRecord) -> tuple[str, ...]:
    used = f"{human_bytes(worker.used_bytes)} / {human_bytes(worker.budget_bytes)}"
    return (
        worker.worker_id,
        worker.pool,
        "draining" if worker.draining else "serving",
        worker.address,
        str(worker.num_running),
        str(worker.num_waiting),
        used if worker.budget_bytes else "-",
        str(worker.num_known),
        listed(sorted(worker.models), _MAX_MODELS_SHOWN),
    )


def _model_state(record: ModelRecord, held: Sequence[ResidentRecord]) -> str:
    best = best_copy(held) if held else None
    if best is None or best.state == "cold":
        return "on demand" if record.on_demand else "not loaded"
    return state_text(best)


def best_copy(held: Sequence[ResidentRecord]) -> ResidentRecord:
    """Of at least one copy the one that serves, or is nearest to it; of equal ones the one that got furthest."""
    return min(held, key=lambda resident: (_rank(resident.state), -_progress_ratio(resident)))


def state_text(resident: ResidentRecord) -> str:
    """A copy's state, with its progress and time left, or its error."""
    if resident.state == "failed":
        return f"failed: {resident.error}"
    if resident.state not in ("fetching", "loading"):
        return resident.state
    share = f" {100 * resident.bytes_done // resident.bytes_total} %" if resident.bytes_total else ""
    eta = f", {math.ceil(resident.eta_s)} s left" if 0 < resident.eta_s < math.inf else ""
    return f"{resident.state}{share}{eta}"


def _rank(state: str) -> int:
    return _STATES.index(state) if state in _STATES else len(_STATES)


def _progress_ratio(resident: ResidentRecord) -> float:
    return resident.bytes_done / resident.bytes_total if resident.bytes_total else 0.0
