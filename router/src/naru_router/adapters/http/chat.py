"""POST /v1/chat/completions: one chat, streamed or whole."""

from __future__ import annotations

from naru_router.adapters.course import Job
from naru_router.adapters.http.consumers import AnswerConsumer, StreamConsumer
from naru_router.adapters.http.generation import Exchange, GenerationEndpoint
from naru_router.adapters.http.responses import send_json
from naru_router.core.answers import answer_body
from naru_router.core.chat_request import ChatCall, parse_chat
from naru_router.core.chunks_chat import ChatChunks


class ChatEndpoint(GenerationEndpoint):
    """Serves chats."""

    name = "chat"

    async def answer(self, body: dict[str, object], exchange: Exchange) -> None:
        """Runs the chat and sends its answer."""
        call = parse_chat(body)
        with exchange.kept_alive(call.stream):
            job = await self._edge.jobs.chat(call.model, call.messages, call.sampling, exchange.envelope)
            exchange.model = job.label
            answer_id = f"chatcmpl-{exchange.answer_id}"
            if call.stream:
                await self._stream(call, job, answer_id, exchange)
            else:
                await self._reply(call, job, answer_id, exchange)

    async def _stream(self, call: ChatCall, job: Job, answer_id: str, exchange: Exchange) -> None:
        def make_writer() -> ChatChunks:
            return ChatChunks(
                answer_id=answer_id,
                created_s=exchange.created_s,
                model=call.model,
                n=job.n,
                include_usage=call.include_usage,
                has_logprobs=call.sampling.HasField("logprobs"),
            )

        explains = exchange.envelope.is_explained
        consumer = StreamConsumer(exchange.stream, make_writer, exchange.on_first_byte, is_explained=explains)
        await self._edge.dispatcher.run(job, consumer)
        exchange.stream.write(consumer.writer.end())
        exchange.stream.close()

    async def _reply(self, call: ChatCall, job: Job, answer_id: str, exchange: Exchange) -> None:
        consumer = AnswerConsumer(job.n)
        await self._edge.dispatcher.run(job, consumer)
        consumer.answer.check_finished()
        reply = answer_body(
            answer_id=answer_id,
            kind="chat.completion",
            created_s=exchange.created_s,
            model=call.model,
            choices=consumer.answer.chat_choices(has_logprobs=call.sampling.HasField("logprobs")),
            usage=consumer.answer.usage,
        )
        send_json(exchange.reply, 200, reply, exchange.route_headers([consumer]))
