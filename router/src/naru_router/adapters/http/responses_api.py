"""POST /v1/responses and /v1/responses/input_tokens: OpenAI's Responses API. What it stores is in the record store."""

from __future__ import annotations

import time
from typing import Any

from naru_proto.errors import InvalidRequest
from naru_router.adapters.course import Job
from naru_router.adapters.http.consumers import StreamConsumer
from naru_router.adapters.http.generation import Edge, Exchange, GenerationEndpoint
from naru_router.adapters.http.prompt_tokens import count_prompt_tokens
from naru_router.adapters.http.responses import send_json
from naru_router.adapters.http.whole_consumer import WholeConsumer
from naru_router.adapters.storage.record_store import RecordStore
from naru_router.core.fields import shown
from naru_router.core.responses.reply import ResponseErrors, ResponseWriter
from naru_router.core.responses.request import ResponseCall, parse_response
from naru_router.core.responses.stored import KIND, is_response_id, items_after, record_of
from naru_router.core.sse import dump

_NO_STORE = "this router stores no responses: whoever runs it has to set --files-dir"


class ResponsesEndpoint(GenerationEndpoint):
    """Serves responses."""

    name = "responses"

    def __init__(self, edge: Edge, store: RecordStore | None) -> None:
        """`store` None: nothing is stored."""
        super().__init__(edge)
        self._store = store

    async def answer(self, body: dict[str, object], exchange: Exchange) -> None:
        """Runs the chat, stores the response where that is asked for, and sends it."""
        call = parse_response(body, exchange.answer_id)
        if call.is_stored and self._store is None:
            raise InvalidRequest(f"store is true; {_NO_STORE}, or send false", param="store")
        earlier = await earlier_items(self._store, call, exchange)
        with exchange.kept_alive(call.stream):
            job = await self._edge.jobs.chat(call.chat(earlier), exchange.envelope)
            exchange.model = job.label
            if call.stream:
                await self._stream(call, earlier, job, exchange)
            else:
                await self._reply(call, earlier, job, exchange)

    async def _stream(self, call: ResponseCall, earlier: list[Any], job: Job, exchange: Exchange) -> None:
        consumer = StreamConsumer(
            exchange.stream,
            lambda: _writer(call, job, exchange),
            exchange.on_first_byte,
            is_explained=exchange.envelope.is_explained,
        )
        exchange.errors = ResponseErrors(lambda: consumer.writer)
        await self._edge.dispatcher.run(job, consumer)
        response = consumer.writer.whole(int(time.time()))
        await self._keep(call, earlier, response, exchange)
        exchange.stream.write(consumer.writer.end(response))
        exchange.stream.close()

    async def _reply(self, call: ResponseCall, earlier: list[Any], job: Job, exchange: Exchange) -> None:
        consumer = WholeConsumer(lambda: _writer(call, job, exchange))
        await self._edge.dispatcher.run(job, consumer)
        response = consumer.collected.whole(int(time.time()))
        await self._keep(call, earlier, response, exchange)
        send_json(exchange.reply, 200, dump(response), exchange.route_headers([consumer]))

    async def _keep(self, call: ResponseCall, earlier: list[Any], response: dict[str, Any], exchange: Exchange) -> None:
        """Before the client is told that it is there."""
        if call.is_stored and self._store is not None:
            record = record_of(response, [*earlier, *call.items])
            await self._store.put(KIND, exchange.envelope.caller.tenant, response["id"], record)


class InputTokensEndpoint(GenerationEndpoint):
    """Counts the tokens of what could be sent to `ResponsesEndpoint`."""

    name = "input_tokens"

    def __init__(self, edge: Edge, store: RecordStore | None) -> None:
        """`store` None: nothing is stored."""
        super().__init__(edge)
        self._store = store

    async def answer(self, body: dict[str, object], exchange: Exchange) -> None:
        """Sends the count."""
        call = parse_response(body, exchange.answer_id)
        chat = call.chat(await earlier_items(self._store, call, exchange))
        num_tokens = await count_prompt_tokens(self._edge, chat, exchange)
        exchange.tell_quotas()
        send_json(exchange.reply, 200, dump({"object": "response.input_tokens", "input_tokens": num_tokens}))


async def earlier_items(store: RecordStore | None, call: ResponseCall, exchange: Exchange) -> list[Any]:
    """The items of the stored response that a call goes on from, and of those before it.

    Raises:
        InvalidRequest: the caller has stored no such response.
    """
    if not call.previous_id:
        return []
    record = None
    if store is None:
        message = f"previous_response_id is {shown(call.previous_id)}; {_NO_STORE}, or send the whole conversation"
        raise InvalidRequest(message, param="previous_response_id")
    if is_response_id(call.previous_id):
        record = await store.get(KIND, exchange.envelope.caller.tenant, call.previous_id)
    if record is None:
        raise InvalidRequest(
            f"previous_response_id is {shown(call.previous_id)}; no response is stored under it: "
            "only those made with store true are",
            param="previous_response_id",
        )
    return items_after(record)


def _writer(call: ResponseCall, job: Job, exchange: Exchange) -> ResponseWriter:
    return ResponseWriter(call, answer_id=exchange.answer_id, created_s=exchange.created_s, make_reader=job.make_reader)
