"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API."""

from __future__ import annotations

from naru_router.adapters.course import Job
from naru_router.adapters.http.consumers import StreamConsumer
from naru_router.adapters.http.generation import Exchange, GenerationEndpoint
from naru_router.adapters.http.messages import HttpRequest, Reply
from naru_router.adapters.http.prompt_tokens import count_prompt_tokens
from naru_router.adapters.http.responses import send_json
from naru_router.adapters.http.whole_consumer import WholeConsumer
from naru_router.core.anthropic.errors import AnthropicErrors
from naru_router.core.anthropic.reply import MessageWriter, count_body
from naru_router.core.anthropic.request import MessagesCall, parse_count, parse_messages
from naru_router.core.error_forms import ErrorForm
from naru_router.core.sse import dump


class _AnthropicEndpoint(GenerationEndpoint):
    async def serve(self, request: HttpRequest, reply: Reply) -> None:
        """Answers one request, which has its id under the name that Anthropic's clients look for, too."""
        reply.extra += b"request-id: %b\r\n" % request.request_id.encode("ascii")
        await super().serve(request, reply)

    def errors_of(self, request: HttpRequest) -> ErrorForm:
        """Anthropic's form."""
        return AnthropicErrors(request.request_id)


class MessagesEndpoint(_AnthropicEndpoint):
    """Serves messages."""

    name = "messages"

    async def answer(self, body: dict[str, object], exchange: Exchange) -> None:
        """Runs the chat and sends its message."""
        call = parse_messages(body)
        with exchange.kept_alive(call.chat.stream):
            job = await self._edge.jobs.chat(call.chat, exchange.envelope)
            exchange.model = job.label
            if call.chat.stream:
                await self._stream(call, job, exchange)
            else:
                await self._reply(call, job, exchange)

    async def _stream(self, call: MessagesCall, job: Job, exchange: Exchange) -> None:
        consumer = StreamConsumer(
            exchange.stream,
            lambda: _writer(call, job, exchange),
            exchange.on_first_byte,
            is_explained=exchange.envelope.is_explained,
        )
        await self._edge.dispatcher.run(job, consumer)
        exchange.stream.write(consumer.writer.end())
        exchange.stream.close()

    async def _reply(self, call: MessagesCall, job: Job, exchange: Exchange) -> None:
        consumer = WholeConsumer(lambda: _writer(call, job, exchange))
        await self._edge.dispatcher.run(job, consumer)
        message = dump(consumer.collected.whole())
        send_json(exchange.reply, 200, message, exchange.route_headers([consumer]))


class CountTokensEndpoint(_AnthropicEndpoint):
    """Counts the tokens of what could be sent to `MessagesEndpoint`."""

    name = "count_tokens"

    async def answer(self, body: dict[str, object], exchange: Exchange) -> None:
        """Sends the count."""
        num_tokens = await count_prompt_tokens(self._edge, parse_count(body).chat, exchange)
        exchange.tell_quotas()
        send_json(exchange.reply, 200, dump(count_body(num_tokens)))


def _writer(call: MessagesCall, job: Job, exchange: Exchange) -> MessageWriter:
    return MessageWriter(
        message_id=f"msg_{exchange.answer_id}",
        model=call.chat.model,
        thinking=call.thinking,
        stops=call.chat.sampling.stop,
        make_reader=job.make_reader,
    )
