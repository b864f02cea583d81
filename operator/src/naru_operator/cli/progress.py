"""Progress on a terminal as bars, elsewhere as few lines. Called by `naru up` and `naru pull`; writes to stderr."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import click

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_LINE_EVERY_RATIO = 0.25


class ProgressView(Protocol):
    """Where progress is shown."""

    def update(self, what: str, phase: str, done: int, total: int) -> None:
        """Something is in a phase, with bytes done of a total (0: unknown)."""

    def message(self, text: str) -> None:
        """A line between the bars."""


class LineProgress:
    """A line for each new phase, and for each quarter of its bytes."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[str, int]] = {}

    def update(self, what: str, phase: str, done: int, total: int) -> None:
        """See `ProgressView`."""
        quarter = int(done / total / _LINE_EVERY_RATIO) if total else 0
        if self._last.get(what) == (phase, quarter):
            return
        self._last[what] = (phase, quarter)
        amount = f" {done / 1e6:.0f} of {total / 1e6:.0f} MB" if total else ""
        click.echo(f"{what}: {phase}{amount}", err=True)

    def message(self, text: str) -> None:
        """See `ProgressView`."""
        click.echo(text, err=True)


class BarProgress:
    """A bar for each thing that goes on."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def update(self, what: str, phase: str, done: int, total: int) -> None:
        """See `ProgressView`."""
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=None)
        is_over = phase in ("ready", "failed")
        self._bars.update(
            self._tasks[what],
            description=f"{what}: {phase}",
            completed=1 if is_over else done,
            total=1 if is_over else (total or None),
            visible=phase != "ready",
        )

    def message(self, text: str) -> None:
        """See `ProgressView`."""
        self._bars.console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def open_progress() -> Iterator[ProgressView]:
    """Bars while the context lasts, where stderr is a terminal."""
    if not sys.stderr.isatty():
        yield LineProgress()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        yield BarProgress(bars)
