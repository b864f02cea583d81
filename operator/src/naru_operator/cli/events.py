"""`naru events`: what happened to models on workers, as a table that may go on."""

from __future__ import annotations

import asyncio
import datetime

import click

from naru_operator.adapters.route_map import ModelEvent, RouteMap, open_route_map
from naru_operator.cli.status import EXIT_NOTHING_RUNS, running_here
from naru_operator.cli.text import table
from naru_proto.errors import InvalidRequest

_HEADER = ("TIME", "WORKER", "MODEL", "CHANGE", "REASON")


def run_events(redis_url: str | None, *, count: int, is_following: bool) -> int:
    """Prints the last events, and those that follow; 1 where nothing runs.

    Raises:
        InvalidRequest: several instances run here, and none was named.
        Unavailable: the Redis does not answer.
    """
    if redis_url is None:
        urls = [state.redis_url for state in running_here()]
        if not urls:
            return EXIT_NOTHING_RUNS
        if len(urls) > 1:
            raise InvalidRequest(f"{len(urls)} instances run here; choose one with --redis-url: {', '.join(urls)}")
        redis_url = urls[0]
    asyncio.run(_show(redis_url, count, is_following))
    return 0


def render(events: list[ModelEvent]) -> str:
    """Events as a table, in the order given."""
    return table(_HEADER, [_row(event) for event in events])


async def _show(redis_url: str, count: int, is_following: bool) -> None:
    route_map = open_route_map(redis_url)
    try:
        last = await route_map.last_events(count)
        click.echo(render(last))
        if is_following:
            await _follow(route_map, last)
    finally:
        await route_map.close()


async def _follow(route_map: RouteMap, shown: list[ModelEvent]) -> None:
    rows = [_HEADER, *map(_row, shown)]
    # Later lines keep to the table's columns, and leave them where they are too long.
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER) - 1)]
    async for event in route_map.events_after(shown[-1].entry_id if shown else "0"):
        row = _row(event)
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        click.echo("  ".join((*cells, row[-1])))


def _row(event: ModelEvent) -> tuple[str, ...]:
    at = datetime.datetime.fromtimestamp(event.at_s).astimezone()
    time = f"{at:%Y-%m-%d %H:%M:%S}.{at.microsecond // 1000:03}"
    return (time, event.worker_id, event.model, f"{event.old} → {event.new}", event.reason)
