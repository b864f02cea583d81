"""`naru explain placement`: a router's pages as text and JSON, dry runs of a file, and what is said when it cannot."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner, Result

from naru_operator.cli import explain_placement
from naru_operator.cli.main import cli

MIB = 1 << 20
PLACEMENT: dict[str, Any] = {
    "is_keeper": True,
    "models": [
        {
            "model": "chat", "held_as": "chat@1", "policy": "preferred", "min_replicas": 1, "max_replicas": None,
            "copy_bytes": 60 * MIB,
            "copies": [{"worker": "w0", "pool": "gpu", "node": "n0", "state": "ready", "is_leaving": False,
                        "num_bytes": 60 * MIB, "num_in_flight": 4, "queue_s": 0.0, "is_pinned": False}],
            "reasons": ["1 copies up; at least 1, at most as many as there are workers"],
            "next": {"worker": "w1", "victims": ["old"], "reasons": ["old must leave"]},
        }
    ],
    "workers": [
        {"worker": "w0", "pool": "gpu", "node": "n0", "is_leaving": True, "budget_bytes": 100 * MIB,
         "used_bytes": 60 * MIB, "free_bytes": 40 * MIB, "idle_bytes": 0, "models": ["chat@1"]},
        {"worker": "w1", "pool": "gpu", "node": None, "is_leaving": False, "budget_bytes": None,
         "used_bytes": 0, "free_bytes": 0, "idle_bytes": 0, "models": []},
    ],
    "moves": [{"at_s": 1.5, "model": "chat@1", "worker": "w0", "direction": "up", "reason": "hot", "why": "busy",
               "refusal": None}],
}  # fmt: skip
DRY_RUN: dict[str, Any] = {
    "model": "new", "num_copies": 2, "copy_bytes": 45 * MIB,
    "copies": [{"worker": "w1", "victims": ["old"], "reasons": ["old must leave"]}],
    "unplaced": {"num_missing": 1, "reason": "a copy needs 45.0 MB"}, "notes": ["so it is"],
}  # fmt: skip
POOL = """
apiVersion: serving.naru.dev/v1alpha1
kind: WorkerPool
metadata: {name: fast, labels: {tier: fast}}
spec: {accelerator: {kind: cpu}, workers: {min: 1}}
---
"""
MODEL = """
apiVersion: serving.naru.dev/v1alpha1
kind: ModelDeployment
metadata: {name: new}
spec:
  model: {uri: "hf://o/new"}
  placement: {poolSelector: {matchLabels: {tier: fast}}}
"""

Answer = Callable[[httpx.Request], httpx.Response]


def naru(monkeypatch: pytest.MonkeyPatch, answer: Answer, *arguments: str) -> Result:
    def client(api_key: str | None) -> httpx.Client:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        return httpx.Client(transport=httpx.MockTransport(answer), headers=headers)

    monkeypatch.setattr(explain_placement, "router_client", client)
    return CliRunner().invoke(cli, ["explain", "placement", *arguments])


def test_models_workers_and_moves_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append((request.method, str(request.url), request.headers.get("authorization")))
        return httpx.Response(200, json=PLACEMENT)

    result = naru(monkeypatch, answer, "chat", "--url", "http://r:1/v1", "--api-key", "k")
    assert asked == [("GET", "http://r:1/v1/naru/placement?model=chat", "Bearer k")]
    assert result.exit_code == 0
    model, workers, moves = result.output.rstrip("\n").split("\n\n")
    assert model == (
        "chat: preferred, 1 to any copies, 60 MiB a copy\n"
        "  1 copies up; at least 1, at most as many as there are workers\n"
        "  on w0: ready, 4 requests\n"
        "  one more would come up on w1, where old would leave: old must leave"
    )
    assert workers == (
        "WORKER        POOL  NODE  USED/BUDGET     FREE    MODELS\n"
        "w0 (leaving)  gpu   n0    60 MiB/100 MiB  40 MiB  chat@1\n"
        "w1            gpu   -     0 B/?           ?       -"
    )
    assert moves.endswith("chat@1 up on w0, hot: busy")


def test_json_is_the_page_of_the_router_that_is_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.host == "gone":
            raise httpx.ConnectError("no")
        return httpx.Response(200, json={**PLACEMENT, "is_keeper": request.url.host == "b"})

    urls = [part for host in ("gone", "a", "b") for part in ("--url", f"http://{host}:1")]
    result = naru(monkeypatch, answer, "-o", "json", *urls)
    assert json.loads(result.output) == PLACEMENT


@pytest.mark.parametrize(("text", "pools"), [(MODEL, []), (POOL + MODEL, ["fast"])])
def test_a_dry_run_sends_the_manifest_and_the_pools_it_selects(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, pools: list[str]
) -> None:
    file = tmp_path / "new.yaml"
    file.write_text(text)
    bodies = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return httpx.Response(200, json=DRY_RUN)

    result = naru(monkeypatch, answer, "--dry-run", str(file), "--size", "45Mi", "--url", "http://r:1")
    assert bodies[0]["pools"] == pools and bodies[0]["num_bytes"] == 45 * MIB
    assert bodies[0]["manifest"]["metadata"]["name"] == "new"
    note = "" if pools else "  note: its poolSelector is not looked up, all pools are taken; name them with --pool\n"
    assert result.output == (
        "new: 2 copies, 45 MiB each (dry run, nothing is changed)\n"
        "  on w1, where old would leave\n"
        "      old must leave\n"
        "  1 of 2 fit nowhere: a copy needs 45.0 MB\n"
        "  note: so it is\n" + note
    )


def test_pools_that_are_named_win(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "new.yaml"
    file.write_text(POOL + MODEL)
    bodies = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return httpx.Response(200, json=DRY_RUN)

    options = ("--dry-run", str(file), "--pool", "x", "--pool", "y", "--url", "http://r:1", "-o", "json")
    result = naru(monkeypatch, answer, *options)
    assert bodies[0]["pools"] == ["x", "y"] and json.loads(result.output) == DRY_RUN


@pytest.mark.parametrize(
    ("reply", "words", "code"),
    [
        (httpx.Response(404, json={"error": {"message": "the model 'x' does not exist"}}), "does not exist", 1),
        (httpx.Response(400, json={"error": {"message": "bad"}}), "bad", 2),
        (httpx.Response(200, text="<html>"), "no router", 1),
        (httpx.Response(200, json={"models": 5}), "another version", 1),
        (httpx.Response(502, json=[]), "answers 502", 1),
    ],
)
def test_what_a_router_refuses_or_does_not_know_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, reply: httpx.Response, words: str, code: int
) -> None:
    result = naru(monkeypatch, lambda request: reply, "x", "--url", "http://r:1")
    assert result.exit_code == code and result.stdout == "" and words in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [("m", "--dry-run", __file__), ("--pool", "p"), ("--dry-run", __file__, "--size", "many"), ("--dry-run", "/none")],
)
def test_options_that_do_not_go_together_are_refused(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    result = naru(monkeypatch, lambda request: httpx.Response(200, json={}), *arguments)
    assert result.exit_code == 2


def test_a_file_without_models_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "pool.yaml"
    file.write_text(POOL.removesuffix("---\n"))
    result = naru(monkeypatch, lambda request: httpx.Response(200), "--dry-run", str(file), "--url", "http://r:1")
    assert result.exit_code == 2 and "holds no ModelDeployment" in result.stderr


async def test_nothing_running_is_a_sentence_and_an_exit_code(home: object) -> None:
    result = CliRunner().invoke(cli, ["explain", "placement"])
    assert result.exit_code == 1 and "nothing runs here" in result.stderr
