"""Tenants of a story: their keys, their file, and what they ask of a running instance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import yaml
from running_naru import RunningNaru, chat_body

from naru_proto.tenants import key_digest
from naru_proto.v1 import worker_pb2, worker_pb2_grpc

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Tenant:
    """One, with a key that says its name."""

    name: str

    @property
    def key(self) -> str:
        """Its API key."""
        return f"key-of-{self.name}"

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Its key as gRPC metadata."""
        return (("authorization", f"Bearer {self.key}"),)

    def post(self, url: str, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        """Asks a router; a header's name has '_' in place of '-'."""
        return httpx.post(
            f"{url}{path}", json=body, headers=self.headers(**headers), timeout=TIMEOUT_S, trust_env=False, verify=False
        )

    def get(self, url: str, path: str) -> httpx.Response:
        """Reads a page of a router."""
        return httpx.get(f"{url}{path}", headers=self.headers(), timeout=TIMEOUT_S, trust_env=False, verify=False)

    def chat(self, url: str, text: str, *, headers: dict[str, str] | None = None, **options: Any) -> httpx.Response:
        """A chat of one message to the model smollm2, or to another."""
        return self.post(url, "/v1/chat/completions", chat_body(text, **options), **(headers or {}))

    def headers(self, **more: str) -> dict[str, str]:
        """Its key and others; a name has '_' in place of '-'."""
        return {"authorization": f"Bearer {self.key}", **{name.replace("_", "-"): it for name, it in more.items()}}


def write_tenants(path: Path, fields: Mapping[str, dict[str, Any]]) -> dict[str, Tenant]:
    """Writes a file with a tenant for each name, whose other fields are as given."""
    tenants = {name: Tenant(name) for name in fields}
    items = [
        {"name": name, "keys": [{"sha256": key_digest(tenants[name].key)}], **more} for name, more in fields.items()
    ]
    path.write_text(yaml.safe_dump({"tenants": items}))
    return tenants


def router_urls(naru: RunningNaru) -> tuple[str, ...]:
    """Of all routers of an instance."""
    more = [line.split()[2:] for line in naru.output if line.startswith("more routers: ")]
    return (naru.url, *(more[0] if more else ()))


def model_stats(naru: RunningNaru, model: str) -> list[worker_pb2.ModelStats]:
    """What the workers that hold a model count of it; `model` is the name of its ModelDeployment."""
    found = []
    for lease in naru.leases().values():
        with grpc.insecure_channel(lease["address"]) as channel:
            reply = worker_pb2_grpc.WorkerStub(channel).Stats(worker_pb2.StatsRequest(), timeout=10)
        found += [stats for stats in reply.models if stats.model.partition("@")[0] == model]
    return found


def num_alive(naru: RunningNaru, model: str) -> int:
    """Requests for a model that run or wait on any worker."""
    return sum(stats.num_running + stats.num_waiting for stats in model_stats(naru, model))
