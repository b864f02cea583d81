"""POST /v2/...: the Open Inference Protocol's calls over HTTP, with Triton's binary data, `generate` and repository."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence

from naru_proto.errors import InvalidRequest
from naru_router.adapters.course import Job
from naru_router.adapters.http.consumers import StreamConsumer
from naru_router.adapters.http.generation import Edge, Exchange, GenerationEndpoint
from naru_router.adapters.http.messages import HttpRequest
from naru_router.adapters.http.responses import send_json
from naru_router.adapters.oip_calls import OipCalls, Routed
from naru_router.core.fields import Fields, shown
from naru_router.core.json_body import parse_object
from naru_router.core.oip.calls import check_call_id
from naru_router.core.oip.chunks import GenerateChunks, reply_end, reply_head
from naru_router.core.oip.errors import OIP_ERRORS
from naru_router.core.oip.json_call import HEADER_LENGTH, header_length, parse_infer
from naru_router.core.oip.json_reply import infer_reply
from naru_router.core.oip.repository import check_load_parameters
from naru_router.core.oip.text_calls import TextCall, generate_call
from naru_router.core.sse import dump

_MODEL = rb"/v2/models/(?P<model>.+?)(?:/versions/(?P<version>[^/]*))?"
_STORED = rb"/v2/repository/models/(?P<model>.+)"
_LENGTH = HEADER_LENGTH.encode()
_WINDOW_BITS = {"gzip": 31, "deflate": 15}


class OipEndpoint(GenerationEndpoint):
    """One call of the protocol. Whatever content type the body says it has: clients of Triton say none."""

    errors = OIP_ERRORS

    def __init__(self, edge: Edge, calls: OipCalls) -> None:
        super().__init__(edge)
        self._calls = calls

    def read(self, request: HttpRequest) -> dict[str, object]:
        """The body's JSON object, binary data cut off; an empty body is an empty object.

        Raises:
            InvalidRequest: it is none.
        """
        limit = self._edge.max_body_bytes
        if request.is_body_too_large:
            raise InvalidRequest(f"the body is larger than the limit of {limit} bytes; send a shorter request")
        request.body = decompressed(request.body, request.text("content-encoding"), limit)
        return parse_object(request.body[: _num_json_bytes(request)]) if request.body else {}


class InferEndpoint(OipEndpoint):
    """Runs a model once."""

    name = "oip_infer"

    async def answer(self, body: dict[str, object], exchange: Exchange) -> None:
        """Runs the call and sends its outputs."""
        request = exchange.request
        asked = parse_infer(body, request.body[_num_json_bytes(request) :], *_model(request))
        watch = _Watch(exchange)
        outputs = await self._calls.infer(asked.call, exchange.envelope, watch.on_job)
        reply, num_json_bytes = infer_reply(asked, outputs)
        headers = exchange.route_headers(watch.consumers)
        if num_json_bytes:
            kind = ((b"content-type", b"application/octet-stream"), (_LENGTH, b"%d" % num_json_bytes))
            exchange.reply.send(200, (*kind, *headers), reply)
        else:
            send_json(exchange.reply, 200, reply, headers)


class GenerateEndpoint(OipEndpoint):
    """Continues one text; the answer comes whole."""

    name = "oip_generate"

    async def answer(self, body: dict[str, object], exchange: Exchange) -> None:
        """Runs the call and sends its answer."""
        model, version = _model(exchange.request)
        call, head = generate_call(body), reply_head(model, check_call_id(body.get("id") or ""))
        if call.stream:
            raise InvalidRequest("stream is true; ask generate_stream, or leave it out", param="stream")
        watch = _Watch(exchange)
        (answer,) = await self._calls.generate(model, version, call, exchange.envelope, watch.on_job)
        end = reply_end(call.head + answer.text, answer.finish_reason, answer.usage)
        send_json(exchange.reply, 200, dump({**head, **end}), exchange.route_headers(watch.consumers))


class GenerateStreamEndpoint(OipEndpoint):
    """Continues one text; the answer comes as it is made."""

    name = "oip_generate_stream"

    async def answer(self, body: dict[str, object], exchange: Exchange) -> None:
        """Runs the call and sends its events."""
        model, version = _model(exchange.request)
        call, call_id = generate_call(body), check_call_id(body.get("id") or "")
        with exchange.kept_alive(is_stream=True), self._calls.counted(model, exchange.envelope):
            job = await self._calls.text_job(model, version, call, exchange.envelope)
            exchange.model = job.label
            consumer = StreamConsumer(
                exchange.stream,
                _writer_maker(model, call_id, call),
                exchange.on_first_byte,
                is_explained=exchange.envelope.is_explained,
            )
            await self._calls.run(job, consumer)
            exchange.stream.write(consumer.writer.end())
            exchange.stream.close()


class IndexEndpoint(OipEndpoint):
    """Lists the repository."""

    name = "oip_index"

    async def answer(self, body: dict[str, object], exchange: Exchange) -> None:
        """Sends the list."""
        only_ready = Fields(body).boolean("ready") or False
        models = self._calls.repository.index(exchange.envelope.caller, only_ready=only_ready)
        send_json(exchange.reply, 200, dump(models))


class LoadEndpoint(OipEndpoint):
    """Has a model brought up."""

    name = "oip_load"

    async def answer(self, body: dict[str, object], exchange: Exchange) -> None:
        """Replies when it is ready."""
        check_load_parameters(body.get("parameters"))
        model, _ = _model(exchange.request)
        await self._calls.repository.load(model, exchange.envelope)
        send_json(exchange.reply, 200, dump({"name": model, "load": True}))


class UnloadEndpoint(OipEndpoint):
    """Has a model's idle copies taken down."""

    name = "oip_unload"

    async def answer(self, body: dict[str, object], exchange: Exchange) -> None:
        """Replies when that is under way."""
        model, _ = _model(exchange.request)
        await self._calls.repository.unload(model, exchange.envelope.caller)
        send_json(exchange.reply, 200, dump({"name": model, "unload": True}))


