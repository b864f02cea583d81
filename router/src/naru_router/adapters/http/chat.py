"""POST /v1/chat/completions: one chat, streamed or whole."""

from __future__ import annotations

from collections.abc import Callable

from naru_router.adapters.course import Job
from naru_router.adapters.http.consumers import AnswerConsumer, StreamConsumer
from naru_router.adapters.http.generation import Exchange, GenerationEndpoint
from naru_router.adapters.http.responses import send_json
from naru_router.core.answers import answer_body
from naru_router.core.chat_request import ChatCall, parse_chat
from naru_router.core.chunks_chat import ChatChunks
from naru_router.core.chunks_parts import PartChunks


class ChatEndpoint(GenerationEndpoint):
    """Serves chats."""

    name = "chat"

    async def answer(self, body: dict[str, object], exchange: Exchange) -> None:
        """Runs the chat and sends its answer."""
        call = parse_chat(body)
        with exchange.kept_alive(call.stream):
            job = await self._edge.jobs.chat(call, exchange.envelope)
            exchange.model = job.label
            answer_id = f"chatcmpl-{exchange.answer_id}"
            if call.stream:
                await self._stream(call, job, answer_id, exchange)
            else:
                await self._reply(call, job, answer_id, exchange)

    async def _stream(self, call: ChatCall, job: Job, answer_id: str, exchange: Exchange) -> None:
        make_writer = _writer_maker(call, job, answer_id, exchange.created_s)
        explains = exchange.envelope.is_explained
        consumer = StreamConsumer(exchange.stream, make_writer, exchange.on_first_byte, is_explained=explains)
        await self._edge.dispatcher.run(job, consumer)
        exchange.stream.write(consumer.writer.end())
        exchange.stream.close()

    async def _reply(self, call: ChatCall, job: Job, answer_id: str, exchange: Exchange) -> None:
        consumer = AnswerConsumer(job.n)
        await self._edge.dispatcher.run(job, consumer)
        answer = consumer.answer
        answer.check_finished()
        if call.best_of:
            answer.keep_best(call.sampling.n if call.sampling.HasField("n") else 1)
        has_prompt = call.sampling.HasField("prompt_logprobs")
        reply = answer_body(
            answer_id=answer_id,
            kind="chat.completion",
            created_s=exchange.created_s,
            model=call.model,
            choices=answer.chat_choices(
                has_logprobs=call.sampling.HasField("logprobs"),
                make_reader=job.make_reader,
                writes_function_call=call.wants_function_call,
            ),
            usage=answer.usage,
            more={"prompt_logprobs": answer.prompt_logprobs()} if has_prompt else {},
        )
        send_json(exchange.reply, 200, reply, exchange.route_headers([consumer]))


def _writer_maker(call: ChatCall, job: Job, answer_id: str, created_s: int) -> Callable[[], ChatChunks | PartChunks]:
    """Makes writers of the answer's events; plain text takes the quicker one."""
    has_logprobs = call.sampling.HasField("logprobs")

    def make() -> ChatChunks | PartChunks:
        make_reader = job.make_reader
        if make_reader is None:
            return ChatChunks(
                answer_id=answer_id,
                created_s=created_s,
                model=call.model,
                n=job.n,
                include_usage=call.include_usage,
                has_logprobs=has_logprobs,
            )
        return PartChunks(
            answer_id=answer_id,
            created_s=created_s,
            model=call.model,
            n=job.n,
            include_usage=call.include_usage,
            make_reader=make_reader,
            has_logprobs=has_logprobs,
            writes_function_call=call.wants_function_call,
        )

    return make
