"""What `helm test` asks, against a small HTTP server. The jobs' script meets a real API server in e2e/controlplane."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from helm_chart import CHART, find, render


@contextmanager
def answering(pages: dict[str, tuple[int, Any]], bodies: list[Any]) -> Iterator[str]:
    """A server with these answers by path; what is posted goes to `bodies`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, page = pages[self.path]
            data = json.dumps(page).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.do_GET()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def ask(url: str) -> subprocess.CompletedProcess[str]:
    script = (CHART / "files" / "ask.py").read_text(encoding="utf-8")
    env = {**os.environ, "NARU_URL": url, "TIMEOUT_SECONDS": "10", "no_proxy": "*"}
    return subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=30, check=False
    )


@pytest.mark.parametrize(
    ("models", "completion", "returncode", "said"),
    [
        ([], None, 0, "models: none yet"),
        (["tiny"], (200, {"choices": [{"text": " sea"}]}), 0, "tiny went on with ' sea'"),
        (["tiny"], (503, {"error": {"message": "no worker"}}), 1, "503"),
        (["tiny"], (200, {"choices": []}), 1, "did not answer as it should"),
    ],
    ids=["no model", "a model", "it cannot", "nonsense"],
)
def test_the_question_of_helm_test(
    models: list[str], completion: tuple[int, Any] | None, returncode: int, said: str
) -> None:
    pages: dict[str, tuple[int, Any]] = {"/v1/models": (200, {"data": [{"id": name} for name in models]})}
    if completion:
        pages["/v1/completions"] = completion
    bodies: list[Any] = []
    with answering(pages, bodies) as url:
        done = ask(url)
    assert done.returncode == returncode, done.stderr
    assert said in done.stdout + done.stderr
    assert [body["model"] for body in bodies] == models


def test_nobody_there_is_told() -> None:
    done = ask("http://127.0.0.1:9")
    assert done.returncode == 1
    assert "http://127.0.0.1:9 did not answer" in done.stderr


def test_routers_that_ask_for_a_key_are_found_to_answer() -> None:
    with answering({"/v1/models": (401, {"error": {"message": "no key"}})}, []) as url:
        done = ask(url)
    assert (done.returncode, done.stderr) == (0, "") and "ask for an API key" in done.stdout


def test_the_pod_asks_the_routers_service() -> None:
    pod = find(render(release="llm", namespace="prod"), "Pod", "llm-test")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    env = {item["name"]: item["value"] for item in pod["spec"]["containers"][0]["env"]}
    assert env["NARU_URL"] == "http://llm-router.prod.svc.cluster.local:8080"
