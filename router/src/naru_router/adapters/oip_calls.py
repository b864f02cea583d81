"""Runs calls of the Open Inference Protocol as jobs: tensors, texts to continue, vectors, scores. For both edges."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from naru_proto.errors import InternalError, InvalidRequest, NaruError
from naru_proto.registry import ModelInfoRecord
from naru_proto.v1 import worker_pb2
from naru_proto.v1.worker_pb2 import Tensor
from naru_router.adapters.admission import Admission
from naru_router.adapters.course import Consumer, Job
from naru_router.adapters.dispatcher import Dispatcher, tokens_of
from naru_router.adapters.http.consumers import AnswerConsumer
from naru_router.adapters.http.task_consumer import TaskConsumer
from naru_router.adapters.jobs import JobMaker
from naru_router.adapters.oip_repository import OipRepository
from naru_router.adapters.together import all_or_none
from naru_router.core.envelope import Envelope
from naru_router.core.oip.calls import InferCall
from naru_router.core.oip.tensors import check_inputs, check_outputs
from naru_router.core.oip.text_calls import (
    TextAnswer,
    TextCall,
    embed_texts,
    embedding_tensor,
    score_pairs,
    score_tensor,
    text_call,
    text_tensors,
)
from naru_router.core.routing.model import Decision

_CHARS_PER_TOKEN = 4


class Routed(Protocol):
    """A consumer that knows where its job went."""

    decision: Decision | None
    answers_as: str


OnJob = Callable[[Job, Routed], None]
"""Told of the first job of a call, and of what takes its output, before it runs."""


class _RoutedConsumer(Consumer, Routed, Protocol):
    pass


class OipCalls:
    """Runs calls."""

    def __init__(self, repository: OipRepository, jobs: JobMaker, dispatcher: Dispatcher) -> None:
        self.repository = repository
        self._jobs = jobs
        self._dispatcher = dispatcher

    async def infer(self, call: InferCall, envelope: Envelope, on_job: OnJob) -> list[Tensor]:
        """The outputs of a call, in the order they were asked for.

        Raises:
            NaruError: it is refused, or failed.
        """
        envelope = call.envelope(envelope)
        card = await self.repository.card_for(call.model, call.version, envelope)
        with self.counted(call.model, envelope) as count:
            if card.kind == "generate":
                asked = text_call(call)
                if asked.stream:
                    raise InvalidRequest(
                        "stream is true; ask ModelStreamInfer or generate_stream, or leave it out", param="stream"
                    )
                outputs = text_tensors(asked, await self._texts(call.model, asked, envelope, on_job))
                count.num_inputs = len(asked.prompts)
            elif card.kind == "tensors":
                outputs = await self._tensors(call, envelope, on_job)
                count.num_inputs = call.inputs[0].shape[0] if card.max_batch_size else 1
            elif card.kind == "embed":
                texts, dimensions = embed_texts(call)
                outputs = [embedding_tensor(await self._vectors(call.model, texts, dimensions, envelope, on_job))]
                count.num_inputs = len(texts)
            else:
                pairs = score_pairs(call)
                outputs = [score_tensor(await self._scores(call.model, pairs, envelope, on_job))]
                count.num_inputs = len(pairs)
        return outputs

    async def generate(
        self, model: str, version: str, call: TextCall, envelope: Envelope, on_job: OnJob
    ) -> list[TextAnswer]:
        """What comes of each prompt, whole.

        Raises:
            NaruError: it is refused, or failed.
        """
        await self._check_generates(model, version, envelope)
        with self.counted(model, envelope):
            return await self._texts(model, call, envelope, on_job)

    async def text_job(self, model: str, version: str, call: TextCall, envelope: Envelope) -> Job:
        """The job of the only prompt of a call, for who takes its output as it comes.

        Raises:
            InvalidRequest: the model generates no text, or there are several prompts.
            NaruError: no such model, or it cannot be loaded.
        """
        await self._check_generates(model, version, envelope)
        if len(call.prompts) != 1:
            raise InvalidRequest("a stream continues one text; send several requests", param="text_input")
        return self._jobs.completions(model, call.prompts, call.sampling, envelope)[0]

    async def _check_generates(self, model: str, version: str, envelope: Envelope) -> None:
        card = await self.repository.card_for(model, version, envelope)
        if card.kind != "generate":
            raise InvalidRequest(f"the model {model[:200]!r} generates no text; ask infer", param="model")

    async def _texts(self, model: str, call: TextCall, envelope: Envelope, on_job: OnJob) -> list[TextAnswer]:
        jobs = self._jobs.completions(model, call.prompts, call.sampling, envelope)
        consumers = [AnswerConsumer(job.n) for job in jobs]
        await self._run(jobs, consumers, on_job)
        answers = []
        for consumer in consumers:
            consumer.answer.check_finished()
            (choice,) = consumer.answer.completion_choices(first_index=0, has_logprobs=False, echo=None)
            answers.append(TextAnswer(str(choice["text"]), str(choice["finish_reason"]), consumer.answer.usage))
        return answers

    async def _tensors(self, call: InferCall, envelope: Envelope, on_job: OnJob) -> list[Tensor]:
        def fill(request: worker_pb2.GenerateRequest, info: ModelInfoRecord) -> None:
            check_inputs(call.inputs, info)
            check_outputs(call.outputs, [each.name for each in info.outputs])
            request.tensors.inputs.extend(call.inputs)
            request.tensors.outputs.extend(call.outputs)

        # Nothing is gained where requests of one model meet on one worker: the id spreads them.
        job = await self._jobs.task(call.model, "tensors", fill, [envelope.request_id], 1, envelope)
        consumer = TaskConsumer()
        await self._run([job], [consumer], on_job)
        found = {tensor.name: tensor for tensor in consumer.tensors}
        missing = [name for name in call.outputs if name not in found]
        if missing or not found:
            raise InternalError(f"the worker sent no output {missing or 'at all'!r}; send the request again")
        return [found[name] for name in call.outputs] if call.outputs else list(found.values())

    async def _vectors(
        self, model: str, texts: Sequence[str], dimensions: int, envelope: Envelope, on_job: OnJob
    ) -> list[bytes]:
        def fill(request: worker_pb2.GenerateRequest, info: ModelInfoRecord) -> None:
            if dimensions > info.embedding_dim > 0:
                message = f"parameters.dimensions is {dimensions}; the model's vectors have {info.embedding_dim}"
                raise InvalidRequest(message, param="parameters.dimensions")
            task = request.pooling
            task.kind, task.dimensions, task.add_special_tokens = worker_pb2.POOLING_KIND_EMBED, dimensions, True
            task.inputs.extend(worker_pb2.PoolingInput(text=text) for text in texts)

        return await self._pool(model, "embed", fill, texts, envelope, on_job)

    async def _scores(
        self, model: str, pairs: Sequence[tuple[str, str]], envelope: Envelope, on_job: OnJob
    ) -> list[bytes]:
        def fill(request: worker_pb2.GenerateRequest, info: ModelInfoRecord) -> None:
            task = request.pooling
            task.kind, task.add_special_tokens = worker_pb2.POOLING_KIND_SCORE, True
            task.inputs.extend(worker_pb2.PoolingInput(text=first, pair=second) for first, second in pairs)

        return await self._pool(model, "score", fill, [first + second for first, second in pairs], envelope, on_job)

    async def _pool(
        self,
        model: str,
        task: str,
        fill: Callable[[worker_pb2.GenerateRequest, ModelInfoRecord], None],
        texts: Sequence[str],
        envelope: Envelope,
        on_job: OnJob,
    ) -> list[bytes]:
        num_tokens = sum(map(len, texts)) // _CHARS_PER_TOKEN
        job = await self._jobs.task(model, task, fill, [envelope.request_id], num_tokens, envelope)
        consumer = TaskConsumer()
        await self._run([job], [consumer], on_job)
        return consumer.vectors(len(texts))

    async def _run(self, jobs: Sequence[Job], consumers: Sequence[_RoutedConsumer], on_job: OnJob) -> None:
        on_job(jobs[0], consumers[0])
        with Admission(sum(map(tokens_of, jobs))) as admission:
            run = self._dispatcher.run
            await all_or_none([run(job, each, admission) for job, each in zip(jobs, consumers, strict=True)])

    async def run(self, job: Job, consumer: Consumer) -> None:
        """Runs the job of a stream.

        Raises:
            NaruError: it failed.
        """
        await self._dispatcher.run(job, consumer)

    def counted(self, model: str, envelope: Envelope) -> Count:
        """Counts a call when it ends, as served or failed."""
        return Count(self.repository, self.repository.entry_name(model, envelope.caller))


class Count:
    """One call that is counted. Mutable."""

    def __init__(self, repository: OipRepository, model: str) -> None:
        self._repository = repository
        self._model = model
        self._begin_s = time.perf_counter()
        self.num_inputs = 1
        """Texts, or rows of the batch."""

    def __enter__(self) -> Count:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        took_s = time.perf_counter() - self._begin_s
        if kind is None:
            self._repository.counts.served(self._model, self.num_inputs, took_s, time.time())
        elif issubclass(kind, (NaruError, asyncio.CancelledError)):
            self._repository.counts.failed(self._model, took_s)
