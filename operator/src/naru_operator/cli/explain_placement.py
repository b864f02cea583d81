"""`naru explain placement`: which copies there are and why, and where a model of a manifest would go. Asks a router."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from naru_operator.adapters.manifest_files import read_manifests
from naru_operator.cli.router_pages import ask, page_of, router_client, router_urls
from naru_operator.cli.status import EXIT_NOTHING_RUNS
from naru_operator.cli.text import human_bytes, table
from naru_proto.crd.model_deployment import ModelDeployment
from naru_proto.crd.worker_pool import WorkerPool
from naru_proto.errors import InvalidRequest, Unavailable

PATH = "/v1/naru/placement"
_WORKER_HEADER = ("WORKER", "POOL", "NODE", "USED/BUDGET", "FREE", "MODELS")
_MAX_MODELS_SHOWN = 6

Page = Mapping[str, Any]


def run_explain_placement(model: str | None, urls: Sequence[str], api_key: str | None, *, is_json: bool) -> int:
    """Prints models, workers and the last moves as one router sees them; 1 where nothing runs.

    Raises:
        NaruError: as the router said.
    """
    routers = router_urls(urls)
    if not routers:
        return EXIT_NOTHING_RUNS
    params = {"model": model} if model is not None else {}
    with router_client(api_key) as client:
        pages, failures = [], []
        for url in routers:
            try:
                pages.append(page_of(ask(client, "GET", f"{url}{PATH}", params=params), url))
            except Unavailable as exc:
                failures.append(exc)
    if not pages:
        raise failures[0]
    # All routers have the same map; the keeper knows its moves.
    page = next((each for each in pages if each.get("is_keeper")), pages[0])
    click.echo(_written(page, render, is_json=is_json))
    return 0


def run_dry_run(
    file: Path, pools: Sequence[str], num_bytes: int, urls: Sequence[str], api_key: str | None, *, is_json: bool
) -> int:
    """Prints where the ModelDeployments of a file would go; nothing is applied. 1 where nothing runs.

    Raises:
        InvalidRequest: the file holds no ModelDeployment, or one that is wrong.
        NaruError: as the router said.
    """
    manifests = read_manifests([file])
    models = [each for each in manifests if isinstance(each, ModelDeployment)]
    if not models:
        raise InvalidRequest(f"{str(file)!r} holds no ModelDeployment; name a file that does")
    routers = router_urls(urls)
    if not routers:
        return EXIT_NOTHING_RUNS
    known_pools = [each for each in manifests if isinstance(each, WorkerPool)]
    results = []
    with router_client(api_key) as client:
        for model in models:
            chosen, note = _pools_of(model, known_pools, pools)
            manifest = model.model_dump(mode="json", by_alias=True, exclude_unset=True)
            body = {"manifest": manifest, "pools": chosen, "num_bytes": num_bytes}
            page = page_of(ask(client, "POST", f"{routers[0]}{PATH}", body), routers[0])
            results.append({**page, "notes": [*page.get("notes", []), *note]})
    shown: Page | list[Page] = results[0] if len(results) == 1 else list(results)
    if is_json:
        click.echo(json.dumps(shown, indent=2))
    else:
        click.echo("\n\n".join(_written(page, render_dry_run, is_json=False) for page in results))
    return 0


def render(page: Page) -> str:
    """Models, workers and moves for people."""
    parts = [_model_text(each) for each in page["models"]]
    parts.append(table(_WORKER_HEADER, [_worker_row(worker) for worker in page["workers"]]))
    if page["moves"]:
        parts.append("\n".join(["last moves of the keeper:", *map(_move_text, page["moves"])]))
    return "\n\n".join(parts)


def render_dry_run(page: Page) -> str:
    """Where a model would go, for people."""
    size = f", {human_bytes(page['copy_bytes'])} each" if page["copy_bytes"] else ""
    count = page["num_copies"]
    lines = [f"{page['model']}: {count} {'copy' if count == 1 else 'copies'}{size} (dry run, nothing is changed)"]
    for copy in page["copies"]:
        lines += [f"  on {copy['worker']}{_leaves(copy)}", *(f"      {reason}" for reason in copy["reasons"])]
    missing = page["unplaced"]
    if missing:
        lines += [f"  {missing['num_missing']} of {count} fit nowhere: {missing['reason']}"]
    lines += [f"  note: {note}" for note in page["notes"]]
    return "\n".join(lines)


def _model_text(model: Page) -> str:
    most = "any" if model["max_replicas"] is None else model["max_replicas"]
    size = f", {human_bytes(model['copy_bytes'])} a copy" if model["copy_bytes"] else ""
    lines = [f"{model['model']}: {model['policy']}, {model['min_replicas']} to {most} copies{size}"]
    lines += [f"  {reason}" for reason in model["reasons"]]
    for copy in model["copies"]:
        busy = f", {copy['num_in_flight']} requests" if copy["num_in_flight"] else ""
        leaving = ", its worker leaves" if copy["is_leaving"] else ""
        lines.append(f"  on {copy['worker']}: {copy['state']}{busy}{leaving}")
    upcoming = model["next"]
    where = f"on {upcoming['worker']}{_leaves(upcoming)}" if upcoming["worker"] else "nowhere"
    lines.append(f"  one more would come up {where}: {'; '.join(upcoming['reasons'])}")
    return "\n".join(lines)


def _worker_row(worker: Page) -> tuple[str, ...]:
    names, budget = worker["models"], worker["budget_bytes"]
    shown = ", ".join(names[:_MAX_MODELS_SHOWN]) or "-"
    more = f" and {len(names) - _MAX_MODELS_SHOWN} more" if len(names) > _MAX_MODELS_SHOWN else ""
    return (
        worker["worker"] + (" (leaving)" if worker["is_leaving"] else ""),
        worker["pool"],
        worker["node"] or "-",
        f"{human_bytes(worker['used_bytes'])}/{human_bytes(budget) if budget else '?'}",
        human_bytes(worker["free_bytes"]) if budget else "?",
        shown + more,
    )


def _move_text(move: Page) -> str:
    at = datetime.datetime.fromtimestamp(move["at_s"]).strftime("%H:%M:%S")
    said = f"refused: {move['refusal']}" if move["refusal"] else move["why"]
    return f"  {at}  {move['model']} {move['direction']} on {move['worker']}, {move['reason']}: {said}"


def _leaves(copy: Page) -> str:
    return f", where {', '.join(copy['victims'])} would leave" if copy["victims"] else ""


def _pools_of(
    model: ModelDeployment, known: Sequence[WorkerPool], given: Sequence[str]
) -> tuple[list[str], Iterator[str]]:
    """Pools that may hold the model, and what to say of them: as named, else by the labels of those in the file."""
    wanted = model.spec.placement.pool_selector.match_labels
    if given:
        return list(given), iter(())
    if known:
        chosen = [pool.metadata.name for pool in known if wanted.items() <= pool.metadata.labels.items()]
        if not chosen:
            raise InvalidRequest(
                f"ModelDeployment {model.metadata.name!r}: no WorkerPool of the file has the labels {wanted!r}; add "
                "them to one, or name pools with --pool",
                param="spec.placement.poolSelector",
            )
        return chosen, iter(())
    note = "its poolSelector is not looked up, all pools are taken; name them with --pool"
    return [], iter([note] if wanted else [])


def _written(page: Page, render_text: Callable[[Page], str], *, is_json: bool) -> str:
    try:
        return json.dumps(page, indent=2) if is_json else render_text(page)
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise Unavailable(f"the router's page cannot be read ({exc!r}); it may be of another version") from exc
