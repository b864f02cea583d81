"""Questions that tests of a running worker ask: health, one model's entry, its metrics, a step held back."""

from __future__ import annotations

import asyncio
import threading
import urllib.request

from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families
from toy_worker import RunningWorker

from naru_proto.v1 import worker_pb2
from naru_worker.adapters.ops.protocol import BatchInputs


async def health(worker: RunningWorker, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(worker.channel)
    reply = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return int(reply.status)


async def described(worker: RunningWorker, name: str = "toy") -> worker_pb2.ModelInfo | None:
    reply = await worker.stub.Describe(worker_pb2.DescribeRequest())
    return next((m for m in reply.models if m.model == name), None)


async def scrape(worker: RunningWorker) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """All metrics, by name and labels."""

    def get() -> str:
        with urllib.request.urlopen(f"http://{worker.app.metrics_address}/metrics", timeout=10) as reply:
            assert reply.headers["Content-Type"].startswith("text/plain")
            return str(reply.read().decode())

    families = list(text_string_to_metric_families(await asyncio.to_thread(get)))
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families for s in f.samples}


def hold(worker: RunningWorker, name: str, step_s: float = 0.005) -> threading.Event:
    """Makes steps of a toy model take time, so that something is under way while a test acts. Setting it lets go."""
    pause = threading.Event()

    def wait(batch: BatchInputs) -> None:
        pause.wait(step_s)

    worker.loader.runners[name].before_step = wait
    return pause
