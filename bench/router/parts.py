"""Builds and finds what the router's benchmark runs: the fake backend (Go), the load generator (C++), Rust routers.

Outputs go to `bench/.cache/router`; a build whose sources have not changed is quick. Called by `bench.router`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.peers import PeerError, peers_folder, routers_python

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CACHE = ROOT / "bench" / ".cache" / "router"

_WIRE = "naru.dev/bench-router/wire"
_PROTOS = ("naru_proto/v1/worker.proto", "naru_proto/v1/inference.proto")


class PartError(Exception):
    """A program that the benchmark needs is missing or does not build."""


@dataclass(frozen=True, slots=True)
class Programs:
    """Paths of what is run."""

    backend: Path
    load: Path


def build() -> Programs:
    """Builds both programs.

    Raises:
        PartError: a compiler is missing, or refuses.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    return Programs(_build_backend(), _build_load())


def rust_router(name: str) -> Path:
    """The command of one of the Rust routers.

    Raises:
        PartError: not installed.
    """
    try:
        return routers_python(peers_folder()).parent / name
    except PeerError as exc:
        raise PartError(str(exc)) from exc


def _build_load() -> Path:
    source, program = HERE / "native" / "load.cpp", CACHE / "load"
    if not program.exists() or program.stat().st_mtime < source.stat().st_mtime:
        _run([_tool("g++"), "-O3", "-std=c++17", "-Wall", "-Wextra", "-o", str(program), str(source)], CACHE)
    return program


def _build_backend() -> Path:
    go = _tool("go", "/usr/local/go/bin/go")
    module = CACHE / "go"
    shutil.copytree(HERE / "go", module, dirs_exist_ok=True)
    environment = {"GOBIN": str(module / "bin"), "GOFLAGS": "-buildvcs=false"}
    _run([go, "install", "tool"], module, environment)
    options = []
    for kind in ("go", "go-grpc"):
        options += [f"--plugin=protoc-gen-{kind}={module}/bin/protoc-gen-{kind}", f"--{kind}_out={module}/wire"]
        options += [f"--{kind}_opt=module={_WIRE}", *(f"--{kind}_opt=M{proto}={_WIRE}" for proto in _PROTOS)]
    _run([sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto' / 'src'}", *options, *_PROTOS], module)
    program = module / "bin" / "backend"
    _run([go, "build", "-o", str(program), "./backend"], module, environment)
    return program


def _tool(*names: str) -> str:
    for name in names:
        path = shutil.which(name)
        if path:
            return path
    raise PartError(f"{names[0]} is not installed; it builds a part of the benchmark")


def _run(argv: Sequence[str], folder: Path, environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        argv, cwd=folder, env={**os.environ, **(environment or {})}, check=False, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise PartError(f"{' '.join(argv[:3])} … ended with code {done.returncode}: {done.stderr[-2000:]}")
