"""A process for each model, as ollama runs them: llama-server is started for a model and asked for one token.

Called by `hub`; what a switch of models costs where every model has a process of its own.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.hub_models import ModelCopy
from bench.hub_worker import PROMPT
from bench.peers import llama_server, peers_folder
from bench.servers import answers, end_tree, exit_words, free_port
from bench.stats import median

START_TIMEOUT_S = 120.0
POLL_S = 0.002
SETTINGS: Mapping[str, tuple[str, ...]] = {
    "defaults": (),
    "no warm-up": ("--no-warmup",),
    "one slot of 4096 tokens": ("--ctx-size", "4096", "--parallel", "1"),
}
"""Flags by name. The last one is ollama's; the one with the fastest first token counts."""


class ProcessError(Exception):
    """llama-server did not start or answer."""


@dataclass(frozen=True, slots=True)
class ProcessFigures:
    """Seconds from starting the process to its first token, the model's file in the page cache."""

    first_token_p50_s: float
    """In the fastest setting."""
    ready_p50_s: float
    """Of it, until the server says that it is ready."""
    setting: str
    first_token_s: dict[str, tuple[float, ...]]
    """By setting."""


def measure_processes(
    models: Sequence[ModelCopy], num_threads: int, log_folder: Path, progress: Callable[[str], None]
) -> ProcessFigures:
    """Starts one server for each model and setting, one after another.

    Raises:
        PeerError: llama-server is not installed.
        ProcessError: it did not start or answer.
    """
    program = llama_server(peers_folder())
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in SETTINGS}
    for number, model in enumerate(models, 1):
        for name, flags in SETTINGS.items():
            model.path.read_bytes()  # into the page cache
            port = free_port()
            argv = [str(program), "-m", str(model.path), "--host", "127.0.0.1", "--port", str(port), *flags]
            argv += ["--threads", str(num_threads)]
            taken[name].append(_start_and_ask(argv, port, program.parent, log_folder / "hub-llamacpp.log"))
        latest = ", ".join(f"{name} {1000 * taken[name][-1][1]:.0f} ms" for name in SETTINGS)
        progress(f"llama-server, process per model: {number}/{len(models)}, {latest}")
    return summary(taken)


def summary(taken: dict[str, list[tuple[float, float]]]) -> ProcessFigures:
    """Figures of (seconds to ready, seconds to first token) by setting; there is at least one of each."""
    medians = {name: median([first for _, first in times]) for name, times in taken.items()}
    best = min(medians, key=lambda name: medians[name])
    return ProcessFigures(
        first_token_p50_s=medians[best],
        ready_p50_s=median([ready for ready, _ in taken[best]]),
        setting=best,
        first_token_s={name: tuple(first for _, first in times) for name, times in taken.items()},
    )


def _start_and_ask(argv: Sequence[str], port: int, libraries: Path, log_path: Path) -> tuple[float, float]:
    """(seconds to ready, seconds to first token) since the process was started."""
    started_s = time.perf_counter()
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LD_LIBRARY_PATH": str(libraries)},
            start_new_session=True,
        )
    try:
        while not answers(port, "/health"):
            code = process.poll()
            if code is not None or time.perf_counter() - started_s > START_TIMEOUT_S:
                why = "is not ready" if code is None else f"ended {exit_words(code)}"
                raise ProcessError(f"llama-server {why}; its log is {log_path}")
            time.sleep(POLL_S)
        ready_s = time.perf_counter() - started_s
        _wait_for_token(port)
        return ready_s, time.perf_counter() - started_s
    finally:
        end_tree(process)


def _wait_for_token(port: int) -> None:
    """Asks for a completion and returns when the first event with text has arrived."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_TIMEOUT_S)
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "stream": True, "ignore_eos": True}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise ProcessError(f"llama-server answered {response.status}: {response.read(500)!r}")
        while line := response.readline():
            if has_text(line):
                return
    except (OSError, http.client.HTTPException) as exc:
        raise ProcessError(f"llama-server did not answer: {exc}") from exc
    finally:
        connection.close()
    raise ProcessError("llama-server ended its answer without text")


def has_text(line: bytes) -> bool:
    """Whether a line of an event stream is an event of a completion that carries text."""
    if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
        return False
    try:
        event = json.loads(line.removeprefix(b"data:"))
        return bool(event["choices"][0]["text"])
    except (ValueError, KeyError, IndexError, TypeError):
        return False
