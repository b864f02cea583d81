"""What of a task can be told from its message alone: that it is whole, within the limits, and what it will cost.

Called before anything is done for the request.
"""

from __future__ import annotations

from naru_proto.errors import InvalidRequest
from naru_proto.v1 import worker_pb2

MAX_INPUTS = 2048
"""Of one pooling task."""
MAX_TENSORS = 256
"""Of one call, inputs and wanted outputs each."""
MAX_TEXT_CHARS = 4 << 20
"""That are tokenized for the tokens' sake: about a million of them."""
MAX_TOKEN_IDS = 1 << 20
"""That are turned into text."""
_BYTES_PER_TOKEN = 4
"""Of text, about, before it is tokenized."""


def check_task(message: worker_pb2.GenerateRequest) -> None:
    """Passes or raises; a message without a task passes.

    Raises:
        InvalidRequest: a field is missing, out of range or does not go with the others.
    """
    task = message.WhichOneof("task")
    if task is None:
        return
    if message.WhichOneof("prompt") is not None or message.prior:
        raise InvalidRequest("the request has a task and a prompt; send one of them", param="prompt")
    if task == "pooling":
        _check_pooling(message.pooling)
    elif task == "tensors":
        _check_tensors(message.tensors)
    else:
        _check_tokenize(message.tokenize)


def task_tokens(message: worker_pb2.GenerateRequest) -> int:
    """What a task costs, about: tokens, or rows of tensors; at least 1."""
    task = message.WhichOneof("task")
    if task == "pooling":
        return max(1, sum(_input_tokens(each) for each in message.pooling.inputs))
    if task == "tensors":
        first = message.tensors.inputs[0].shape
        return min(max(1, first[0] if first else 1), 1 << 20)
    return 1


def num_text_chars(message: worker_pb2.GenerateRequest) -> int:
    """Characters that are to be tokenized."""
    task = message.WhichOneof("task")
    if task == "pooling":
        return sum(len(each.text) + len(each.pair) for each in message.pooling.inputs)
    # Ids take as long as so much text.
    return len(message.tokenize.text) + _BYTES_PER_TOKEN * len(message.tokenize.token_ids.ids)


def _input_tokens(each: worker_pb2.PoolingInput) -> int:
    return len(each.token_ids.ids) + (len(each.text) + len(each.pair)) // _BYTES_PER_TOKEN


def _check_pooling(task: worker_pb2.PoolingTask) -> None:
    if task.kind not in (worker_pb2.POOLING_KIND_EMBED, worker_pb2.POOLING_KIND_SCORE):
        raise InvalidRequest(f"kind is {task.kind}; it must be EMBED (1) or SCORE (2)", param="kind")
    is_score = task.kind == worker_pb2.POOLING_KIND_SCORE
    if not 1 <= len(task.inputs) <= MAX_INPUTS:
        raise InvalidRequest(f"there are {len(task.inputs)} inputs; send 1 to {MAX_INPUTS}", param="inputs")
    for index, each in enumerate(task.inputs):
        first = each.WhichOneof("first")
        if first is None:
            raise InvalidRequest(f"input {index} is empty; set text or token_ids", param=f"inputs[{index}]")
        if is_score and first != "text":
            raise InvalidRequest(
                f"input {index} has token ids; only pairs of texts get a score", param=f"inputs[{index}]"
            )
        if not is_score and each.pair:
            raise InvalidRequest(f"input {index} is a pair; only single texts get a vector", param=f"inputs[{index}]")
    if task.dimensions < 0 or (is_score and task.dimensions):
        raise InvalidRequest(
            f"dimensions is {task.dimensions}; it must be at least 0, and 0 for scores", param="dimensions"
        )
    if task.truncate_tokens < -1:
        raise InvalidRequest(
            f"truncate_tokens is {task.truncate_tokens}; it must be at least 1, or -1 for the model's limit, or 0 for "
            "none",
            param="truncate_tokens",
        )


def _check_tensors(task: worker_pb2.TensorTask) -> None:
    for what, names in (("inputs", [each.name for each in task.inputs]), ("outputs", list(task.outputs))):
        if len(names) > MAX_TENSORS:
            raise InvalidRequest(f"there are {len(names)} {what}; at most {MAX_TENSORS} are allowed", param=what)
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise InvalidRequest(f"{what} names {twice[:80]!r} twice; name each tensor once", param=what)
    if not task.inputs:
        raise InvalidRequest("there are no inputs; send the model's input tensors", param="inputs")


def _check_tokenize(task: worker_pb2.TokenizeTask) -> None:
    if task.WhichOneof("from") is None:
        raise InvalidRequest("there is nothing to tokenize; set text or token_ids", param="text")
    if len(task.text) > MAX_TEXT_CHARS:
        raise InvalidRequest(
            f"text has {len(task.text)} characters; at most {MAX_TEXT_CHARS} are tokenized at once", param="text"
        )
    if len(task.token_ids.ids) > MAX_TOKEN_IDS:
        raise InvalidRequest(
            f"token_ids has {len(task.token_ids.ids)} items; at most {MAX_TOKEN_IDS} are turned into text at once",
            param="token_ids",
        )
