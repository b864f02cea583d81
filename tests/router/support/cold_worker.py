"""A worker that holds requests for models it knows, loads each once, and says where they are in its lease."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from router_rig import MODEL, Rig
from stub_worker import StubWorker, fail, say

from naru_proto.errors import ModelNotFound
from naru_proto.v1 import worker_pb2 as wire


class ColdWorker:
    """Its stub's script. Loads end when `may_load` is set, with `refusal` if there is one."""

    def __init__(self, rig: Rig, *, knows: bool = True) -> None:
        self._rig = rig
        self.knows = knows
        self.num_loads = 0
        self.num_knocks = 0
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.refusal = ""
        """Code of the error that ends the requests it holds."""
        self.eta_s = 0.0
        """What it says that a load takes."""
        self.stub: StubWorker
        self._load: asyncio.Task[None] | None = None

    async def start(self, worker_id: str) -> None:
        """Serves, with a lease that shows no model."""
        self.stub = await self._rig.start_worker(worker_id, self._answer, models=())
        self.stub.on_move = self._move

    async def show(self, state: str = "", **fields: Any) -> None:
        """Renews the lease: the model in a state, or not there."""
        models = (MODEL,) if state else ()
        await self._rig.publish_worker(self.stub.worker_id, models=models, state=state, **fields)

    async def _answer(self, request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
        self.num_knocks += request.sampling.HasField("max_tokens") and request.sampling.max_tokens == 0
        if not self.knows:
            script = fail("model_not_found", "not known here")
        else:
            await asyncio.shield(self._begin())
            script = fail(self.refusal, "no room for it", retryable=True) if self.refusal else say("Hel", "lo")
        async for delta in script(request):
            yield delta

    async def _move(self, request: wire.MoveRequest) -> wire.MoveReply:
        if not self.knows:
            raise ModelNotFound("not known here")
        self._begin()
        return wire.MoveReply(state=wire.MODEL_STATE_LOADING, eta_s=self.eta_s)

    def _begin(self) -> asyncio.Task[None]:
        if self._load is None:
            self._load = asyncio.create_task(self._bring_up())
        return self._load

    async def _bring_up(self) -> None:
        self.num_loads += 1
        self.stub.changed.set()
        await self.show("loading", eta_s=self.eta_s)
        await self.may_load.wait()
        if not self.refusal:
            await self.show("ready")
