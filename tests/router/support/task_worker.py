"""Scripts of stub workers that make vectors, scores and tokens; what they make can be computed by the test as well."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import AsyncIterator

from naru_proto.registry import ModelInfoRecord
from naru_proto.v1 import inference_pb2 as inf
from naru_proto.v1 import worker_pb2 as wire

DIMENSION = 8
EMBEDDER = ModelInfoRecord("bert", 512, 30522, "", "", "", tasks=("embed",), embedding_dim=DIMENSION)
SCORER = ModelInfoRecord("bert", 512, 30522, "", "", "", tasks=("score",))
STOP = inf.FINISH_REASON_STOP


def text_of(item: wire.PoolingInput) -> str:
    """What stands for an input."""
    return item.text if item.WhichOneof("first") == "text" else str(list(item.token_ids.ids))


def vector_of(text: str, dimensions: int = 0) -> list[float]:
    """Numbers that float32 holds exactly, another list for each text."""
    digest = hashlib.sha256(text.encode()).digest()
    return [digest[i] / 256 - 0.5 for i in range(dimensions or DIMENSION)]


def score_of(first: str, second: str) -> float:
    """A score that float32 holds exactly: how many words of the query the document has."""
    words = first.split()
    return sum(word in second.split() for word in words) / 16


async def pool(request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
    """Vectors or scores, each in a delta of its own, last input first; 3 tokens an input."""
    task = request.pooling
    count = len(task.inputs)
    for index in reversed(range(count)):
        item = task.inputs[index]
        if task.kind == wire.POOLING_KIND_SCORE:
            values = [score_of(item.text, item.pair)]
        else:
            values = vector_of(text_of(item), task.dimensions)
        delta = wire.Delta()
        delta.vectors.add(index=index, values=struct.pack(f"<{len(values)}f", *values), prompt_tokens=3)
        if index == 0:
            delta.usage.CopyFrom(inf.Usage(prompt_tokens=3 * count))
            delta.finish_reason, delta.request_done = STOP, True
        yield delta


async def tokenize(request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
    """A token for each word, its id the word's length; 1 is the special token. Back: as many x as the id says."""
    delta = wire.Delta(finish_reason=STOP, request_done=True, usage=inf.Usage())
    task = request.tokenize
    if task.WhichOneof("from") == "text":
        words = task.text.split()
        delta.tokenized.token_ids.extend([1] * task.add_special_tokens + [len(word) for word in words])
        if task.with_texts:
            delta.tokenized.texts.extend(["<s>"] * task.add_special_tokens + words)
    else:
        delta.tokenized.text = " ".join("x" * number for number in task.token_ids.ids)
    yield delta
