"""Whether a model can do what a request asks of it. Pure; called where jobs are made."""

from __future__ import annotations

from naru_proto.errors import InvalidRequest
from naru_proto.registry import ModelInfoRecord

_DOES = {
    "generate": "generates text",
    "embed": "makes vectors",
    "score": "scores pairs of texts",
    "tensors": "computes tensors",
}


def check_task(name: str, info: ModelInfoRecord, task: str) -> None:
    """Passes or raises; `task` as in ModelInfoRecord.tasks, empty: any model can do it.

    Raises:
        InvalidRequest: the model cannot.
    """
    if task and task not in info.tasks:
        does = " and ".join(_DOES.get(each, each) for each in info.tasks)
        raise InvalidRequest(
            f"the model {name!r} {does}, and this request needs one that {_DOES[task]}; GET /v1/models tells of each",
            param="model",
        )
