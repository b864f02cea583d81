"""The name of a source's credentials reaches the worker, and nothing but the name."""

from __future__ import annotations

from fake_worker import FakeWorker

from naru_operator.adapters.worker_client import WorkerClient
from naru_operator.core.desired import EngineLimits
from naru_operator.core.model_plan import LoadModel


async def test_a_load_names_its_credentials(redis_server_url: str) -> None:
    worker = FakeWorker("p-0", redis_server_url)
    await worker.start()
    client = WorkerClient(worker.address)
    try:
        for credentials in ("", "hub-token"):
            command = LoadModel("p-0", "m@a", "hf://o/m", "", 1, EngineLimits(), credentials=credentials)
            assert [report.state async for report in client.load(command)][-1] == "ready"
    finally:
        await client.close()
        await worker.stop()
    assert [load.credentials for load in worker.loads] == ["", "hub-token"]
