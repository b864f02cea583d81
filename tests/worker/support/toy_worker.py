"""A whole worker in this process over toy models: real loop thread, real gRPC on loopback, no files."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from toy_model import EOS, HIDDEN_SIZE, NUM_TOKENS, VOCAB_SIZE, ToyRunner, ToyTokenizer, toy_engine

from naru_proto.registry import ModelInfoRecord
from naru_proto.v1 import inference_pb2, worker_pb2, worker_pb2_grpc
from naru_worker.adapters.engine.engine import ModelEngine
from naru_worker.adapters.engine.grammar_compiler import GrammarCompiler, GrammarRoom
from naru_worker.adapters.engine.loaded import LoadedModel, ModelFacts, PoolingFacts
from naru_worker.adapters.engine.loader import ImageUsage, Interrupted
from naru_worker.adapters.engine.resident import Progress
from naru_worker.adapters.engine.token_table import TokenTable
from naru_worker.adapters.ops.protocol import BatchInputs
from naru_worker.adapters.weights.watched_checkpoint import OnShare, unheard
from naru_worker.app import WorkerApp, build
from naru_worker.core.hub.model import Footprint
from naru_worker.core.memory_plan import MemoryNeed, MemoryWish, plan_memory
from naru_worker.core.request_limits import RequestLimits
from naru_worker.core.residency import ModelSpec, ModelState
from naru_worker.settings import (
    EngineSettings,
    MemorySettings,
    RegistrySettings,
    ResidencySettings,
    ServerSettings,
    WorkerSettings,
)

DEADLINE_S = 20.0
_END: Any = getattr(grpc.aio, "EOF")  # noqa: B009  # the types do not know it
BLOCK_SIZE = 4
BLOCK_BYTES = 100
WEIGHT_BYTES = 1000


@dataclass
class ToyLoader:
    """Loads toy models; tests hold loads at a gate, or let them fail."""

    num_blocks: int = 257
    max_num_seqs: int = 64
    max_model_len: int = 256
    budget_bytes: int = 10**6
    grammars: GrammarRoom = field(default_factory=GrammarRoom)
    opening: dict[str, threading.Event] = field(default_factory=dict)
    """By URI: `prepare` waits for it, reporting progress meanwhile."""
    building: dict[str, threading.Event] = field(default_factory=dict)
    """By URI: `load` waits for it."""
    errors: dict[str, Exception] = field(default_factory=dict)
    """By URI: what `prepare` raises."""
    load_errors: dict[str, Exception] = field(default_factory=dict)
    """By URI: what `load` raises."""
    late_errors: dict[str, Exception] = field(default_factory=dict)
    """By URI: what `load` raises after its engine has begun."""
    before_step: dict[str, Callable[[BatchInputs], object]] = field(default_factory=dict)
    """By URI: what its runners do before each step."""
    weight_bytes: dict[str, int] = field(default_factory=dict)
    stubborn: set[str] = field(default_factory=set)
    """URIs whose `load` does not listen when it is told to stop."""
    not_kept: dict[str, str] = field(default_factory=dict)
    """By URI: why its weights cannot wait in host memory."""
    unreturned: dict[str, int] = field(default_factory=dict)
    """By URI: bytes that the kernel still shows after an unload."""
    on_disk: dict[str, int] = field(default_factory=dict)
    """By URI: bytes that `find` finds."""
    prepared: list[str] = field(default_factory=list)
    built: list[str] = field(default_factory=list)
    begun: threading.Event = field(default_factory=threading.Event)
    """What a load that fails late waits for."""
    is_closed: bool = False
    released: list[str] = field(default_factory=list)
    hosted: list[str] = field(default_factory=list)
    """URIs raised to host memory by an operation of their own."""
    closed: list[str] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    """Releases and closes, as they came."""
    runners: dict[str, ToyRunner] = field(default_factory=dict)
    """By model name: the newest."""

    def image_usage(self) -> ImageUsage:
        return ImageUsage(1000, 10)

    def find(self, spec: ModelSpec) -> int | None:
        return self.on_disk.get(spec.uri)

    def close(self) -> None:
        self.is_closed = True

    def prepare(
        self, name: str, spec: ModelSpec, on_progress: Callable[[Progress], None], should_stop: threading.Event
    ) -> ToyPrepared:
        self.prepared.append(spec.uri)
        gate = self.opening.get(spec.uri)
        deadline = time.monotonic() + DEADLINE_S
        done = 0
        while gate is not None and not gate.wait(0.01):
            assert time.monotonic() < deadline, "nobody opened the gate"
            done += 1
            on_progress(Progress(ModelState.FETCHING, done, 1000))
        if spec.uri in self.errors:
            raise self.errors[spec.uri]
        return ToyPrepared(self, name, spec)


class ToyPrepared:
    """A toy model on disk."""

    def __init__(self, loader: ToyLoader, name: str, spec: ModelSpec) -> None:
        self._loader = loader
        self._name = name
        self._spec = spec
        self.detail = ""
        weight_bytes = loader.weight_bytes.get(spec.uri, WEIGHT_BYTES)
        need = MemoryNeed(weight_bytes, BLOCK_BYTES, BLOCK_SIZE, loader.max_model_len)
        wish = MemoryWish(
            spec.options.max_num_seqs or loader.max_num_seqs,
            spec.options.max_model_len,
            spec.options.kv_cache_bytes,
            loader.num_blocks * BLOCK_BYTES,
        )
        self.plan = plan_memory(name, need, wish, loader.budget_bytes)
        self.max_num_seqs = wish.max_num_seqs
        self.footprint = Footprint(spec.uri, weight_bytes, self.plan.kv_bytes, 0)

    def is_current(self) -> bool:
        return self._spec.uri not in self._loader.errors

    def open(self) -> ToyHosted:
        return ToyHosted(self._loader, self._name, self._spec.uri, self)


class ToyHosted:
    """A toy model in host memory."""

    def __init__(self, loader: ToyLoader, name: str, uri: str, prepared: ToyPrepared) -> None:
        self._loader = loader
        self._name = name
        self._uri = uri
        self._prepared = prepared

    def make_present(self, should_stop: threading.Event) -> None:
        self._loader.hosted.append(self._uri)

    def keep(self) -> str:
        return self._loader.not_kept.get(self._uri, "")

    def load(
        self, on_started: Callable[[LoadedModel], None], should_stop: threading.Event, on_share: OnShare = unheard
    ) -> LoadedModel:
        loader, uri, plan = self._loader, self._uri, self._prepared.plan
        gate = loader.building.get(uri)
        deadline = time.monotonic() + DEADLINE_S
        while gate is not None and not gate.wait(0.01):
            assert time.monotonic() < deadline, "nobody opened the gate"
            if should_stop.is_set() and uri not in loader.stubborn:
                raise Interrupted
        if uri in loader.load_errors:
            raise loader.load_errors[uri]
        loader.built.append(uri)
        engine, runner, _ = toy_engine(
            plan.num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=self._prepared.max_num_seqs,
            max_model_len=plan.max_model_len,
            clock=time.monotonic,
            revision=uri,
        )
        loader.runners[self._name] = runner
        if uri in loader.before_step:
            runner.before_step = loader.before_step[uri]
        tokenizer = ToyTokenizer()

        def release() -> None:
            runner.close()
            loader.released.append(uri)
            loader.order.append(f"release {uri}")

        model = LoadedModel(
            self._name,
            engine,
            tokenizer,
            TokenTable(tokenizer),
            RequestLimits(plan.max_model_len, 258, 4),
            ModelFacts(
                ModelInfoRecord(
                    "toy",
                    plan.max_model_len,
                    VOCAB_SIZE,
                    "{{ messages }}",
                    "",
                    "<eos>",
                    tasks=("generate", "embed"),
                    embedding_dim=HIDDEN_SIZE,
                ),
                f"digest of {uri}",
                self._prepared.footprint.weight_bytes,
                plan.kv_bytes,
                BLOCK_BYTES // BLOCK_SIZE,
                BLOCK_SIZE,
                plan.num_blocks,
            ),
            release,
            grammars=GrammarCompiler(loader.grammars, tokenizer, NUM_TOKENS, (EOS,)),
            pooling=PoolingFacts("embed", plan.max_model_len, True, HIDDEN_SIZE),
        )
        if uri in loader.late_errors:
            on_started(model)
            assert loader.begun.wait(DEADLINE_S), "its engine never ran"
            raise loader.late_errors[uri]
        return model

    def close(self) -> int:
        self._loader.closed.append(self._uri)
        self._loader.order.append(f"close {self._uri}")
        return self._loader.unreturned.get(self._uri, 0)


def toy_settings(**server: Any) -> WorkerSettings:
    """Free ports, no Redis, no metrics, each token in a delta of its own."""
    return WorkerSettings(
        server=ServerSettings(
            **{"worker_id": "w", "listen": "127.0.0.1:0", "metrics_listen": "off", "drain_timeout_s": 5.0, **server}
        ),
        engine=EngineSettings(backend="ref", step_timeout_s=30.0, stream_interval_s=0.0),
        memory=MemorySettings(memory_budget_bytes=10**6, host_budget_bytes=0, high_watermark=1.0, low_watermark=1.0),
        residency=ResidencySettings(load_guard=0.0),
        registry=RegistrySettings(),
    )


@dataclass
class RunningWorker:
    """A worker and a client."""

    app: WorkerApp
    loader: ToyLoader
    channel: grpc.aio.Channel
    stub: Any

    async def load(self, name: str = "toy", uri: str = "toy://a", **request: Any) -> list[worker_pb2.LoadProgress]:
        """All progress of a load."""
        call = self.stub.Load(worker_pb2.LoadRequest(model=name, uri=uri, **request))
        return [progress async for progress in call]

    async def generate(self, request: worker_pb2.GenerateRequest) -> list[worker_pb2.Delta]:
        """All deltas of a request on its own stream."""
        return [delta async for delta in self.stub.Generate(request)]

    def engine(self, name: str = "toy") -> ModelEngine:
        """The engine of a loaded model."""
        engine = self.app.hub.models_by_name()[name].engine
        assert isinstance(engine, ModelEngine)
        return engine


@contextlib.asynccontextmanager
async def running_worker(
    loader: ToyLoader | None = None, settings: WorkerSettings | None = None, *models: str
) -> AsyncIterator[RunningWorker]:
    """A started worker with a connected client, and `models` loaded; ended afterwards."""
    toys = loader or ToyLoader()
    app = build(settings or toy_settings(), lambda _settings, _ledger, _is_busy: toys)
    await app.start()
    try:
        async with grpc.aio.insecure_channel(app.address) as channel:
            worker = RunningWorker(app, toys, channel, worker_pb2_grpc.WorkerStub(channel))
            for name in models:
                progress = await worker.load(name)
                assert progress[-1].state == worker_pb2.MODEL_STATE_READY, progress[-1]
            yield worker
    finally:
        async with asyncio.timeout(DEADLINE_S):
            await app.shut_down()


def ask(
    request_id: str, prompt: str = "once upon", *, model: str = "toy", **sampling: Any
) -> worker_pb2.GenerateRequest:
    """A greedy request of 12 tokens, unless told otherwise."""
    given = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **sampling}
    bias = given.pop("logit_bias", {})
    params = inference_pb2.SamplingParams(**given)
    for token_id, value in bias.items():
        params.logit_bias[token_id] = value
    return worker_pb2.GenerateRequest(
        request_id=request_id, model=model, text=prompt, sampling=params, return_token_ids=True
    )


class Exchange:
    """One router's end of the exchange stream, sorted by request."""

    def __init__(self, stub: Any) -> None:
        self._call = stub.Exchange()
        self.frames: list[worker_pb2.WorkerFrame] = []
        self.deltas: dict[str, list[worker_pb2.Delta]] = {}

    async def send(self, *requests: worker_pb2.GenerateRequest, cancel: tuple[str, ...] = ()) -> None:
        await self._call.write(worker_pb2.RouterFrame(generate=requests, cancel=cancel))

    async def read(self) -> worker_pb2.WorkerFrame:
        """The next frame."""
        async with asyncio.timeout(DEADLINE_S):
            frame: worker_pb2.WorkerFrame = await self._call.read()
        assert frame is not _END, "the stream has ended"
        self.frames.append(frame)
        for delta in frame.deltas:
            self.deltas.setdefault(delta.request_id, []).append(delta)
        return frame

    async def read_until(self, is_enough: Callable[[], bool]) -> None:
        while not is_enough():
            await self.read()

    def is_done(self, request_id: str) -> bool:
        """Whether a request has ended; it must have ended once, and with its last delta."""
        deltas = self.deltas.get(request_id, [])
        dones = [d for d in deltas if d.request_done]
        assert len(dones) <= 1
        assert not dones or deltas[-1].request_done
        return bool(dones)

    async def finish(self, *request_ids: str) -> None:
        """Reads until all these have ended."""
        await self.read_until(lambda: all(self.is_done(r) for r in request_ids))

    async def close(self) -> None:
        """Closes our side and reads to the end."""
        await self._call.done_writing()
        async with asyncio.timeout(DEADLINE_S):
            while await self._call.read() is not _END:
                pass

    def break_off(self) -> None:
        """Goes away without a word."""
        self._call.cancel()

    async def code(self) -> grpc.StatusCode:
        """Reads what is left, and tells how the stream ended."""
        async with asyncio.timeout(DEADLINE_S):
            with contextlib.suppress(grpc.aio.AioRpcError):
                while await self._call.read() is not _END:
                    pass
            code: grpc.StatusCode = await self._call.code()
        return code


async def eventually(is_true: Callable[[], bool] | Callable[[], Awaitable[bool]], what: str) -> None:
    """Polls a state that no event tells of."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            result = is_true()
            if result if isinstance(result, bool) else await result:
                return
            await asyncio.sleep(0.01)
    raise AssertionError(what)


def text(deltas: list[worker_pb2.Delta], index: int = 0) -> str:
    """The joined text of one choice."""
    return "".join(d.text for d in deltas if d.index == index)


def ids(deltas: list[worker_pb2.Delta], index: int = 0) -> list[int]:
    """The joined token ids of one choice."""
    return [i for d in deltas if d.index == index for i in d.token_ids]
