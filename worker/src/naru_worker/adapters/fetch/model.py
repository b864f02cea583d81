"""What a fetch returns and reports; shared by every scheme of this package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from naru_worker.adapters.fetch.locks import HeldLock


@dataclass(frozen=True, slots=True)
class FetchedModel:
    """A model on this machine's disk."""

    path: Path
    """A ``.gguf`` or ``.onnx`` file, the folder of an ONNX model, or one with ``*.safetensors``, ``config.json`` and
    the tokenizer's files."""
    digest: str
    """Identity of the content, ``kind:hex``: changes when the files do."""
    revision: str = ""
    """The package version, hub commit, object version or artifact digest that was taken; empty for plain files."""
    use: HeldLock | None = field(default=None, compare=False, repr=False)
    """Keeps the files in the cache until it is released, or this object is gone; None where no cache holds them."""

    def release(self) -> None:
        """The files are not needed any more: the cache may evict them."""
        if self.use is not None:
            self.use.close()

    def touch(self) -> None:
        """The model was used, though not by its files: they are evicted after those of models that were not."""
        if self.use is not None:
            self.use.touch()


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
        # The same number again is another try: whoever watches may end it there.
        if done <= last or done - last >= _REPORT_EVERY_BYTES or done == total:
            last = done
            on_progress(FetchProgress(phase, done, total, detail))

    return on_bytes


def shifted(on_bytes: Callable[[int, int], None], base: int, total: int) -> Callable[[int, int], None]:
    """An ``on_bytes`` for one of several files: its bytes follow ``base`` earlier ones."""
    return lambda done, _: on_bytes(base + done, total)
