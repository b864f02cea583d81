"""`naru pull`: shows the progress of the worker's fetcher, which runs as a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

import click

from naru_operator.adapters.run_state import naru_home
from naru_operator.cli.progress import ProgressView, open_progress
from naru_proto.errors import BY_CODE, InternalError

EXIT_INTERRUPTED = 130


def run_pull(uri: str, revision: str) -> int:
    """Fetches; prints the path alone on standard output, so that scripts can use it.

    Raises:
        NaruError: as the fetcher said.
    """
    argv = [sys.executable, "-m", "naru_worker.adapters.fetch", uri, "--json", "--refresh"]
    argv += ["--home", str(naru_home()), "--revision", revision]
    with open_progress() as view, subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as fetcher:
        assert fetcher.stdout is not None
        try:
            last = _follow(fetcher.stdout, lambda event: _show(view, event))
        except KeyboardInterrupt:
            # The fetcher got the terminal's Ctrl-C, too.
            fetcher.wait()
            click.echo("interrupted; the same command goes on from there", err=True)
            return EXIT_INTERRUPTED
    if last.get("event") == "error":
        raise BY_CODE.get(str(last.get("code")), InternalError)(str(last.get("message")))
    if last.get("event") != "done":
        raise InternalError(
            f"the fetcher ended with exit code {fetcher.returncode} and no result; see its output above"
        )
    revision = f", revision {last['revision']}" if last["revision"] else ""
    click.echo(f"{last['digest']}{revision}", err=True)
    click.echo(last["path"])
    return 0


def _follow(lines: Iterable[str], show: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Reads events to the end; returns the last one."""
    event: dict[str, Any] = {}
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if event.get("event") == "progress":
            show(event)
    return event


def _show(view: ProgressView, event: dict[str, Any]) -> None:
    if event["phase"] == "ready":
        return  # the result says it
    view.update(str(event["detail"]), str(event["phase"]), int(event["done"]), int(event["total"]))
