"""The gRPC service inference.GRPCInferenceService: the Open Inference Protocol with Triton's repository and streams."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any

from google.protobuf import json_format

from naru_proto.errors import InternalError, NaruError
from naru_proto.v1 import open_inference_pb2 as wire
from naru_proto.v1 import worker_pb2
from naru_router.adapters.course import Job
from naru_router.adapters.grpc_edge import Call, GrpcEdge, ReplyWriter
from naru_router.adapters.http.oip_pages import server_metadata
from naru_router.adapters.oip_calls import OipCalls, Routed
from naru_router.core.envelope import Envelope
from naru_router.core.finish import finish_name
from naru_router.core.oip.calls import InferCall
from naru_router.core.oip.grpc_call import infer_response, parse_infer_message
from naru_router.core.oip.repository import check_load_parameters
from naru_router.core.oip.text_calls import TextAnswer, TextCall, text_call, text_tensors
from naru_router.core.usage import TokenUsage

MAX_STREAM_CALLS = 64
"""Requests of one stream that are answered at once; more are not read before some are."""
_FINAL = "triton_final_response"
_FAILED = "answering ends every failed call"


class OpenInferenceService:
    """The calls."""

    def __init__(self, edge: GrpcEdge, calls: OipCalls) -> None:
        self._edge = edge
        self._calls = calls
        self._repository = calls.repository

    async def ServerLive(self, request: wire.ServerLiveRequest, context: Any) -> wire.ServerLiveResponse:
        """The process answers."""
        return wire.ServerLiveResponse(live=True)

    async def ServerReady(self, request: wire.ServerReadyRequest, context: Any) -> wire.ServerReadyResponse:
        """Requests are taken."""
        return wire.ServerReadyResponse(ready=self._repository.is_serving)

    async def ServerMetadata(self, request: wire.ServerMetadataRequest, context: Any) -> wire.ServerMetadataResponse:
        """What this server is."""
        return json_format.ParseDict(server_metadata(), wire.ServerMetadataResponse())

    async def ModelReady(self, request: wire.ModelReadyRequest, context: Any) -> wire.ModelReadyResponse:
        """Some worker has the model loaded."""
        async with self._edge.failing(context):
            is_ready = self._repository.is_ready(request.name, request.version, self._edge.caller(context))
            return wire.ModelReadyResponse(ready=is_ready)
        raise AssertionError(_FAILED)

    async def ModelMetadata(self, request: wire.ModelMetadataRequest, context: Any) -> wire.ModelMetadataResponse:
        """What a model takes and gives."""
        async with self._edge.failing(context):
            card = self._repository.card(request.name, request.version, self._edge.caller(context))
            return json_format.ParseDict(card.metadata(), wire.ModelMetadataResponse())
        raise AssertionError(_FAILED)

    async def ModelConfig(self, request: wire.ModelConfigRequest, context: Any) -> wire.ModelConfigResponse:
        """The same, in Triton's words."""
        async with self._edge.failing(context):
            card = self._repository.card(request.name, request.version, self._edge.caller(context))
            return json_format.ParseDict({"config": card.config()}, wire.ModelConfigResponse())
        raise AssertionError(_FAILED)

    async def ModelStatistics(self, request: wire.ModelStatisticsRequest, context: Any) -> wire.ModelStatisticsResponse:
        """Calls that this router has answered."""
        async with self._edge.failing(context):
            found = self._repository.statistics(request.name, request.version, self._edge.caller(context))
            return json_format.ParseDict({"model_stats": found}, wire.ModelStatisticsResponse())
        raise AssertionError(_FAILED)

    async def RepositoryIndex(self, request: wire.RepositoryIndexRequest, context: Any) -> wire.RepositoryIndexResponse:
        """The models that can be asked for."""
        async with self._edge.failing(context):
            found = self._repository.index(self._edge.caller(context), only_ready=request.ready)
            return json_format.ParseDict({"models": found}, wire.RepositoryIndexResponse())
        raise AssertionError(_FAILED)

    async def RepositoryModelLoad(
        self, request: wire.RepositoryModelLoadRequest, context: Any
    ) -> wire.RepositoryModelLoadResponse:
        """Has a model brought up."""
        async with self._edge.answering("grpc_oip_load", context):
            check_load_parameters(dict.fromkeys(request.parameters))
            await self._repository.load(request.model_name, self._edge.envelope("", context))
        return wire.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(
        self, request: wire.RepositoryModelUnloadRequest, context: Any
    ) -> wire.RepositoryModelUnloadResponse:
        """Has a model's idle copies taken down."""
        async with self._edge.answering("grpc_oip_unload", context):
            await self._repository.unload(request.model_name, self._edge.caller(context))
        return wire.RepositoryModelUnloadResponse()

    async def ModelInfer(self, request: wire.ModelInferRequest, context: Any) -> wire.ModelInferResponse:
        """Runs a model once."""
        async with self._edge.answering("grpc_oip_infer", context) as call:
            return await self._infer(request, call, self._edge.envelope(secrets.token_hex(16), context))
        raise AssertionError(_FAILED)

    async def _infer(self, request: wire.ModelInferRequest, call: Call, envelope: Envelope) -> wire.ModelInferResponse:
        asked = parse_infer_message(request)

        seen: list[Routed] = []

        def on_job(job: Job, consumer: Routed) -> None:
            call.model = job.label
            seen.append(consumer)

        outputs = await self._calls.infer(asked, envelope, on_job)
        call.answers_as = seen[0].answers_as
        return infer_response(asked, outputs, is_raw=bool(request.raw_input_contents))

    async def ModelStreamInfer(self, request_iterator: Any, context: Any) -> None:
        """Runs any number of calls side by side; each response has the id of its request."""
        room, lock = asyncio.Semaphore(MAX_STREAM_CALLS), asyncio.Lock()

        async def send(response: wire.ModelStreamInferResponse) -> None:
            async with lock:
                await context.write(response)

        async def answer(request: wire.ModelInferRequest) -> None:
            try:
                await self._answer_in_stream(request, context, send)
            finally:
                room.release()

        async with asyncio.TaskGroup() as group:
            await room.acquire()
            async for request in request_iterator:
                group.create_task(answer(request))
                await room.acquire()

    async def _answer_in_stream(self, request: wire.ModelInferRequest, context: Any, send: Any) -> None:
        """One request of a stream; its failure is told, and ends nothing else."""
        try:
            async with self._edge.counting("grpc_oip_stream_infer") as call:
                envelope = self._edge.envelope(secrets.token_hex(16), context)
                asked = parse_infer_message(request)
                text = await self._streamed_text(asked, envelope)
                if text is None:
                    response = await self._infer(request, call, envelope)
                    response.parameters[_FINAL].bool_param = True
                    await send(wire.ModelStreamInferResponse(infer_response=response))
                else:
                    is_raw = bool(request.raw_input_contents)
                    await self._stream_text(asked, text, is_raw, call, envelope, send)
        except NaruError as exc:
            failed = wire.ModelStreamInferResponse(error_message=exc.message)
            failed.infer_response.model_name, failed.infer_response.id = request.model_name, request.id
            await send(failed)

    async def _streamed_text(self, asked: InferCall, envelope: Envelope) -> TextCall | None:
        """What a request asks whose answer is to come as it is made; None: it comes whole."""
        if not any(tensor.name == "stream" for tensor in asked.inputs) and "stream" not in asked.parameters:
            return None
        card = await self._repository.card_for(asked.model, asked.version, asked.envelope(envelope))
        if card.kind != "generate":
            return None
        text = text_call(asked)
        return text if text.stream else None

    async def _stream_text(
        self, asked: InferCall, text: TextCall, is_raw: bool, call: Call, envelope: Envelope, send: Any
    ) -> None:
        with self._calls.counted(asked.model, envelope):
            job = await self._calls.text_job(asked.model, asked.version, text, asked.envelope(envelope))
            call.model = job.label
            writer = ReplyWriter(lambda: TextResponses(asked, text, is_raw=is_raw))
            async with writer.writing(send):
                await self._calls.run(job, writer)
                writer.replies.check_finished()


