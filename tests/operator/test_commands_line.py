"""The command line: help, versions, completion, `naru pull`, and starts that cannot be."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from naru_operator.cli import completion
from naru_operator.cli.main import cli
from naru_operator.cli.progress import LineProgress, open_progress

MODEL = """\
apiVersion: serving.naru.dev/v1alpha1
kind: ModelDeployment
metadata: {name: tiny}
spec: {model: {uri: "pypi://x"}}
"""


def run(*arguments: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(cli, list(arguments), env=env)


def test_every_command_explains_itself() -> None:
    assert run("--version").output.startswith("naru, version ")
    listed = run("--help").output
    for name in cli.commands:
        assert name in listed
        assert run(name, "--help").exit_code == 0
    assert "NARU_HTTP_PORT" in run("up", "--help").output


def test_a_command_that_does_little_imports_little() -> None:
    code = "import sys; from naru_operator.cli.main import cli; print([m for m in sys.argv[1:] if m in sys.modules])"
    heavy = ("pydantic", "grpc", "redis", "httpx", "rich", "yaml", "asyncio")
    assert subprocess.check_output([sys.executable, "-c", code, *heavy], text=True) == "[]\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_is_for_naru(shell: str) -> None:
    script = run("completion", shell).output
    assert "_NARU_COMPLETE" in script
    assert "naru" in script


def test_commands_uris_and_models_complete(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "models" / "pypi" / "tiny-model").mkdir(parents=True)
    (home / "models" / "hf" / "org" / "name").mkdir(parents=True)
    assert completion.model_uris("") == ["file://", "hf://", "pypi://"]
    assert completion.model_uris("hf") == ["hf://"]
    assert completion.model_uris("hf://o") == ["hf://org/name"]
    assert completion.model_uris("pypi://") == ["pypi://tiny-model"]
    assert completion.running_model_names() == []


def test_a_real_shells_question_is_answered(home: Path) -> None:
    env = {**os.environ, "_NARU_COMPLETE": "bash_complete", "COMP_WORDS": "naru pu", "COMP_CWORD": "1"}
    code = "from naru_operator.cli.main import cli; cli(prog_name='naru')"
    assert subprocess.check_output([sys.executable, "-c", code], env=env, text=True) == "plain,pull\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind: Pod", "kind: 'Pod' is not one of"),
        ("a: [", "no valid YAML"),
        (MODEL.replace("uri", "url"), "spec.model.u"),
    ],
)
def test_bad_manifests_start_nothing(home: Path, text: str, message: str) -> None:
    (home / "m.yaml").write_text(text)
    result = run("up", str(home))
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output
    assert [p.name for p in home.iterdir()] == ["m.yaml"]


@pytest.mark.parametrize("flag", ["--http-port", "--grpc-port"])
def test_a_port_in_use_starts_nothing_and_names_the_flag(home: Path, flag: str) -> None:
    (home / "m.yaml").write_text(MODEL)
    ports = {"--http-port": "0", "--grpc-port": "0"}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports[flag] = str(taken.getsockname()[1])
        result = run("up", str(home), *(word for pair in ports.items() for word in pair))
    assert result.exit_code == 1
    assert f"port {ports[flag]} on 127.0.0.1 is in use by another program" in result.output
    assert flag in result.output
    assert [p.name for p in home.iterdir()] == ["m.yaml"]


def test_two_equal_ports_are_refused(home: Path) -> None:
    (home / "m.yaml").write_text(MODEL)
    result = run("up", str(home), "--http-port", "1234", "--grpc-port", "1234")
    assert result.exit_code == 2
    assert "choose two" in result.output


def test_a_redis_that_is_away_leaves_nothing(home: Path) -> None:
    (home / "m.yaml").write_text(MODEL)
    env = {"NARU_HTTP_PORT": "0", "NARU_GRPC_PORT": "0"}
    result = run("up", str(home), "--redis-url", "redis://127.0.0.1:1", env=env)
    assert result.exit_code == 1
    assert "Redis does not answer" in result.output
    assert [p.name for p in home.rglob("*") if p.is_file()] == ["m.yaml"]


def test_pull_prints_the_path_alone_on_standard_output(home: Path) -> None:
    (home / "m.gguf").write_bytes(b"GGUF")
    result = run("pull", f"file://{home}/m.gguf")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{home}/m.gguf\n"
    assert result.stderr.startswith("stat:")


def test_pull_tells_the_fetchers_reason(home: Path) -> None:
    result = run("pull", "file:///no/such.gguf")
    assert result.exit_code == 1
    assert "error: '/no/such.gguf' does not exist" in result.stderr


def test_a_fetcher_that_dies_is_a_sentence(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    result = run("pull", "file:///x.gguf")
    assert result.exit_code == 1
    assert "the fetcher ended with exit code 1 and no result" in result.stderr


def test_progress_off_a_terminal_is_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with open_progress() as view:
        assert isinstance(view, LineProgress)
        for done in range(0, 1001):
            view.update("model", "downloading", done * 100_000, 100_000_000)
        view.update("model", "ready", 0, 0)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "model: downloading 0 of 100 MB"
    assert lines[-2:] == ["model: downloading 100 of 100 MB", "model: ready"]
    assert len(lines) == 6


def test_events_of_the_fetcher_may_be_mixed_with_other_lines() -> None:
    from naru_operator.cli.pull import _follow

    lines = ["a warning", json.dumps({"event": "progress"}), json.dumps({"event": "done", "path": "p"})]
    seen: list[object] = []
    assert _follow(lines, seen.append) == {"event": "done", "path": "p"}
    assert len(seen) == 1
