"""A real worker that loads from a private hub with the credentials that its load names."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from file_server import Asked, FileServer, Served
from tiny_models import TinySpec
from toy_worker import ask, ids
from worker_process import WorkerProcess, worker_process

from naru_proto.v1 import worker_pb2

COMMIT = "d" * 40
TOKEN = "hf_token_of_the_test"


def offer(server: FileServer, folder: Path) -> None:
    """Serves a model's files as a repository that asks for the token."""
    tree: list[dict[str, Any]] = []
    for path in sorted(folder.iterdir()):
        body = path.read_bytes()
        blob = hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()
        tree.append({"type": "file", "path": path.name, "oid": blob, "size": len(body)})
        server.put(f"/org/tiny/resolve/{COMMIT}/{path.name}", body)
    server.put("/api/models/org/tiny/revision/main", json.dumps({"sha": COMMIT}).encode())
    server.put(f"/api/models/org/tiny/tree/{COMMIT}?recursive=true", json.dumps(tree).encode())

    def gate(asked: Asked) -> Served | None:
        return None if asked.headers.get("authorization") == f"Bearer {TOKEN}" else Served(status=401)

    server.gate = gate


async def load(worker: WorkerProcess, name: str, uri: str, **fields: Any) -> list[worker_pb2.LoadProgress]:
    options = worker_pb2.EngineOptions(max_model_len=128, kv_cache_bytes=2**20)
    request = worker_pb2.LoadRequest(model=name, uri=uri, generation=1, options=options, **fields)
    return [progress async for progress in worker.stub.Load(request)]


async def test_a_load_uses_the_credentials_it_names_and_no_other(
    tiny_model: Callable[[TinySpec], Path],
    server: FileServer,
    tmp_path: Path,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tiny_model(TinySpec())
    offer(server, folder)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    (tmp_path / "credentials" / "hub").mkdir(parents=True)
    (tmp_path / "credentials" / "hub" / "HF_TOKEN").write_text(TOKEN)
    flags = ("--home", str(home), "--credentials-dir", str(tmp_path / "credentials"))
    async with worker_process(*flags) as worker:
        refused = (await load(worker, "closed", "hf://org/tiny"))[-1]
        assert refused.state == worker_pb2.MODEL_STATE_FAILED
        assert "refuses access (HTTP 401); no credentials were named" in refused.error.message
        absent = (await load(worker, "absent", "hf://org/tiny", credentials="other"))[-1]
        assert "list it in WorkerPool.spec.credentialSecrets" in absent.error.message
        progress = await load(worker, "tiny", "hf://org/tiny", credentials="hub")
        assert progress[-1].state == worker_pb2.MODEL_STATE_READY, progress[-1]
        total = sum(path.stat().st_size for path in folder.iterdir())
        assert any(p.detail == "downloading org/tiny" and p.bytes_total == total for p in progress)
        # The files of one model's credentials are not there for another one without them.
        again = (await load(worker, "closed-2", "hf://org/tiny"))[-1]
        assert again.state == worker_pb2.MODEL_STATE_FAILED
        assert (await load(worker, "local", f"file://{folder}"))[-1].state == worker_pb2.MODEL_STATE_READY
        runs = [
            [d async for d in worker.stub.Generate(ask(name, "some text", model=name, max_tokens=8))]
            for name in ("tiny", "local")
        ]
        assert ids(runs[0]) == ids(runs[1])
        assert len(ids(runs[0])) == 8