class TextResponses:
    """Makes the responses of one streamed text of its deltas; the last one is marked. Mutable."""

    def __init__(self, asked: InferCall, text: TextCall, *, is_raw: bool) -> None:
        self._asked = asked
        self._text = text
        self._is_raw = is_raw
        self._head = text.head
        self._reason = ""

    def feed(self, deltas: Sequence[worker_pb2.Delta]) -> list[wire.ModelStreamInferResponse]:
        """The responses of the deltas, possibly none.

        Raises:
            InternalError: the answer ended twice or oddly.
        """
        piece = "".join(delta.text for delta in deltas)
        for delta in deltas:
            if delta.finish_reason:
                if self._reason:
                    raise InternalError("the worker ended a choice twice; send the request again")
                self._reason = finish_name(delta.finish_reason)
        last = deltas[-1]
        is_last = last.request_done or last.HasField("usage")
        if not piece and not is_last:
            return []
        piece, self._head = self._head + piece, ""
        usage = TokenUsage.from_wire(last.usage) if last.HasField("usage") else TokenUsage()
        outputs = text_tensors(self._text.without_echo, [TextAnswer(piece, self._reason if is_last else "", usage)])
        response = infer_response(self._asked, outputs, is_raw=self._is_raw)
        response.parameters[_FINAL].bool_param = is_last
        return [wire.ModelStreamInferResponse(infer_response=response)]

    def check_finished(self) -> None:
        """Checks that nothing is missing after the last delta.

        Raises:
            InternalError: the answer has not finished.
        """
        if not self._reason:
            raise InternalError("the worker ended the request before all of its choices; send it again")
