"""The public gRPC API naru.v1.Inference, with standard health and reflection beside it.

The same life of a request as over HTTP: the same jobs, dispatcher and gate.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from naru_proto import names
from naru_proto.errors import Cancelled, InternalError, InvalidRequest, NaruError
from naru_proto.v1 import inference_pb2, inference_pb2_grpc, worker_pb2
from naru_router.adapters.course import Job
from naru_router.adapters.dispatcher import Dispatcher
from naru_router.adapters.fleet import Fleet
from naru_router.adapters.gate import Gate
from naru_router.adapters.jobs import JobMaker
from naru_router.adapters.metrics import Metrics
from naru_router.core.caller import Caller
from naru_router.core.chat_request import read_messages
from naru_router.core.envelope import Envelope, read_envelope
from naru_router.core.errors import error_shape
from naru_router.core.routing.model import Decision
from naru_router.core.sampling import check_sampling

logger = logging.getLogger(__name__)

SERVICE = "naru.v1.Inference"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


MAX_UNSENT_REPLIES = 65_536
"""Of one call: a client that lets more pile up reads too slowly."""


class _ReplyConsumer:
    """Makes each delta one reply; `write` sends them, beside the request."""

    def __init__(self, request_id: str, n: int) -> None:
        self._request_id = request_id
        self._finished = [False] * n
        self._replies: deque[inference_pb2.InferenceReply] = deque()
        self._has_news = asyncio.Event()
        self._is_complete = False
        self.has_sent = False
        self.answers_as = ""
        """The model that answers, where it is another one than was asked for."""

    def begin(self, decision: Decision, answers_as: str) -> None:
        """Starts over; only ever called before anything was sent."""
        self.answers_as = answers_as
        self._finished = [False] * len(self._finished)

    def feed(self, deltas: Sequence[worker_pb2.Delta]) -> None:
        """Takes the deltas that say something."""
        for delta in deltas:
            has_usage = delta.HasField("usage")
            if not (delta.text or delta.finish_reason or delta.logprobs or has_usage):
                continue
            reply = inference_pb2.InferenceReply(
                request_id=self._request_id,
                index=delta.index,
                text=delta.text,
                finish_reason=delta.finish_reason,
                logprobs=delta.logprobs,
            )
            if has_usage:
                reply.usage.CopyFrom(delta.usage)
            if delta.finish_reason:
                self._finished[delta.index] = True
            self.has_sent = True
            self._replies.append(reply)
        if len(self._replies) > MAX_UNSENT_REPLIES:
            raise Cancelled(f"more than {MAX_UNSENT_REPLIES} replies wait for the client; read faster")
        self._has_news.set()

    async def write(self, context: Any) -> None:
        """Sends replies as they come, one awaited before the next, until `complete` and all are sent."""
        while self._replies or not self._is_complete:
            if not self._replies:
                self._has_news.clear()
                await self._has_news.wait()
                continue
            await context.write(self._replies.popleft())

    def complete(self) -> None:
        """No reply follows.

        Raises:
            InternalError: a choice has not finished.
        """
        if not all(self._finished):
            raise InternalError("the worker ended the request before all of its choices; send it again")
        self._is_complete = True
        self._has_news.set()


class InferenceService:
    """The three calls. Replies are written to the context, so that one write is awaited before the next."""

    def __init__(
        self,
        fleet: Fleet,
        jobs: JobMaker,
        dispatcher: Dispatcher,
        gate: Gate,
        metrics: Metrics,
        caller_of: Callable[[Any], Caller],
    ) -> None:
        """`caller_of`: who sends a call with this metadata; raises NaruError where nobody may."""
        self._caller_of = caller_of
        self._fleet = fleet
        self._jobs = jobs
        self._dispatcher = dispatcher
        self._gate = gate
        self._metrics = metrics

    async def Generate(self, request: inference_pb2.InferenceGenerateRequest, context: Any) -> None:
        """Continues a prompt."""

        async def make_job() -> Job:
            _check(request.sampling)
            return self._jobs.completions(
                request.model, [request.prompt], request.sampling, self._envelope(request.request_id, context)
            )[0]

        await self._run("grpc_generate", request.request_id, make_job, context)

    async def Chat(self, request: inference_pb2.InferenceChatRequest, context: Any) -> None:
        """Renders the chat, then continues it."""

        async def make_job() -> Job:
            _check(request.sampling)
            messages = read_messages([{"role": m.role, "content": m.content} for m in request.messages])
            return await self._jobs.chat(
                request.model, messages, request.sampling, self._envelope(request.request_id, context)
            )

        await self._run("grpc_chat", request.request_id, make_job, context)

    async def ListModels(self, request: inference_pb2.ListModelsRequest, context: Any) -> inference_pb2.ListModelsReply:
        """The models, by name."""
        route_map = self._fleet.route_map
        reply = inference_pb2.ListModelsReply()
        try:
            caller = self._caller_of(context.invocation_metadata())
        except NaruError as exc:
            await _abort(context, exc)
            raise
        for name in route_map.entries(caller):
            model = route_map.models[name].target or name
            info = route_map.info(model)
            reply.models.add(
                name=name,
                aliases=sorted(route_map.models[name].aliases),
                max_model_len=0 if info is None else info.max_model_len,
                ready_workers=len(route_map.ready_workers(model)),
            )
        return reply

    def _envelope(self, request_id: str, context: Any) -> Envelope:
        """What the call's metadata says; its own deadline counts where it is sooner."""
        metadata = context.invocation_metadata()
        texts = {name: value for name, value in metadata or () if isinstance(value, str)}
        envelope = read_envelope(texts.get, self._caller_of(metadata), request_id)
        remaining_s = context.time_remaining()
        if remaining_s is None or 0 < envelope.timeout_s <= remaining_s:
            return envelope
        return dataclasses.replace(envelope, timeout_s=max(0.001, remaining_s))

    async def _run(self, endpoint: str, request_id: str, make_job: Callable[[], Awaitable[Job]], context: Any) -> None:
        model, status = "", "INTERNAL"
        try:
            with self._gate.admit():
                if request_id and not _REQUEST_ID.fullmatch(request_id):
                    raise InvalidRequest(f"request_id is {request_id[:40]!r}; use letters, digits and ._:/+=-")
                job = await make_job()
                model = job.label
                consumer = _ReplyConsumer(request_id or secrets.token_hex(16), job.n)
                await self._run_beside_writing(job, consumer, context)
                if consumer.answers_as:
                    context.set_trailing_metadata(((names.HEADER_MODEL, consumer.answers_as),))
                status = "OK"
        except NaruError as exc:
            status = error_shape(exc).grpc
            await _abort(context, exc)
        except Exception:
            # The top of the call: the client gets a status, the log gets the trace, the router lives on.
            logger.exception("a gRPC call failed")
            await _abort(context, InternalError("the router failed on this request; its log says why"))
        finally:
            self._metrics.requests.labels(endpoint, model, status).inc()

    async def _run_beside_writing(self, job: Job, consumer: _ReplyConsumer, context: Any) -> None:
        writer = asyncio.create_task(consumer.write(context))
        try:
            await self._dispatcher.run(job, consumer)
            consumer.complete()
            await writer
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)


