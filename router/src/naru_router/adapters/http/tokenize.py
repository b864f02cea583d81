"""POST /tokenize and /detokenize: a model's tokens of a text or a chat, and the text of tokens."""

from __future__ import annotations

from collections.abc import Mapping

import orjson

from naru_proto.errors import NaruError
from naru_proto.registry import ModelInfoRecord
from naru_proto.v1 import worker_pb2
from naru_router.adapters.course import Job
from naru_router.adapters.http.generation import Exchange, GenerationEndpoint
from naru_router.adapters.http.responses import send_json
from naru_router.adapters.http.task_consumer import TaskConsumer
from naru_router.core.tokenize_request import parse_detokenize, parse_tokenize

_KEY_CHARS = 64


class TokenizeEndpoint(GenerationEndpoint):
    """Serves tokenize calls."""

    name = "tokenize"

    async def answer(self, body: dict[str, object], exchange: Exchange) -> None:
        """Runs the call and sends its answer."""
        call = parse_tokenize(body)
        text = call.prompt
        if call.chat is not None:
            text = (await exchange.edge.jobs.chat(call.chat, exchange.envelope)).request.text
        max_model_len = 0

        def fill(request: worker_pb2.GenerateRequest, info: ModelInfoRecord) -> None:
            nonlocal max_model_len
            max_model_len = info.max_model_len
            request.tokenize.text = text
            request.tokenize.add_special_tokens = call.add_special_tokens
            request.tokenize.with_texts = call.wants_texts

        job = await exchange.edge.jobs.task(call.model, "", fill, [text[:_KEY_CHARS]], 1, exchange.envelope)
        exchange.model = job.label
        param = "prompt" if call.chat is None else "messages"
        consumer = await _run(job, exchange, {"text": param})
        tokenized = consumer.tokenized()
        ids = list(tokenized.token_ids)
        reply: dict[str, object] = {"count": len(ids), "max_model_len": max_model_len, "tokens": ids}
        reply["token_strs"] = list(tokenized.texts) if call.wants_texts else None
        send_json(exchange.reply, 200, orjson.dumps(reply), exchange.route_headers([consumer]))


class DetokenizeEndpoint(GenerationEndpoint):
    """Serves detokenize calls."""

    name = "detokenize"

    async def answer(self, body: dict[str, object], exchange: Exchange) -> None:
        """Runs the call and sends its answer."""
        call = parse_detokenize(body)

        def fill(request: worker_pb2.GenerateRequest, info: ModelInfoRecord) -> None:
            request.tokenize.token_ids.SetInParent()
            request.tokenize.token_ids.ids.extend(call.tokens)

        job = await exchange.edge.jobs.task(call.model, "", fill, [str(call.tokens[:8])], 1, exchange.envelope)
        exchange.model = job.label
        consumer = await _run(job, exchange, {"token_ids": "tokens"})
        reply = orjson.dumps({"prompt": consumer.tokenized().text})
        send_json(exchange.reply, 200, reply, exchange.route_headers([consumer]))


async def _run(job: Job, exchange: Exchange, names: Mapping[str, str]) -> TaskConsumer:
    """Runs a task. `names`: a worker's names of the request's fields, for errors."""
    consumer = TaskConsumer()
    try:
        await exchange.edge.dispatcher.run(job, consumer)
    except NaruError as error:
        field_name = names.get(error.param)
        if field_name is not None:
            error.message, error.param = error.message.replace(error.param, field_name), field_name
        raise
    return consumer
