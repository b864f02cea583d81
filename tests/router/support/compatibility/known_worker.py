"""The stub worker of the compatibility rows: three models, and an answer to every kind of request."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator

from naru_proto.registry import ModelInfoRecord, TensorRecord
from naru_proto.v1 import inference_pb2 as inf
from naru_proto.v1 import worker_pb2 as wire

CHAT, EMBEDDER, RANKER, DOUBLER = "smollm2", "minilm", "ranker", "doubler"
DIMENSION = 4
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FACTS = {
    CHAT: ModelInfoRecord(
        "llama", 2048, 49152, CHATML, "<s>", "</s>", tasks=("generate", "embed"), embedding_dim=DIMENSION
    ),
    EMBEDDER: ModelInfoRecord("bert", 256, 30522, "", "", "", tasks=("embed",), embedding_dim=DIMENSION),
    RANKER: ModelInfoRecord("bert", 256, 30522, "", "", "", tasks=("score",)),
    DOUBLER: ModelInfoRecord(
        "onnx", 0, 0, "", "", "", tasks=("tensors",), platform="onnxruntime", max_batch_size=8,
        inputs=(TensorRecord("x", "FP32", (4,)),), outputs=(TensorRecord("y", "FP32", (4,)),),
    ),
}  # fmt: skip
ANSWER = ("Paris", " is", " it.")
STOP = inf.FINISH_REASON_STOP


async def answer(request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
    """Three tokens for each choice; vectors, scores, tensors and tokens where those are asked for."""
    kind = request.WhichOneof("task")
    usage = inf.Usage(prompt_tokens=5, cached_tokens=2)
    if kind is None:
        n = request.sampling.n or 1
        for index in range(n):
            for number, text in enumerate(ANSWER):
                delta = wire.Delta(index=index, text=text, num_tokens=1, token_ids=[number + 7])
                if request.sampling.HasField("logprobs"):
                    _tell_logprob(delta.logprobs.add(), text, number + 7)
                yield delta
        usage.completion_tokens = n * len(ANSWER)
        for index in range(n):
            last = wire.Delta(index=index, finish_reason=STOP)
            if index == n - 1:
                last.usage.CopyFrom(usage)
                last.request_done = True
            yield last
        return
    delta = wire.Delta(finish_reason=STOP, request_done=True, usage=usage)
    if kind == "pooling":
        is_score = request.pooling.kind == wire.POOLING_KIND_SCORE
        size = 1 if is_score else request.pooling.dimensions or DIMENSION
        for index in range(len(request.pooling.inputs)):
            values = [0.5 + index] * size
            delta.vectors.add(index=index, values=struct.pack(f"<{size}f", *values), prompt_tokens=5)
    elif kind == "tensors":
        for tensor in request.tensors.inputs:
            numbers = struct.unpack(f"<{len(tensor.data) // 4}f", tensor.data)
            doubled = struct.pack(f"<{len(numbers)}f", *[2 * number + 1 for number in numbers])
            delta.tensors.add(name="y", datatype="FP32", shape=tensor.shape, data=doubled)
    elif request.tokenize.WhichOneof("from") == "text":
        delta.tokenized.token_ids.extend(range(len(request.tokenize.text.split())))
        delta.tokenized.texts.extend(request.tokenize.text.split())
    else:
        delta.tokenized.text = " ".join(f"t{number}" for number in request.tokenize.token_ids.ids)
    yield delta


def _tell_logprob(position: inf.PositionLogprobs, text: str, token_id: int) -> None:
    position.chosen.CopyFrom(inf.TokenLogprob(token_id=token_id, token=text, bytes=text.encode(), logprob=-0.5, rank=1))
    position.top.add().CopyFrom(position.chosen)
