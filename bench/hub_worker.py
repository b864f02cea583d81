"""One Naru worker that knows many models: started for a measurement, told what to hold, stopped after it.

Called by the hub's measurements. Speaks gRPC to the worker, without router or Redis. Measures nothing but how long a
first token takes to arrive.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import grpc
from bench.hub_models import ModelCopy
from bench.servers import end_tree, exit_words, free_port

from naru_proto.v1 import inference_pb2, worker_pb2, worker_pb2_grpc

START_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 120.0
PROMPT = "The capital of France is"
MAX_MESSAGE_BYTES = 32 * 2**20


class HubWorkerError(Exception):
    """The worker did not start, or refused or failed what it was asked."""


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What the worker may hold. None: its own default."""

    memory_budget_bytes: int
    host_budget_bytes: int = 0
    image_budget_bytes: int | None = None
    high_watermark: float | None = None
    low_watermark: float | None = None
    max_loads: int | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where workers of this run keep things; those that follow one another share their images."""

    folder: Path
    log_folder: Path

    @property
    def images(self) -> Path:
        """Folder of packed images."""
        return self.folder / "images"


def worker_argv(limits: WorkerLimits, place: Place, port: int) -> list[str]:
    """The command line of a worker."""
    given = {
        "--memory-budget-bytes": limits.memory_budget_bytes,
        "--host-budget-bytes": limits.host_budget_bytes,
        "--image-budget-bytes": limits.image_budget_bytes,
        "--high-watermark": limits.high_watermark,
        "--low-watermark": limits.low_watermark,
        "--max-loads": limits.max_loads,
        "--image-dir": place.images,
        "--home": place.folder / "home",
        "--listen": f"127.0.0.1:{port}",
        "--metrics-listen": "off",
        "--exit-with-parent": "true",
    }
    flags = [text for name, value in given.items() if value is not None for text in (name, str(value))]
    return [sys.executable, "-m", "naru_worker", *flags]


class HubWorker:
    """A running worker; leaving the `with` block ends its process tree."""

    def __init__(self, limits: WorkerLimits, place: Place, purpose: str) -> None:
        """`purpose` names its log."""
        self._limits = limits
        self._place = place
        self._log_path = place.log_folder / f"hub-{purpose}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: grpc.Channel | None = None
        self._generations = itertools.count(1)
        self._requests = itertools.count(1)
        self.address = ""

    def __enter__(self) -> HubWorker:
        """Starts it and waits until it answers.

        Raises:
            HubWorkerError: it ended, or did not answer in time; the message holds the end of its log.
        """
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        self._place.images.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                worker_argv(self._limits, self._place, port),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_until_it_answers()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Of the worker's process."""
        assert self._process is not None
        return self._process.pid

    @property
    def stub(self) -> worker_pb2_grpc.WorkerStub:
        """For blocking calls."""
        assert self._channel is not None
        return worker_pb2_grpc.WorkerStub(self._channel)

    def stop(self) -> None:
        """Ends it; as often as one likes."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is not None:
            end_tree(self._process)
            self._process = None

    def check_alive(self) -> None:
        """Raises HubWorkerError when the process has ended."""
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            raise HubWorkerError(f"the worker ended {exit_words(code)}; {self._log_tail()}")

    def bring(self, model: ModelCopy, tier: worker_pb2.Tier, *, pinned: bool = False) -> float:
        """Asks for a model at a tier and waits until it is there; returns the seconds that took.

        Raises:
            HubWorkerError: refused or failed.
        """
        request = worker_pb2.LoadRequest(
            model=model.name,
            uri=model.path.as_uri(),
            generation=next(self._generations),
            tier=tier,
            residency=worker_pb2.Residency(pinned=pinned),
        )
        started_s = time.perf_counter()
        try:
            for progress in self.stub.Load(request, timeout=CALL_TIMEOUT_S):
                if progress.error.code:
                    raise HubWorkerError(f"{model.name} was not loaded: {progress.error.message}")
        except grpc.RpcError as exc:
            raise HubWorkerError(f"{model.name} was not loaded: {rpc_words(exc)}") from exc
        return time.perf_counter() - started_s

    def send_down(self, model: ModelCopy) -> None:
        """Takes a model out of memory; it stays known. Returns when it is out.

        Raises:
            HubWorkerError: refused or failed, or it is still in memory.
        """
        request = worker_pb2.UnloadRequest(
            model=model.name, generation=next(self._generations), tier=worker_pb2.TIER_COLD
        )
        try:
            self.stub.Unload(request, timeout=CALL_TIMEOUT_S)
        except grpc.RpcError as exc:
            raise HubWorkerError(f"{model.name} was not unloaded: {rpc_words(exc)}") from exc
        self.expect(model, worker_pb2.MODEL_STATE_COLD)

    def expect(self, model: ModelCopy, state: worker_pb2.ModelState) -> None:
        """Checks where a model stands; a worker does not list those that are cold.

        Raises:
            HubWorkerError: it is elsewhere, or the worker does not answer.
        """
        try:
            reply = self.stub.Describe(worker_pb2.DescribeRequest(), timeout=CALL_TIMEOUT_S)
        except grpc.RpcError as exc:
            raise HubWorkerError(f"the worker does not describe itself: {rpc_words(exc)}") from exc
        found = next((info.state for info in reply.models if info.model == model.name), worker_pb2.MODEL_STATE_COLD)
        if found != state:
            found_name, wanted_name = worker_pb2.ModelState.Name(found), worker_pb2.ModelState.Name(state)
            raise HubWorkerError(f"{model.name} is in {found_name}; it should be in {wanted_name}")

    def memory(self) -> worker_pb2.MemoryStats:
        """What is booked now.

        Raises:
            HubWorkerError: it does not answer, or knows no budget.
        """
        try:
            reply = self.stub.Stats(worker_pb2.StatsRequest(), timeout=CALL_TIMEOUT_S)
        except grpc.RpcError as exc:
            raise HubWorkerError(f"the worker gives no stats: {rpc_words(exc)}") from exc
        if not reply.memory.budget_bytes:
            raise HubWorkerError("the worker reports no memory budget")
        return reply.memory

    def first_token_s(self, model: ModelCopy, max_tokens: int = 4) -> float:
        """Seconds from sending a request until its first token is here; reads the answer to its end.

        Raises:
            HubWorkerError: the request failed.
        """
        request = generate_request(f"first-{next(self._requests)}", model.name, PROMPT, max_tokens)
        started_s, first_s = time.perf_counter(), None
        try:
            for delta in self.stub.Generate(request, timeout=CALL_TIMEOUT_S):
                if delta.error.code:
                    raise HubWorkerError(f"a request for {model.name} failed: {delta.error.message}")
                if first_s is None and delta.num_tokens:
                    first_s = time.perf_counter() - started_s
        except grpc.RpcError as exc:
            raise HubWorkerError(f"a request for {model.name} failed: {rpc_words(exc)}") from exc
        if first_s is None:
            raise HubWorkerError(f"a request for {model.name} ended without a token")
        return first_s

    def know(self, models: Sequence[ModelCopy]) -> None:
        """Tells the worker of models without loading them."""
        for model in models:
            self.bring(model, worker_pb2.TIER_COLD)

    def _wait_until_it_answers(self) -> None:
        assert self._process is not None
        deadline_s = time.monotonic() + START_TIMEOUT_S
        self._channel = grpc.insecure_channel(
            self.address,
            options=[
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.initial_reconnect_backoff_ms", 20),
                ("grpc.min_reconnect_backoff_ms", 20),
                ("grpc.max_reconnect_backoff_ms", 100),
            ],
        )
        while True:
            try:
                self.stub.Describe(worker_pb2.DescribeRequest(), timeout=1, wait_for_ready=True)
                return
            except grpc.RpcError as exc:
                self.check_alive()
                if time.monotonic() > deadline_s:
                    raise HubWorkerError(f"the worker does not answer: {rpc_words(exc)}; {self._log_tail()}") from exc

    def _log_tail(self) -> str:
        lines = self._log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
        return "\n    ".join([f"the end of its log {self._log_path}:", *lines])


def generate_request(
    request_id: str, model: str, prompt: str, max_tokens: int, *, with_logprobs: bool = False
) -> worker_pb2.GenerateRequest:
    """A greedy request for exactly `max_tokens` tokens, with the chosen tokens' log probabilities if wanted."""
    sampling = inference_pb2.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    if with_logprobs:
        sampling.logprobs = 0
    return worker_pb2.GenerateRequest(
        request_id=request_id, model=model, text=prompt, sampling=sampling, return_token_ids=with_logprobs
    )


def rpc_words(error: grpc.RpcError) -> str:
    """Code and message of a failed call."""
    return f"{error.code().name}: {error.details()}"
