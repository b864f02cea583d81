"""Runs the load generator and reads what it says. Called by `bench.router`; `native/load.cpp` is the program."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from bench.router.parts import PartError
from bench.router.stand import MODEL, Cores

PROMPT = (
    "Request 00000000. Here is a note about a ferry landing: the boat leaves at nine, carries forty people and six "
    "cars, and comes back before noon unless the river is high. When does it leave?"
)


@dataclass(frozen=True, slots=True)
class Shot:
    """What one run of the load generator saw. Seconds; latencies are of whole answers."""

    requests: int
    errors: int
    tokens: int
    wall_s: float
    cpu_s: float
    """Of the load generator."""
    p50_s: float
    p90_s: float
    p99_s: float
    max_s: float
    first_p50_s: float
    """To the first token."""
    first_p99_s: float

    @property
    def requests_per_s(self) -> float:
        """Answers in a second."""
        return self.requests / self.wall_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens in a second."""
        return self.tokens / self.wall_s


@dataclass(frozen=True, slots=True)
class Chat:
    """What is asked for, again and again."""

    tokens: int
    stream: bool = False

    def body(self) -> bytes:
        """The request's body; its zeros are a number that changes."""
        messages = [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": PROMPT},
        ]
        value = {"model": MODEL, "messages": messages, "max_tokens": self.tokens, "temperature": 0.0}
        return json.dumps({**value, "stream": True} if self.stream else value).encode()


def shoot(
    program: Path,
    cores: Cores,
    port: int,
    chat: Chat,
    *,
    connections: int,
    seconds: float = 0.0,
    requests: int = 0,
    rate: float = 0.0,
) -> Shot:
    """One run: for a time or a number of requests, as fast as answers come or at a mean rate.

    Raises:
        PartError: an answer was wrong, or none came.
    """
    with tempfile.NamedTemporaryFile() as file:
        file.write(chat.body())
        file.flush()
        options: Sequence[object] = ("--port", port, "--connections", connections, "--tokens", chat.tokens)
        options = (*options, "--body", file.name, "--seconds", seconds, "--requests", requests, "--rate", rate)
        argv = ["taskset", "--cpu-list", str(cores.router), str(program), *map(str, options)]
        done = subprocess.run(argv, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise PartError(f"the load generator ended with code {done.returncode}: {done.stderr[-1000:]}")
    said = json.loads(done.stdout)
    shot = Shot(**{field.name: said[field.name] for field in fields(Shot)})
    if shot.errors or not shot.requests:
        raise PartError(f"{shot.errors} answers were wrong, {shot.requests} right: {done.stderr[-1000:]}")
    return shot
