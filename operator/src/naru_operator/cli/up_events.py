"""What `naru up` tells the person at the terminal. Implements the controller's `Events`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from naru_operator.adapters.log_file import LogFile
from naru_operator.adapters.supervisor import ProcessExit
from naru_operator.cli.progress import ProgressView
from naru_operator.core.desired import Tier
from naru_operator.core.model_plan import KNOWN, LoadModel, UnloadModel
from naru_proto.errors import NaruError, Unavailable

if TYPE_CHECKING:
    from naru_operator.adapters.worker_client import LoadReport

_TAIL_LINES = 20
_MAX_REASONS_SHOWN = 20


class UpEvents:
    """Writes to the progress view and the log; remembers what the start waits for."""

    def __init__(self, view: ProgressView, log: LogFile, *, is_verbose: bool) -> None:
        self.view = view
        self._log = log
        self._is_verbose = is_verbose
        self._is_serving = False
        self._last_trouble = ""
        self.failed_models: dict[str, NaruError] = {}
        """Models whose last load failed, until one works."""
        self.settled_models: set[str] = set()
        """Models that were loaded once, or that a worker knows and loads for the first request."""

    def serving(self, view: ProgressView) -> None:
        """From now on changes are worth a line each."""
        self.view = view
        self._is_serving = True

    def line(self, name: str, text: str) -> None:
        """A part wrote a line."""
        self._log.write(name, text)
        if self._is_verbose:
            self.view.message(f"{name} | {text}")

    def planned(self, reasons: tuple[str, ...]) -> None:
        """Steps that are taken now."""
        for reason in reasons:
            self._log.write("plan", reason)
        if self._is_verbose:
            shown = len(reasons)
        else:
            shown = _MAX_REASONS_SHOWN if self._is_serving else 0
        for reason in reasons[:shown]:
            self.view.message(reason)
        if 0 < shown < len(reasons):
            self.view.message(f"and {len(reasons) - shown} more steps, in the log")

    def loading(self, command: LoadModel, report: LoadReport) -> None:
        """A load went on. To make a model known is no progress that is worth a line."""
        if command.is_spare:
            return
        if report.state in (KNOWN, "ready", "active"):
            self.failed_models.pop(command.model, None)
            self.settled_models.add(command.model)
        if command.residency.tier is Tier.COLD:
            return
        what = f"{command.model} on {command.worker_id}"
        self.view.update(what, report.state, report.bytes_done, report.bytes_total)

    def failed(self, command: LoadModel | UnloadModel, error: NaruError) -> None:
        """A command ended with an error."""
        if isinstance(command, LoadModel):
            self.failed_models[command.model] = error
            self.view.update(f"{command.model} on {command.worker_id}", "failed", 0, 0)
        self.tell(f"error: model {command.model!r} on {command.worker_id}: {error.message}")

    def trouble(self, message: str) -> None:
        """A turn of the loop failed; told once, not every second."""
        if message != self._last_trouble:
            self._last_trouble = message
            self.tell(f"warning: {message}")

    def exited(self, ended: ProcessExit) -> None:
        """A child ended though nobody asked it to."""
        self.tell(f"warning: {ended}; it starts again in {ended.restart_in_s:g} s")
        self.tail(ended)

    def tail(self, ended: ProcessExit) -> None:
        """Shows the last lines of a child, unless they were shown as they came."""
        if not self._is_verbose:
            for text in ended.tail[-_TAIL_LINES:]:
                self.view.message(f"  {ended.name} | {text}")

    def tell(self, text: str) -> None:
        """A line of our own, to terminal and log."""
        self._log.write("naru", text)
        self.view.message(text)


def start_failure(ended: ProcessExit) -> Unavailable:
    """A part that ends before it served once: it will end again, so the start is given up."""
    return Unavailable(f"{ended} before it was ready; its last lines are above")
