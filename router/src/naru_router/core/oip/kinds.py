"""What a model takes and gives in the words of the protocol: its kind, its tensors, its metadata and configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from naru_proto.errors import InvalidRequest, ModelNotFound
from naru_proto.registry import ModelInfoRecord, TensorRecord
from naru_router.core.oip.datatypes import BYTES
from naru_router.core.oip.tensors import full_shape

VERSION = "1"
"""Of every model: its revisions are not the protocol's versions."""
MAX_TEXTS = 256
"""Most texts of one request."""

Kind = Literal["tensors", "generate", "embed", "score"]
"""Which of its tasks a model does over this protocol: the first one of these."""

TEXT_INPUT = TensorRecord("text_input", BYTES, (-1,))
TEXT_OPTIONS = (
    TensorRecord("stream", "BOOL", (1,)),
    TensorRecord("exclude_input_in_output", "BOOL", (1,)),
    TensorRecord("max_tokens", "INT32", (1,)),
    TensorRecord("min_tokens", "INT32", (1,)),
    TensorRecord("temperature", "FP32", (1,)),
    TensorRecord("top_p", "FP32", (1,)),
    TensorRecord("top_k", "INT32", (1,)),
    TensorRecord("min_p", "FP32", (1,)),
    TensorRecord("repetition_penalty", "FP32", (1,)),
    TensorRecord("presence_penalty", "FP32", (1,)),
    TensorRecord("frequency_penalty", "FP32", (1,)),
    TensorRecord("seed", "UINT64", (1,)),
    TensorRecord("ignore_eos", "BOOL", (1,)),
    TensorRecord("stop_words", BYTES, (-1,)),
    TensorRecord("sampling_parameters", BYTES, (1,)),
)
TEXT_OUTPUTS = (
    TensorRecord("text_output", BYTES, (-1,)),
    TensorRecord("finish_reason", BYTES, (-1,)),
    TensorRecord("prompt_tokens", "INT32", (-1,)),
    TensorRecord("completion_tokens", "INT32", (-1,)),
)
TEXT = TensorRecord("text", BYTES, (-1,))
TEXT_PAIR = TensorRecord("text_pair", BYTES, (-1,))
EMBEDDING = "embedding"
SCORE = TensorRecord("score", "FP32", (-1,))


@dataclass(frozen=True, slots=True)
class Card:
    """What is told of a model."""

    name: str
    kind: Kind
    platform: str
    inputs: tuple[TensorRecord, ...]
    optional: tuple[TensorRecord, ...]
    """Inputs that may be left out."""
    outputs: tuple[TensorRecord, ...]
    max_batch_size: int
    """0: the shapes are whole; else they have no batch yet."""

    @property
    def is_decoupled(self) -> bool:
        """Whether one request may have many responses."""
        return self.kind == "generate"

    def metadata(self) -> dict[str, object]:
        """The protocol's object."""
        return {
            "name": self.name,
            "versions": [VERSION],
            "platform": self.platform,
            "inputs": [self._tensor(each) for each in (*self.inputs, *self.optional)],
            "outputs": [self._tensor(each) for each in self.outputs],
        }

    def config(self) -> dict[str, object]:
        """Triton's object, as far as it makes sense here."""
        inputs: list[dict[str, object]] = [_configured(each) for each in self.inputs]
        inputs += [{**_configured(each), "optional": True} for each in self.optional]
        return {
            "name": self.name,
            "platform": self.platform,
            "backend": self.platform,
            "max_batch_size": self.max_batch_size,
            "input": inputs,
            "output": [_configured(each) for each in self.outputs],
            "model_transaction_policy": {"decoupled": self.is_decoupled},
        }

    def _tensor(self, record: TensorRecord) -> dict[str, object]:
        shape = list(full_shape(record, self.max_batch_size))
        return {"name": record.name, "datatype": record.datatype, "shape": shape}


def data_type(datatype: str) -> str:
    """Triton's name of a datatype in configurations."""
    return "TYPE_STRING" if datatype == BYTES else f"TYPE_{datatype}"


def _configured(record: TensorRecord) -> dict[str, object]:
    return {"name": record.name, "data_type": data_type(record.datatype), "dims": list(record.shape)}


def card_of(name: str, info: ModelInfoRecord) -> Card:
    """The card of a model.

    Raises:
        InvalidRequest: it can do nothing that the protocol has words for.
    """
    platform, tasks = info.platform, info.tasks
    if "tensors" in tasks:
        return Card(name, "tensors", platform, info.inputs, (), info.outputs, info.max_batch_size)
    if "generate" in tasks:
        return Card(name, "generate", platform, (TEXT_INPUT,), TEXT_OPTIONS, TEXT_OUTPUTS, 0)
    if "embed" in tasks:
        vector = TensorRecord(EMBEDDING, "FP32", (-1, info.embedding_dim or -1))
        return Card(name, "embed", platform, (TEXT,), (), (vector,), 0)
    if "score" in tasks:
        return Card(name, "score", platform, (TEXT, TEXT_PAIR), (), (SCORE,), 0)
    can = " and ".join(tasks) or "nothing"
    raise InvalidRequest(f"the model {name!r} can {can}, which this protocol has no words for", param="model")


def check_version(name: str, version: str) -> None:
    """Checks that a model has a version; the empty one is the one there is.

    Raises:
        ModelNotFound: it has not.
    """
    if version not in ("", VERSION):
        message = f"the model {name[:200]!r} has no version {version[:40]!r}; it has version {VERSION} alone"
        raise ModelNotFound(message, param="model_version")
