"""Collects a job's output for a client that waits for all of it. Used by the Responses and Messages endpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from naru_proto.v1.worker_pb2 import Delta
from naru_router.core.routing.model import Decision


class Collector(Protocol):
    """Takes deltas, and makes an answer of them."""

    def take(self, deltas: Sequence[Delta]) -> object:
        """Adds the deltas."""


_C = TypeVar("_C", bound=Collector)


class WholeConsumer(Generic[_C]):
    """Of one job. Says nothing to the client, so that an attempt that is lost starts over unseen."""

    has_sent = False

    def __init__(self, make: Callable[[], _C]) -> None:
        """`make`: what an attempt's output is collected in."""
        self._make = make
        self.collected = make()
        self.decision: Decision | None = None
        self.answers_as = ""

    def begin(self, decision: Decision, answers_as: str) -> None:
        """Starts over."""
        self.collected = self._make()
        self.decision, self.answers_as = decision, answers_as

    def feed(self, deltas: Sequence[Delta]) -> None:
        """Adds the deltas."""
        self.collected.take(deltas)
