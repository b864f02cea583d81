"""The public gRPC service naru.v1.Inference: the same life of a request as over HTTP, by the same jobs."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from naru_proto.errors import InvalidRequest
from naru_proto.registry import ModelInfoRecord
from naru_proto.v1 import inference_pb2, worker_pb2
from naru_router.adapters.course import Job
from naru_router.adapters.dispatcher import Dispatcher
from naru_router.adapters.fleet import Fleet
from naru_router.adapters.gate import Gate
from naru_router.adapters.grpc_edge import Call, GrpcEdge, ReplyWriter
from naru_router.adapters.http.task_consumer import TaskConsumer
from naru_router.adapters.jobs import JobMaker
from naru_router.adapters.metrics import Metrics
from naru_router.core.caller import Caller
from naru_router.core.envelope import Envelope
from naru_router.core.inference_calls import (
    InferenceReplies,
    chat_call,
    check_embed,
    check_request_id,
    checked_sampling,
)
from naru_router.core.vectors import floats

_CHARS_PER_TOKEN = 4
_KEY_CHARS = 64
Fill = Callable[[worker_pb2.GenerateRequest, ModelInfoRecord], None]


class InferenceService:
    """The calls. Streamed replies are written to the context, so that one write is awaited before the next."""

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
        self.edge = GrpcEdge(gate, metrics, caller_of)
        self._fleet = fleet
        self._jobs = jobs
        self._dispatcher = dispatcher

    async def Generate(self, request: inference_pb2.InferenceGenerateRequest, context: Any) -> None:
        """Continues a prompt."""

        async def make_job() -> Job:
            sampling, envelope = checked_sampling(request.sampling), self.edge.envelope(request.request_id, context)
            return self._jobs.completions(request.model, [request.prompt], sampling, envelope)[0]

        await self._stream("grpc_generate", request.request_id, make_job, context)

    async def Chat(self, request: inference_pb2.InferenceChatRequest, context: Any) -> None:
        """Renders the chat, then continues it."""

        async def make_job() -> Job:
            return await self._jobs.chat(chat_call(request), self.edge.envelope(request.request_id, context))

        await self._stream("grpc_chat", request.request_id, make_job, context)

    async def Embed(
        self, request: inference_pb2.InferenceEmbedRequest, context: Any
    ) -> inference_pb2.InferenceEmbedReply:
        """A vector for each text."""

        def fill(made: worker_pb2.GenerateRequest, info: ModelInfoRecord) -> None:
            if request.dimensions > info.embedding_dim > 0:
                message = f"dimensions is {request.dimensions}; the model's vectors have {info.embedding_dim}"
                raise InvalidRequest(message, param="dimensions")
            task = made.pooling
            task.kind, task.add_special_tokens = worker_pb2.POOLING_KIND_EMBED, True
            task.dimensions, task.truncate_tokens = request.dimensions, request.truncate_tokens
            task.inputs.extend(worker_pb2.PoolingInput(text=text) for text in request.texts)

        async with self.edge.answering("grpc_embed", context) as call:
            check_embed(request)
            request_id = _request_id(request.request_id)
            envelope = self.edge.envelope(request_id, context)
            num_tokens = sum(map(len, request.texts)) // _CHARS_PER_TOKEN
            found = await self._task(call, request.model, "embed", fill, request.texts, num_tokens, envelope)
            reply = inference_pb2.InferenceEmbedReply(request_id=request_id)
            for vector in found.vectors(len(request.texts)):
                reply.vectors.add(values=floats(vector))
            reply.usage.prompt_tokens = found.usage.prompt_tokens
            return reply
        raise AssertionError("answering ends every failed call")

    async def Tokenize(
        self, request: inference_pb2.InferenceTokenizeRequest, context: Any
    ) -> inference_pb2.InferenceTokenizeReply:
        """A text in tokens."""

        def fill(made: worker_pb2.GenerateRequest, info: ModelInfoRecord) -> None:
            task = made.tokenize
            task.text, task.with_texts = request.text, request.with_texts
            task.add_special_tokens = request.add_special_tokens

        async with self.edge.answering("grpc_tokenize", context) as call:
            request_id = _request_id(request.request_id)
            envelope = self.edge.envelope(request_id, context)
            found = await self._task(call, request.model, "", fill, [request.text], 1, envelope)
            tokenized = found.tokenized()
            return inference_pb2.InferenceTokenizeReply(
                request_id=request_id, token_ids=tokenized.token_ids, texts=tokenized.texts
            )
        raise AssertionError("answering ends every failed call")

    async def Detokenize(
        self, request: inference_pb2.InferenceDetokenizeRequest, context: Any
    ) -> inference_pb2.InferenceDetokenizeReply:
        """Tokens as a text."""

        def fill(made: worker_pb2.GenerateRequest, info: ModelInfoRecord) -> None:
            made.tokenize.token_ids.SetInParent()  # none are a text, too
            made.tokenize.token_ids.ids.extend(request.token_ids)

        async with self.edge.answering("grpc_detokenize", context) as call:
            if any(token_id < 0 for token_id in request.token_ids):
                raise InvalidRequest("token_ids holds a negative id; send a model's token ids", param="token_ids")
            request_id = _request_id(request.request_id)
            envelope = self.edge.envelope(request_id, context)
            found = await self._task(call, request.model, "", fill, [str(request.token_ids[:8])], 1, envelope)
            return inference_pb2.InferenceDetokenizeReply(request_id=request_id, text=found.tokenized().text)
        raise AssertionError("answering ends every failed call")

    async def ListModels(self, request: inference_pb2.ListModelsRequest, context: Any) -> inference_pb2.ListModelsReply:
        """The models, by name."""
        reply = inference_pb2.ListModelsReply()
        async with self.edge.failing(context):
            caller, route_map = self.edge.caller(context), self._fleet.route_map
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

    async def _stream(
        self, endpoint: str, request_id: str, make_job: Callable[[], Awaitable[Job]], context: Any
    ) -> None:
        async with self.edge.answering(endpoint, context) as call:
            told_id = _request_id(request_id)
            job = await make_job()
            call.model = job.label
            writer = ReplyWriter(lambda: InferenceReplies(told_id, job.n, job.make_reader))
            async with writer.writing(context.write):
                await self._dispatcher.run(job, writer)
                writer.replies.check_finished()
            call.answers_as = writer.answers_as

    async def _task(
        self, call: Call, model: str, task: str, fill: Fill, texts: Sequence[str], num_tokens: int, envelope: Envelope
    ) -> TaskConsumer:
        ring_parts = [texts[0][:_KEY_CHARS]]
        job = await self._jobs.task(model, task, fill, ring_parts, num_tokens, envelope)
        call.model = job.label
        consumer = TaskConsumer()
        await self._dispatcher.run(job, consumer)
        call.answers_as = consumer.answers_as
        return consumer


def _request_id(given: str) -> str:
    """The client's own, or a new one.

    Raises:
        InvalidRequest: the client's is none.
    """
    check_request_id(given)
    return given or secrets.token_hex(16)
