"""Workers without engines: the real gRPC service and real leases, loads that end at once. One process is a whole fleet.

    python fake_fleet.py REDIS_URL ID…                        workers of these names
    python fake_fleet.py REDIS_URL --kubeconfig F --namespace N   one for each ready worker pod, as they come and go

A model whose URI says `missing` fails to load, as one that is not there does. A worker whose pod is told to end leaves
as a real one does: it says so in its lease, and goes once its models are ready elsewhere. Prints ``fleet ready`` when
it has begun.
"""

from __future__ import annotations

import argparse
import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import redis.asyncio
import yaml

from naru_proto import names
from naru_proto.registry import ResidentRecord, WorkerRecord
from naru_proto.v1 import worker_pb2, worker_pb2_grpc

WEIGHT_BYTES = 100 * 2**20
BUDGET_BYTES = 2**42
_LEAST_S = 0.05
"""Between two writes of a lease that changes often, as in a real worker."""
_FOLLOW_S = 0.2
_MOVE_TIMEOUT_S = 5.0


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """Holds whatever it is told to."""

    def __init__(self, worker_id: str, pool: str, client: redis.asyncio.Redis) -> None:
        self.worker_id, self.pool = worker_id, pool
        self.is_leaving = False
        self.left_s = 0.0
        """When it was told to leave."""
        self.models: dict[str, ResidentRecord] = {}
        self._redis = client
        self._epoch = str(time.monotonic_ns())
        self._changed = asyncio.Event()
        self._address = ""
        self._server = grpc.aio.server()
        self._keeper: asyncio.Task[None] | None = None

    async def Load(self, request: worker_pb2.LoadRequest, context: Any) -> AsyncIterator[worker_pb2.LoadProgress]:
        """Ready at once, or failed at once."""
        if request.tier == worker_pb2.TIER_COLD:
            yield worker_pb2.LoadProgress(state=worker_pb2.MODEL_STATE_COLD)
            return
        if "missing" in request.uri:
            message = f"{request.uri} does not exist; correct model.uri"
            self._put(request.model, ResidentRecord("failed", request.generation, error=message))
            error = worker_pb2.Error(code="model_load_failed", message=message)
            yield worker_pb2.LoadProgress(state=worker_pb2.MODEL_STATE_FAILED, error=error)
            return
        held = ResidentRecord("ready", request.generation, num_bytes=WEIGHT_BYTES, weight_bytes=WEIGHT_BYTES, epoch=1)
        self._put(request.model, held)
        yield worker_pb2.LoadProgress(state=worker_pb2.MODEL_STATE_READY)

    async def Unload(self, request: worker_pb2.UnloadRequest, context: Any) -> worker_pb2.UnloadReply:
        """Gone at once."""
        self.models.pop(request.model, None)
        self._changed.set()
        return worker_pb2.UnloadReply()

    def leave(self) -> None:
        """Its pod was told to end."""
        if not self.is_leaving:
            self.is_leaving, self.left_s = True, time.monotonic()
            self._changed.set()

    async def start(self) -> None:
        """Serves and takes a lease."""
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        self._address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        await self._renew(is_news=True)
        self._keeper = asyncio.create_task(self._keep(), name=f"lease of {self.worker_id}")

    async def stop(self) -> None:
        """Gone for good."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        await self._redis.delete(names.key_worker(self.worker_id))
        await self._redis.publish(names.CHANNEL_CHANGES, f"worker:{self.worker_id}")
        await self._server.stop(None)

    def _put(self, model: str, held: ResidentRecord) -> None:
        self.models[model] = held
        self._changed.set()

    async def _keep(self) -> None:
        while True:
            is_news = False
            try:
                async with asyncio.timeout(names.WORKER_LEASE_TTL_S / 3):
                    await self._changed.wait()
                    is_news = True
            except TimeoutError:
                pass
            self._changed.clear()
            try:
                await self._renew(is_news=is_news)
            except redis.RedisError:
                self._changed.set()  # Redis is away: the next turn tries again
            await asyncio.sleep(_LEAST_S)

    async def _renew(self, *, is_news: bool) -> None:
        record = WorkerRecord(
            self.worker_id,
            self._address,
            self._epoch,
            dict(self.models),
            pool=self.pool,
            budget_bytes=BUDGET_BYTES,
            used_bytes=WEIGHT_BYTES * len(self.models),
            leaving=self.is_leaving,
        )
        ttl_ms = int(names.WORKER_LEASE_TTL_S * 1000)
        await self._redis.set(names.key_worker(self.worker_id), record.to_json(), px=ttl_ms)
        await self._redis.sadd(names.KEY_WORKERS, self.worker_id)
        if is_news:
            await self._redis.publish(names.CHANNEL_CHANGES, f"worker:{self.worker_id}")


class Follower:
    """Keeps one fake worker for each worker pod that runs."""

    def __init__(self, client: redis.asyncio.Redis, api: httpx.AsyncClient, namespace: str) -> None:
        self._redis, self._api = client, api
        self._path = f"/api/v1/namespaces/{namespace}/pods"
        self._query = {"labelSelector": f"{names.LABEL_MANAGED_BY}={names.MANAGED_BY},{names.LABEL_POOL}"}
        self._workers: dict[str, FakeWorker] = {}
        """By the pod's uid."""

    async def run(self) -> None:
        """Follows for ever."""
        while True:
            try:
                listed = (await self._api.get(self._path, params=self._query)).json()
                await self._follow(listed["items"])
            except (httpx.HTTPError, KeyError, ValueError, redis.RedisError):
                pass  # the API server or Redis is away: what runs goes on
            await asyncio.sleep(_FOLLOW_S)

    async def _follow(self, pods: Iterable[dict[str, Any]]) -> None:
        seen = {pod["metadata"]["uid"]: pod for pod in pods}
        for uid, pod in seen.items():
            is_ready = any(
                it["type"] == "Ready" and it["status"] == "True" for it in pod["status"].get("conditions") or ()
            )
            if "deletionTimestamp" in pod["metadata"]:
                if uid in self._workers:
                    self._workers[uid].leave()
            elif is_ready and uid not in self._workers:
                pool = pod["metadata"]["annotations"][names.ANNOTATION_POOL_NAME]
                worker = FakeWorker(pod["metadata"]["name"], pool, self._redis)
                self._workers[uid] = worker
                await worker.start()
        for uid, worker in list(self._workers.items()):
            if uid not in seen and self._may_go(worker):
                del self._workers[uid]
                await worker.stop()

    def _may_go(self, worker: FakeWorker) -> bool:
        worker.leave()
        ready = {
            name
            for other in self._workers.values()
            if not other.is_leaving
            for name, held in other.models.items()
            if held.state == "ready"
        }
        mine = {name for name, held in worker.models.items() if held.state == "ready"}
        return mine <= ready or time.monotonic() - worker.left_s > _MOVE_TIMEOUT_S


