"""How many tokens a chat's prompt has: rendered here, counted by a worker's tokenizer. Used by the count endpoints."""

from __future__ import annotations

import dataclasses

from naru_proto.registry import ModelInfoRecord
from naru_proto.v1.worker_pb2 import GenerateRequest
from naru_router.adapters.http.generation import Edge, Exchange
from naru_router.adapters.http.task_consumer import TaskConsumer
from naru_router.core.chat_request import ChatCall


async def count_prompt_tokens(edge: Edge, call: ChatCall, exchange: Exchange) -> int:
    """The tokens of the prompt that the chat would be; nothing is generated.

    Raises:
        NaruError: the chat cannot be rendered, or no worker can count.
    """
    envelope = exchange.envelope
    if not envelope.session:
        # Where a name is split, the model that counts has to be the one whose template was rendered.
        envelope = dataclasses.replace(envelope, session=exchange.answer_id)
    text = (await edge.jobs.chat(call, envelope)).request.text

    def fill(request: GenerateRequest, info: ModelInfoRecord) -> None:
        request.tokenize.text = text

    job = await edge.jobs.task(call.model, "", fill, (), 1, envelope)
    exchange.model = job.label
    consumer = TaskConsumer()
    await edge.dispatcher.run(job, consumer)
    return len(consumer.tokenized().token_ids)
