"""A call of a model: what came with an infer request, over HTTP or gRPC, checked but for what the model takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from naru_proto.errors import InvalidRequest
from naru_proto.v1.worker_pb2 import Tensor
from naru_router.core.envelope import MAX_TIMEOUT_S, Envelope
from naru_router.core.fields import check_integer, check_text, refuse, shown

MAX_ID_CHARS = 256
MAX_TENSORS = 256
"""Inputs, or outputs, of one request."""
MAX_INPUT_BYTES = 24 * 1024 * 1024
"""Of all inputs: JSON and messages can be far shorter than what they mean, and a worker takes 32 MiB at once."""
_MICROSECONDS = 1_000_000
_SHARED_MEMORY = "shared_memory_region"


@dataclass(frozen=True, slots=True)
class InferCall:
    """Of one model."""

    model: str
    version: str
    call_id: str
    """Comes back with the reply; may be empty."""
    inputs: tuple[Tensor, ...]
    """With their data."""
    outputs: tuple[str, ...]
    """Names; none: all."""
    parameters: Mapping[str, object] = field(default_factory=dict)
    """JSON values by name."""

    def envelope(self, envelope: Envelope) -> Envelope:
        """The envelope of the call, ended sooner where its parameters say so."""
        timeout = self.parameters.get("timeout")
        if timeout is None or timeout == 0:
            return envelope
        most = int(MAX_TIMEOUT_S * _MICROSECONDS)
        timeout_s = check_integer("parameters.timeout", timeout, 1, most) / _MICROSECONDS
        if 0 < envelope.timeout_s <= timeout_s:
            return envelope
        return dataclasses.replace(envelope, timeout_s=timeout_s)


def check_call_id(value: object) -> str:
    """The value as an id of a request.

    Raises:
        InvalidRequest: it is none.
    """
    text = check_text("id", value)
    if len(text) > MAX_ID_CHARS:
        raise InvalidRequest(f"id has {len(text)} characters; at most {MAX_ID_CHARS} are allowed", param="id")
    return text


def check_parameters(parameters: Mapping[str, object]) -> None:
    """Refuses what would change the answer and is not built; other unknown parameters have no effect.

    Raises:
        InvalidRequest: naming the parameter.
    """
    if parameters.get("sequence_id") not in (None, 0, ""):
        raise InvalidRequest(
            "parameters.sequence_id is set; models here keep no state between requests: leave it out",
            param="parameters.sequence_id",
        )
    if parameters.get("priority") not in (None, 0):
        value = shown(parameters["priority"])
        message = f"parameters.priority is {value}; send the header x-naru-priority, lower is sooner"
        raise InvalidRequest(message, param="parameters.priority")


def check_tensor_parameters(path: str, parameters: Mapping[str, object]) -> None:
    """Refuses what would change an input or output and is not built.

    Raises:
        InvalidRequest: naming the parameter.
    """
    if parameters.get(_SHARED_MEMORY) is not None:
        message = f"{path} is in shared memory, which routers cannot reach; send the data with the request"
        raise InvalidRequest(message, param=f"{path}.parameters.{_SHARED_MEMORY}")
    if parameters.get("classification") not in (None, 0):
        message = f"{path} asks for classification, which is not built; take the whole tensor"
        raise InvalidRequest(message, param=f"{path}.parameters.classification")


def check_count(name: str, items: Sequence[object]) -> None:
    """Checks how many inputs or outputs there are.

    Raises:
        InvalidRequest: too many.
    """
    if len(items) > MAX_TENSORS:
        refuse(name, list(items), f"an array of at most {MAX_TENSORS}")


def check_size(inputs: Sequence[Tensor]) -> None:
    """Checks how much the inputs hold together.

    Raises:
        InvalidRequest: more than a worker takes.
    """
    num_bytes = sum(len(tensor.data) for tensor in inputs)
    if num_bytes > MAX_INPUT_BYTES:
        message = f"the inputs hold {num_bytes} bytes; at most {MAX_INPUT_BYTES} are taken: send smaller batches"
        raise InvalidRequest(message, param="inputs")