def open_api(kubeconfig: Path) -> httpx.AsyncClient:
    """The API server, from a kubeconfig with embedded or linked certificates."""
    import base64
    import tempfile

    config = yaml.safe_load(kubeconfig.read_text())
    cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]

    def file(source: dict[str, str], name: str) -> str:
        if name in source:
            return source[name]
        with tempfile.NamedTemporaryFile(delete=False) as stream:
            stream.write(base64.b64decode(source[f"{name}-data"]))
        return stream.name

    context = ssl.create_default_context(cafile=file(cluster, "certificate-authority"))
    context.load_cert_chain(file(user, "client-certificate"), file(user, "client-key"))
    return httpx.AsyncClient(base_url=cluster["server"], verify=context, trust_env=False)


async def run(redis_url: str, worker_ids: list[str], kubeconfig: Path | None, namespace: str) -> None:
    """The fleet, until the process ends."""
    client = redis.asyncio.Redis.from_url(redis_url)
    workers = [FakeWorker(worker_id, "default", client) for worker_id in worker_ids]
    for worker in workers:
        await worker.start()
    print("fleet ready", flush=True)
    if kubeconfig is not None:
        await Follower(client, open_api(kubeconfig), namespace).run()
    await asyncio.Event().wait()


def main() -> None:
    """Reads the arguments and runs."""
    parser = argparse.ArgumentParser("fake_fleet")
    parser.add_argument("redis_url")
    parser.add_argument("worker_ids", nargs="*")
    parser.add_argument("--kubeconfig", type=Path)
    parser.add_argument("--namespace", default="default")
    options = parser.parse_args()
    asyncio.run(run(options.redis_url, options.worker_ids, options.kubeconfig, options.namespace))


if __name__ == "__main__":
    main()
