"""llama.cpp's distributions on a text, by its own programs: ``llama-perplexity`` writes them, this module reads them.

Called by `bench.accuracy`. A text is cut into windows of one length; the second half of each counts, but
for its last token.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from bench.divergence import FloatArray, IntArray
from bench.peers import PeerError, llama_server

_MAGIC = b"_logits_"
_TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class Windows:
    """The tokens of a text in windows, and what llama.cpp thinks of them."""

    token_ids: IntArray
    """(windows, length)"""
    log_probs: FloatArray
    """(windows * (length - 1 - length // 2), vocab), in text order"""


def rows_of(length: int) -> range:
    """The positions of a window whose next token is scored."""
    return range(length // 2, length - 1)


def read_logits(data: bytes) -> Windows:
    """Reads the file of ``--save-all-logits``: 16 bits a log probability, a scale and a floor for each row.

    Raises:
        ValueError: not such a file, or one that ends early.
    """
    if data[:8] != _MAGIC or len(data) < 20:
        raise ValueError("not a file of llama-perplexity --save-all-logits")
    length, vocab, num_windows = (int(value) for value in np.frombuffer(data, "<i4", 3, 8))
    num_tokens = length * num_windows
    width = 2 * ((vocab + 1) // 2) + 4
    num_rows = num_windows * len(rows_of(length))
    start = 20 + 4 * num_tokens
    if min(length, vocab, num_windows) <= 0 or len(data) < start + 2 * num_rows * width:
        raise ValueError(f"the file of {len(data)} bytes does not hold {num_windows} windows of {length} tokens")
    token_ids = np.frombuffer(data, "<i4", num_tokens, 20).reshape(num_windows, length)
    rows = np.frombuffer(data, "<u2", num_rows * width, start).reshape(num_rows, width)
    heads = np.ascontiguousarray(rows[:, :4]).view("<f4")
    log_probs = rows[:, 4 : 4 + vocab].astype(np.float32) * heads[:, :1] + heads[:, 1:]
    return Windows(token_ids.astype(np.int32), log_probs)


def windows(
    folder: Path,
    model: Path,
    text: Path,
    length: int,
    num_threads: int,
    arguments: Sequence[str] = (),
    isa: str = "",
) -> Windows:
    """Runs llama-perplexity of the installation in `folder` on a text file.

    Raises:
        PeerError: not installed, or it failed.
    """
    with tempfile.TemporaryDirectory(prefix="naru-bench-") as work:
        target = Path(work) / "logits"
        argv = ["-m", str(model), "-f", str(text), "-c", str(length), "-b", str(length), "-t", str(num_threads)]
        _run(folder, "llama-perplexity", [*argv, "--save-all-logits", str(target), *arguments], isa)
        return read_logits(target.read_bytes())


def quantize(folder: Path, source: Path, target: Path, weights: str, only: str = "", base: str = "") -> Path:
    """Writes `source` (float) in a k-quant; with `only`, those tensors alone and the rest in `base`.

    Raises:
        PeerError: not installed, or it failed.
    """
    if target.is_file() and target.stat().st_mtime >= source.stat().st_mtime:
        return target
    partial = target.with_suffix(".partial")
    chosen = ["--tensor-type", f"{only}={weights}"] if only else []
    head = ["--token-embedding-type", "q8_0", "--output-tensor-type", "q8_0"]
    argv = ["--pure", *chosen, *head, str(source), str(partial), (base or weights).upper()]
    _run(folder, "llama-quantize", argv)
    os.replace(partial, target)
    return target


def _run(folder: Path, program: str, argv: Sequence[str], isa: str = "") -> None:
    bin_folder = llama_server(folder, isa).parent
    environment = {**os.environ, "LD_LIBRARY_PATH": str(bin_folder)}
    done = subprocess.run(
        [str(bin_folder / program), *argv],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
        timeout=_TIMEOUT_S,
    )
    if done.returncode != 0:
        raise PeerError(f"{program} ended with code {done.returncode}: {done.stdout[-1500:]}")
