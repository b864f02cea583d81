"""The first minutes of a newcomer: `naru up examples/`, an answer, Ctrl-C, nothing left behind."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest
from running_naru import RunningNaru, chat_body, eventually, is_listening

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.smollm2


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def test_the_examples_serve_and_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    with RunningNaru([str(EXAMPLES)], tmp_path) as naru:
        ready = [line for line in naru.output if line.startswith("ready in ")]
        assert len(ready) == 1
        assert sum(line.startswith("curl ") for line in naru.output) <= 1
        naru.wait_for_line(f"curl {naru.url}/v1/chat/completions", 5)
        body = {**chat_body("Name the capital of France.", max_tokens=24), "model": naru.models[0]}
        assert "Paris" in naru.http.post("/v1/chat/completions", json=body).text
        children = naru.children()
        # What packed the model waits a while for another one.
        assert sum("naru_worker.adapters.images.pack" not in child.cmdline() for child in children) == 3
        assert files(tmp_path) != []

        assert naru.stop(signal.SIGINT) == 0
        assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
        assert not is_listening(naru.url)
        assert not is_listening(naru.grpc_address)
        # Packed images and what kernels passed their test are a cache, and stay for the next start.
        assert [file for file in files(tmp_path) if not file.startswith(("images/", "cache/"))] == []


def test_children_of_a_killed_instance_die_and_the_next_command_clears_what_it_left(tmp_path: Path) -> None:
    with RunningNaru([str(EXAMPLES)], tmp_path, must_be_ready=False) as naru:
        eventually(lambda: len(naru.children()) == 3, 60, "redis, router and worker run")
        children = naru.children()
        naru.process.kill()
        naru.process.wait(10)
        eventually(lambda: not any(child.is_running() for child in children), 10, "the children die")
        assert files(tmp_path) != []
        done = naru.naru("status")
        assert done.returncode == 1
        assert "nothing runs here" in done.stderr
        assert files(tmp_path) == []