def oip_endpoints(edge: Edge, calls: OipCalls) -> dict[bytes, GenerationEndpoint]:
    """Those of a fixed path."""
    return {b"/v2/repository/index": IndexEndpoint(edge, calls)}


def oip_patterns(edge: Edge, calls: OipCalls) -> Sequence[tuple[re.Pattern[bytes], GenerationEndpoint]]:
    """Those whose path names a model."""
    return (
        (re.compile(_MODEL + rb"/infer"), InferEndpoint(edge, calls)),
        (re.compile(_MODEL + rb"/generate"), GenerateEndpoint(edge, calls)),
        (re.compile(_MODEL + rb"/generate_stream"), GenerateStreamEndpoint(edge, calls)),
        (re.compile(_STORED + rb"/load"), LoadEndpoint(edge, calls)),
        (re.compile(_STORED + rb"/unload"), UnloadEndpoint(edge, calls)),
    )


def decompressed(body: bytes, encoding: str | None, max_bytes: int) -> bytes:
    """A body as it was before a client compressed it.

    Raises:
        InvalidRequest: an unknown encoding, broken data, or more than `max_bytes` of it.
    """
    name = (encoding or "identity").strip().lower()
    if name == "identity":
        return body
    if name not in _WINDOW_BITS:
        raise InvalidRequest(f"the content-encoding is {shown(encoding)}; send gzip, deflate or none")
    inflater = zlib.decompressobj(_WINDOW_BITS[name])
    try:
        data = inflater.decompress(body, max_bytes + 1)
    except zlib.error as exc:
        raise InvalidRequest(f"the body is no {name} data: {exc}") from exc
    if len(data) > max_bytes:
        raise InvalidRequest(
            f"the body is larger than the limit of {max_bytes} bytes, unpacked; send a shorter request"
        )
    if not inflater.eof or inflater.unused_data:
        raise InvalidRequest(f"the body is no whole {name} data")
    return data


def _num_json_bytes(request: HttpRequest) -> int:
    return header_length(request.text(HEADER_LENGTH), len(request.body))


def _model(request: HttpRequest) -> tuple[str, str]:
    """Of the path: the model's name, and its version or an empty text."""
    return request.params["model"], request.params.get("version", "")


class _Watch:
    """Sees the first job of a call, for metrics and for the reply's head. Mutable."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.consumers: list[Routed] = []

    def on_job(self, job: Job, consumer: Routed) -> None:
        """It is about to run."""
        self._exchange.model = job.label
        self.consumers.append(consumer)


def _writer_maker(model: str, call_id: str, call: TextCall) -> Callable[[], GenerateChunks]:
    return lambda: GenerateChunks(model=model, call_id=call_id, prompt=call.head)
