"""Where a model comes up, and what the load desk needs of Redis and of the workers to have it brought up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from naru_proto.registry import LeaseRecord
from naru_proto.v1 import worker_pb2

Choose = Callable[[frozenset[str]], str | None]
"""The worker that is to load the model, none of those named; None: there is none."""


class LoadLeases(Protocol):
    """Leases in Redis, under this router's name. All raise Unavailable when Redis does not answer."""

    async def take(self, key: str, ttl_s: float, worker_id: str = "") -> LeaseRecord | None:
        """Takes a lease that nobody holds."""

    async def read(self, key: str) -> LeaseRecord | None:
        """Who holds it."""

    async def renew(self, key: str, record: LeaseRecord, ttl_s: float) -> bool:
        """Lets it last longer; False: lost."""

    async def release(self, key: str, record: LeaseRecord) -> bool:
        """Ends it."""


class LoadWorkers(Protocol):
    """What the desk sees of the workers."""

    async def move(self, worker_id: str, request: worker_pb2.MoveRequest, timeout_s: float) -> worker_pb2.MoveReply:
        """Tells a worker.

        Raises:
            NaruError: its refusal; Unavailable where it does not answer, InternalError where it knows no such command.
        """

    def can_load(self, worker_id: str, model: str) -> bool:
        """Whether it has a lease and a stream to this router, takes requests, and did not say it lacks the model."""

    def state(self, worker_id: str, model: str) -> str:
        """Of a model on a worker, by its lease; empty: not shown."""

    def is_served(self, model: str) -> bool:
        """Whether some worker that can be reached has the model ready."""

    def mark_unknown(self, worker_id: str, model: str) -> None:
        """The worker said that it does not know the model."""

    async def changed(self, timeout_s: float) -> None:
        """Returns at the next change of any of this, or after the time."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where a model comes up."""

    worker_id: str
    why: str
    began_s: float
    """When this router learned of it, on its clock."""
    eta_s: float = 0.0
    """What the load was to take from then on, by the worker's word; 0: not told."""
