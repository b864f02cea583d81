"""Collects what a task's job brings: vectors, scores, tensors or tokens, and the usage. Made by the task endpoints.

Says nothing to a client by itself, so that an attempt that is lost starts over unseen.
"""

from __future__ import annotations

from collections.abc import Sequence

from naru_proto.errors import InternalError
from naru_proto.v1.worker_pb2 import Delta, PooledVector, Tensor, Tokenized
from naru_router.core.routing.model import Decision
from naru_router.core.usage import TokenUsage


class TaskConsumer:
    """Of one job. Mutable."""

    has_sent = False

    def __init__(self) -> None:
        self.decision: Decision | None = None
        self.answers_as = ""
        self._clear()

    def _clear(self) -> None:
        self._vectors: dict[int, PooledVector] = {}
        self.tensors: list[Tensor] = []
        self._tokenized: Tokenized | None = None
        self.usage = TokenUsage()
        """All zero until the last delta."""
        self.revision = ""
        self._is_done = False

    def begin(self, decision: Decision, answers_as: str) -> None:
        """Starts over."""
        self._clear()
        self.decision, self.answers_as = decision, answers_as

    def feed(self, deltas: Sequence[Delta]) -> None:
        """Adds what they hold."""
        for delta in deltas:
            for vector in delta.vectors:
                self._vectors[vector.index] = vector
            self.tensors.extend(delta.tensors)
            if delta.HasField("tokenized"):
                self._tokenized = delta.tokenized
            if delta.HasField("usage"):
                self.usage = TokenUsage.from_wire(delta.usage)
            if delta.revision:
                self.revision = delta.revision
            self._is_done = self._is_done or delta.request_done

    def vectors(self, num_inputs: int) -> list[bytes]:
        """float32, little-endian, of each input in order.

        Raises:
            InternalError: the worker has left one out, or none is whole.
        """
        try:
            found = [self._vectors[i].values for i in range(num_inputs)]
        except KeyError as exc:
            raise InternalError(f"the worker sent no vector for input {exc.args[0]} of {num_inputs}") from exc
        width = len(found[0]) if found else 4
        if not width or width % 4 or any(len(values) != width for values in found):
            raise InternalError("the worker sent vectors of unequal or broken lengths")
        return found

    def prompt_tokens(self, index: int) -> int:
        """That were computed for one input; 0 where it was not told."""
        vector = self._vectors.get(index)
        return 0 if vector is None else vector.prompt_tokens

    def tokenized(self) -> Tokenized:
        """What a tokenize task brought.

        Raises:
            InternalError: nothing.
        """
        if self._tokenized is None:
            raise InternalError("the worker ended a tokenize task without its tokens")
        return self._tokenized
