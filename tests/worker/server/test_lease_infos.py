"""A lease names no model info that is not in the route map, whatever comes up while it is written."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from redis_server import RedisServer
from toy_worker import eventually

from naru_proto import names
from naru_proto.registry import ModelInfoRecord, ResidentRecord, WorkerRecord
from naru_worker.adapters.engine.changes import ChangeLog
from naru_worker.adapters.registry import LeaseKeeper
from naru_worker.settings import RegistrySettings

INFO = ModelInfoRecord(
    architecture="llama", max_model_len=64, vocab_size=128, chat_template="", bos_token="", eos_token=""
)


class Near:
    """What else is written before a lease; a model is ready when that is done."""

    has_news = True

    def __init__(self, models: dict[str, ResidentRecord]) -> None:
        self._models = models

    async def write(self, client: Any) -> None:
        self._models["m"] = ResidentRecord("ready", info_digest=INFO.digest())

    def renew(self, pipe: Any) -> int:
        return 0

    def forget(self) -> None:
        pass

    def erase(self, pipe: Any) -> None:
        pass


async def test_a_model_that_comes_up_while_a_lease_is_written_is_told_with_its_info(redis_server: RedisServer) -> None:
    models: dict[str, ResidentRecord] = {}
    keeper = LeaseKeeper(
        RegistrySettings(redis_url=redis_server.url),
        lambda: WorkerRecord("w", "127.0.0.1:1", "e", dict(models)),
        lambda: {INFO.digest(): INFO} if models else {},
        ChangeLog(),
        near=Near(models),  # type: ignore[arg-type]  # no files here that could be near
    )
    task = asyncio.create_task(keeper.run())
    try:
        await eventually(lambda: redis_server.client.exists(names.key_worker("w")) == 1, "there is no lease")
        lease = WorkerRecord.from_json(str(redis_server.client.get(names.key_worker("w"))))
        digest = lease.models["m"].info_digest
        assert ModelInfoRecord.from_json(str(redis_server.client.get(names.key_model_info(digest)))) == INFO
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
