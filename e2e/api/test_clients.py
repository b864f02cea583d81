"""Clients that applications use, as they come from their package registries, against real models."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from running_naru import RunningNaru

ROOT = Path(__file__).parents[2]
CLIENTS = Path(__file__).parent / "clients"
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
NODE = shutil.which("node")


def run(*command: str) -> str:
    done = subprocess.run(command, cwd=CLIENTS, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.parametrize(
    "script", ["openai_client.py", "anthropic_client.py", "langchain_client.py", "litellm_client.py"]
)
def test_a_python_client_works_unchanged(api: RunningNaru, script: str) -> None:
    assert "ok: " in run(str(PYTHON), script, api.url)


def test_tritonclient_works_unchanged(api: RunningNaru) -> None:
    assert "ok: " in run(str(PYTHON), "triton_client.py", api.url, api.grpc_address)


@pytest.mark.skipif(NODE is None, reason="Node is not installed")
def test_openai_for_node_works_unchanged(api: RunningNaru) -> None:
    assert "ok: " in run(str(NODE), "openai_client.mjs", api.url)