def _check(sampling: inference_pb2.SamplingParams) -> None:
    check_sampling(sampling)
    if sampling.HasField("prompt_logprobs"):
        raise InvalidRequest("prompt_logprobs is set; replies do not carry them: leave it out", param="prompt_logprobs")


async def _abort(context: Any, error: NaruError) -> None:
    details = f"{error.param}: {error.message}" if error.param else error.message
    metadata = ((names.METADATA_ERROR_CODE, error.code),)
    await context.abort(getattr(grpc.StatusCode, error_shape(error).grpc), details, metadata)


class GrpcServer:
    """The server and its health."""

    def __init__(self, service: InferenceService, max_message_bytes: int, *, is_shared: bool = False) -> None:
        """`is_shared`: other processes listen on the same port."""
        self._server = grpc.aio.server(
            options=[("grpc.max_receive_message_length", max_message_bytes), ("grpc.so_reuseport", int(is_shared))]
        )
        health_module: Any = health
        self._health: Any = health_module.aio.HealthServicer()
        inference_pb2_grpc.add_InferenceServicer_to_server(cast(Any, service), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE, "grpc.health.v1.Health", reflection.SERVICE_NAME), self._server)
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Binds and serves.

        Raises:
            OSError: the port cannot be had.
        """
        try:
            self.port = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as exc:
            raise OSError(f"gRPC cannot listen on {host}:{port}; is the port in use?") from exc
        if self.port == 0:
            raise OSError(f"gRPC cannot listen on {host}:{port}; is the port in use?")
        await self._server.start()

    async def set_serving(self, is_serving: bool) -> None:
        """Says over standard health whether requests are taken."""
        status = health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE):
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Takes no new calls and ends the others after the grace."""
        await self._server.stop(grace_s)
