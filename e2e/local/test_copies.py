"""A busy model gets a second copy and loses it when it is quiet again; what the routers say of placement."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from running_naru import RunningNaru, chat_body, eventually, small_model

pytestmark = pytest.mark.smollm2
MANIFEST = small_model(
    "replicas: {min: 1, max: 2}",
    "residency: {minResidency: 0s}",
    "scaling: {targetInFlight: 2, window: 1s, scaleDownDelay: 2s}",
)
TOO_LARGE = """\
apiVersion: serving.naru.dev/v1alpha1
kind: ModelDeployment
metadata: {name: giant}
spec:
  model: {uri: "hf://example/giant"}
"""


@pytest.fixture(scope="module")
def scaling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNaru]:
    folder = tmp_path_factory.mktemp("scaling")
    (folder / "models.yaml").write_text(MANIFEST)
    with RunningNaru(["--routers", "2", str(folder / "models.yaml")], folder / "home") as naru:
        yield naru


def num_ready(naru: RunningNaru) -> int:
    states = [lease["models"].get("smollm2", {}).get("state") for lease in naru.leases().values()]
    return states.count("ready")


def test_copies_follow_the_load(scaling: RunningNaru) -> None:
    eventually(lambda: num_ready(scaling) == 1, 30, "one copy, as the manifest says")
    stopping = threading.Event()
    problems: list[str] = []

    def ask() -> None:
        with httpx.Client(base_url=scaling.url, timeout=60, trust_env=False) as client:
            while not stopping.is_set():
                answer = client.post("/v1/chat/completions", json=chat_body("Tell a story.", max_tokens=32))
                if answer.status_code != 200:
                    problems.append(answer.text)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    try:
        eventually(lambda: num_ready(scaling) == 2, 60, "a second copy of the busy model")
    finally:
        stopping.set()
        for thread in threads:
            thread.join(60)
    assert not problems
    eventually(lambda: num_ready(scaling) == 1, 60, "the spare copy has gone")
    # A copy that went comes back when it is needed, and nothing else undoes what the routers decided.
    assert scaling.http.post("/v1/chat/completions", json=chat_body("Hello.", max_tokens=2)).status_code == 200


def test_placement_is_explained(scaling: RunningNaru, tmp_path: Path) -> None:
    shown = scaling.naru("explain", "placement", "smollm2")
    assert shown.returncode == 0, shown.stderr
    assert "default-0" in shown.stdout and "smollm2" in shown.stdout
    manifest = tmp_path / "giant.yaml"
    manifest.write_text(TOO_LARGE)
    dry = scaling.naru("explain", "placement", "--dry-run", str(manifest), "--size", "900Gi", "-o", "json")
    assert dry.returncode == 0, dry.stderr
    assert "giant" in json.dumps(json.loads(dry.stdout))
    assert "giant" not in scaling.http.get("/v1/models").text


def test_a_request_is_explained_while_it_is_remembered(scaling: RunningNaru) -> None:
    headers = {"x-request-id": "explained-1", "x-naru-explain": "1"}
    body = chat_body("Name the capital of France.", max_tokens=8)
    answer = scaling.http.post("/v1/chat/completions", json=body, headers=headers)
    worker_id = answer.headers["x-naru-route"].partition(";")[0]
    shown = scaling.naru("explain", "request", "explained-1")
    assert shown.returncode == 0, shown.stderr
    assert worker_id in shown.stdout and "served" in shown.stdout and "France" not in shown.stdout
    planned = scaling.naru("explain", "request", "--model", "smollm2", "--prompt", "Name the capital of France.")
    assert planned.returncode == 0 and "not sent" in planned.stdout, planned.stderr
    unknown = scaling.naru("explain", "request", "never-sent")
    assert unknown.returncode != 0 and "never-sent" in unknown.stderr
