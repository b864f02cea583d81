"""What a fetch returns and reports; shared by every scheme of this package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class FetchedModel:
    """A model on this machine's disk."""

    path: Path
    """A ``.gguf`` file, or a folder with ``*.safetensors``, ``config.json`` and the tokenizer's files."""
    digest: str
    """Identity of the content, ``kind:hex``: changes when the files do."""
    revision: str = ""
    """The package version or hub commit that was taken; empty for plain files."""


Phase = Literal["resolving", "waiting", "downloading", "verifying", "extracting", "ready"]


@dataclass(frozen=True, slots=True)
class FetchProgress:
    """One report: bytes are of the current phase; a total of 0 is unknown."""

    phase: Phase
    bytes_done: int = 0
    bytes_total: int = 0
    detail: str = ""


OnProgress = Callable[[FetchProgress], None]
"""Called in the fetching thread. What it raises ends the fetch; bytes already on disk stay for the next try."""

_REPORT_EVERY_BYTES = 256 << 10


def byte_reporter(on_progress: OnProgress, phase: Phase, detail: str) -> Callable[[int, int], None]:
    """An ``on_bytes(done, total)`` that reports the first and last bytes and every quarter of a MiB between."""
    last = -_REPORT_EVERY_BYTES

    def on_bytes(done: int, total: int) -> None:
        nonlocal last
        if done < last or done - last >= _REPORT_EVERY_BYTES or done == total:
            last = done
            on_progress(FetchProgress(phase, done, total, detail))

    return on_bytes
