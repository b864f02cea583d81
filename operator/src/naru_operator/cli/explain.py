"""`naru explain model`: what the registry says of a model, and what each worker of its pools says of it."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Iterable
from dataclasses import dataclass

import click

from naru_operator.adapters.route_map import Board, open_route_map
from naru_operator.adapters.worker_client import Explanation, WorkerClient
from naru_operator.cli.status import EXIT_NOTHING_RUNS, running_here, state_text
from naru_operator.cli.text import listed
from naru_proto.errors import ModelNotFound, NaruError, Unavailable
from naru_proto.registry import ModelRecord, WorkerRecord

ANSWER_TIMEOUT_S = 2.0
_MAX_NAMES_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Answer:
    """What one worker says."""

    worker: WorkerRecord
    explanation: Explanation | None
    problem: str = ""
    """Why there is no explanation."""


def run_explain(name: str, redis_url: str | None) -> int:
    """Prints what is known of the model, for each instance that has it; 1 where nothing runs.

    Raises:
        ModelNotFound: no instance has the model; with names that are close.
        Unavailable: the Redis does not answer.
    """
    urls = [redis_url] if redis_url else [state.redis_url for state in running_here()]
    if not urls:
        return EXIT_NOTHING_RUNS
    boards = asyncio.run(_read_all(urls))
    found = [(record, board) for board in boards if (record := find_model(board, name)) is not None]
    if not found:
        raise _unknown(name, {known for board in boards for known in _served_names(board)})
    click.echo("\n\n".join(render(record, asyncio.run(_ask_all(record, board))) for record, board in found))
    return 0


def find_model(board: Board, name: str) -> ModelRecord | None:
    """The model of a name, or of an alias where no model has that name."""
    if name in board.models:
        return board.models[name]
    return next((record for _, record in sorted(board.models.items()) if name in record.aliases), None)


def render(record: ModelRecord, answers: Iterable[Answer]) -> str:
    """The registry's words, then the workers' in the order given."""
    num_copies = max(1, record.min_replicas)
    kept = f"kept loaded: {num_copies} {'copy' if num_copies == 1 else 'copies'}"
    facts = {
        "aliases": ", ".join(record.aliases),
        "from": record.uri + (f" at {record.revision}" if record.revision else ""),
        "generation": str(record.generation),
        "policy": "on demand: the first request loads it" if record.on_demand else kept,
        "pools": ", ".join(record.pools) or "any",
    }
    width = max(map(len, facts))
    parts = ["\n".join([record.name, *(f"  {key.ljust(width)}  {value}" for key, value in facts.items() if value)])]
    parts += [_answer_text(record.name, answer) for answer in answers]
    if len(parts) == 1:
        parts.append("no living worker serves its pools")
    return "\n\n".join(parts)


def _answer_text(model: str, answer: Answer) -> str:
    worker = answer.worker
    head = worker.worker_id + (" (draining)" if worker.draining else "")
    if answer.explanation is None:
        return f"{head}: {answer.problem}"
    resident = worker.models.get(model)
    state = answer.explanation.state
    if resident is not None and resident.state == state:
        state = state_text(resident)  # with its progress
    return "\n".join([f"{head}: {state}", *(f"  {reason}" for reason in answer.explanation.reasons)])


async def _read_all(urls: Iterable[str]) -> list[Board]:
    boards = []
    for url in urls:
        route_map = open_route_map(url)
        try:
            boards.append(await route_map.read())
        finally:
            await route_map.close()
    return boards


async def _ask_all(record: ModelRecord, board: Board) -> list[Answer]:
    workers = [w for _, w in sorted(board.workers.items()) if not record.pools or w.pool in record.pools]
    return list(await asyncio.gather(*(_ask(record.name, worker) for worker in workers)))


async def _ask(model: str, worker: WorkerRecord) -> Answer:
    client = WorkerClient(worker.address)
    try:
        return Answer(worker, await client.explain(model, ANSWER_TIMEOUT_S))
    except ModelNotFound:
        return Answer(worker, None, "does not know it")
    except Unavailable as exc:
        return Answer(worker, None, f"does not answer within {ANSWER_TIMEOUT_S:g} s: {exc.message}")
    except NaruError as exc:
        return Answer(worker, None, exc.message)
    finally:
        await client.close()


def _served_names(board: Board) -> set[str]:
    return {name for record in board.models.values() for name in (record.name, *record.aliases)}


def _unknown(name: str, known: set[str]) -> ModelNotFound:
    close = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.5)
    if close:
        hint = f"did you mean {' or '.join(repr(each) for each in close)}?"
    else:
        hint = f"known models: {listed(sorted(known), _MAX_NAMES_SHOWN)}" if known else "no model is registered"
    return ModelNotFound(f"the model {name[:200]!r} does not exist; {hint}", param="name")
