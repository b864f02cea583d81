"""Runs a call of many inputs as several jobs at once: vectors for texts, scores for pairs. All of it, or an error.

Used by the embedding, rerank and score endpoints. Copies of a model share the jobs, as each goes where it is cheapest.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from naru_proto.errors import InvalidRequest, NaruError, Unavailable
from naru_proto.registry import ModelInfoRecord
from naru_proto.v1 import worker_pb2
from naru_router.adapters.admission import Admission
from naru_router.adapters.http.generation import Exchange
from naru_router.adapters.http.task_consumer import TaskConsumer
from naru_router.adapters.together import all_or_none
from naru_router.core.completion_request import Prompt
from naru_router.core.embedding_request import EmbeddingCall, PoolingOptions, cut, size_of
from naru_router.core.model_tasks import check_task
from naru_router.core.rerank_request import Pair
from naru_router.core.usage import TokenUsage
from naru_router.core.vectors import FLOAT_BYTES, cosine, floats

BYTES_PER_TOKEN = 4
"""Of a text, about."""
MAX_MULTIPLICATIONS = 50_000
"""Between two turns of the event loop."""
KEY_CHARS = 64
TRUNCATE_FIELD = "truncate_prompt_tokens"
_INPUT = re.compile(r"inputs\[(\d{1,6})\](.*)", re.DOTALL)
_NUMBERED = re.compile(r"^input \d{1,6}: ")
_T = TypeVar("_T")


@dataclass(slots=True)
class Pooled:
    """What came of a call."""

    consumers: list[TaskConsumer] = field(default_factory=list)
    usage: TokenUsage = field(default_factory=TokenUsage)

    def add(self, consumer: TaskConsumer) -> None:
        """Takes a job's.

        Raises:
            Unavailable: another model has answered than for the jobs before: their numbers are not comparable.
        """
        first = self.consumers[0] if self.consumers else consumer
        if (consumer.answers_as, consumer.revision) != (first.answers_as, first.revision):
            raise Unavailable(
                "two models have answered parts of this call, as one gives way to the other; send it again"
            )
        self.consumers.append(consumer)
        self.usage += consumer.usage


async def embed(call: EmbeddingCall, exchange: Exchange, pooled: Pooled) -> list[bytes]:
    """A vector for each input, float32 in bytes.

    Raises:
        NaruError: the first job's that failed; the others are cancelled.
    """

    async def run(first: int, end: int) -> list[bytes]:
        inputs = call.inputs[first:end]

        def fill(request: worker_pb2.GenerateRequest, info: ModelInfoRecord) -> None:
            if info.embedding_dim and call.dimensions > info.embedding_dim:
                raise InvalidRequest(
                    f"dimensions is {call.dimensions}; the model {call.model!r} has {info.embedding_dim}",
                    param="dimensions",
                )
            task = request.pooling
            _fill(task, call.options, worker_pb2.POOLING_KIND_EMBED)
            task.dimensions = call.dimensions
            for prompt in inputs:
                _add(task, prompt)

        num_tokens = sum(map(_num_tokens, inputs))
        keys = str(inputs[0][:KEY_CHARS]), str(call.inputs[0][:KEY_CHARS])
        part = _Part(call.model, "embed", fill, keys, num_tokens, _renamed(lambda i: f"input[{first + i}]"))
        consumer = await _run(exchange, part, admission)
        pooled.add(consumer)
        return consumer.vectors(len(inputs))

    with Admission(sum(map(_num_tokens, call.inputs))) as admission:
        parts = await all_or_none([run(*bounds) for bounds in cut([size_of(prompt) for prompt in call.inputs])])
    return [vector for part in parts for vector in part]


async def score(
    model: str,
    pairs: Sequence[Pair],
    options: PoolingOptions,
    exchange: Exchange,
    pooled: Pooled,
    names: Callable[[int], str],
) -> list[float]:
    """A score for each pair: a cross-encoder's own, or the cosine of an embedding model's vectors.

    `names`: the field of the request that a pair comes from, for errors.

    Raises:
        NaruError: the first job's that failed; the others are cancelled.
    """

    async def run(first: int, end: int) -> list[float]:
        part = pairs[first:end]
        texts: dict[str, int] = {}
        for pair in part:
            for text in pair:
                texts.setdefault(text, len(texts))
        is_scorer = True

        def fill(request: worker_pb2.GenerateRequest, info: ModelInfoRecord) -> None:
            nonlocal is_scorer  # of the model that is asked in the end: another one may stand in
            is_scorer = "score" in info.tasks
            _fill_pairs(request.pooling, part, list(texts), options, model, info)

        num_tokens = sum(len(a) + len(b) for a, b in part) // BYTES_PER_TOKEN
        rename = _renamed(lambda i: names(first + i) if is_scorer else names(first + _pair_of(part, list(texts)[i])))
        keys = part[0][0][:KEY_CHARS], pairs[0][0][:KEY_CHARS]
        consumer = await _run(exchange, _Part(model, "", fill, keys, num_tokens, rename), admission)
        pooled.add(consumer)
        if is_scorer:
            return [_one(values, model) for values in consumer.vectors(len(part))]
        return await _cosines(part, texts, consumer.vectors(len(texts)))

    sizes = [len(a) + len(b) for a, b in pairs]
    with Admission(sum(sizes) // BYTES_PER_TOKEN) as admission:
        parts = await all_or_none([run(*bounds) for bounds in cut(sizes)])
    return [value for part in parts for value in part]


@dataclass(frozen=True, slots=True)
class _Part:
    """What one job is to do."""

    model: str
    task: str
    fill: Callable[[worker_pb2.GenerateRequest, ModelInfoRecord], None]
    keys: tuple[str, str]
    """What the job begins with, and what the whole call does."""
    num_tokens: int
    rename: Callable[[NaruError], None]


async def _run(exchange: Exchange, part: _Part, admission: Admission) -> TaskConsumer:
    edge, (key, call_key) = exchange.edge, part.keys
    job = await edge.jobs.task(part.model, part.task, part.fill, [key], part.num_tokens, exchange.envelope, [call_key])
    exchange.model = job.label
    consumer = TaskConsumer()
    try:
        await edge.dispatcher.run(job, consumer, admission)
    except NaruError as error:
        part.rename(error)
        raise
    return consumer


def _renamed(name: Callable[[int], str]) -> Callable[[NaruError], None]:
    """Makes an error that names the worker's n-th input name the request's field."""

    def rename(error: NaruError) -> None:
        match = _INPUT.fullmatch(error.param)
        if match is None:
            return
        error.param = name(int(match[1])) + match[2]
        told = _NUMBERED.sub("", error.message.replace(match[0], error.param))
        if told != error.message and error.param not in told:
            told = f"{error.param}: {told}"
        error.message = told.replace("truncate_tokens", TRUNCATE_FIELD)

    return rename


def _fill(task: worker_pb2.PoolingTask, options: PoolingOptions, kind: worker_pb2.PoolingKind) -> None:
    task.kind = kind
    task.truncate_tokens = options.truncate_tokens
    task.add_special_tokens = options.add_special_tokens
    if options.normalize is not None:
        task.normalize = options.normalize


def _fill_pairs(
    task: worker_pb2.PoolingTask,
    pairs: Sequence[Pair],
    texts: Sequence[str],
    options: PoolingOptions,
    model: str,
    info: ModelInfoRecord,
) -> None:
    if "score" in info.tasks:
        _fill(task, options, worker_pb2.POOLING_KIND_SCORE)
        for first, second in pairs:
            task.inputs.add(text=first, pair=second)
    elif "embed" in info.tasks:
        _fill(task, options, worker_pb2.POOLING_KIND_EMBED)
        for text in texts:
            task.inputs.add(text=text)
    else:
        check_task(model, info, "score")


def _add(task: worker_pb2.PoolingTask, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        task.inputs.add(text=prompt)
    else:
        task.inputs.add().token_ids.ids.extend(prompt)


def _num_tokens(prompt: Prompt) -> int:
    return len(prompt) // BYTES_PER_TOKEN + 1 if isinstance(prompt, str) else len(prompt)


def _pair_of(pairs: Sequence[Pair], text: str) -> int:
    return next(i for i, pair in enumerate(pairs) if text in pair)


def _one(values: bytes, model: str) -> float:
    if len(values) != FLOAT_BYTES:
        count = len(values) // FLOAT_BYTES
        raise InvalidRequest(
            f"the model {model!r} gives {count} numbers for a pair, not one score; name another model", param="model"
        )
    return floats(values)[0]


async def _cosines(pairs: Sequence[Pair], texts: dict[str, int], vectors: Sequence[bytes]) -> list[float]:
    numbers = [floats(values) for values in vectors]
    result, done = [], 0
    for first, second in pairs:
        result.append(cosine(numbers[texts[first]], numbers[texts[second]]))
        done += 3 * len(numbers[0])
        if done > MAX_MULTIPLICATIONS:
            done = 0
            await asyncio.sleep(0)
    return result
