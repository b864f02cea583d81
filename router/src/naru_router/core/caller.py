"""Who sends a request: a tenant with its share, or nobody in particular where no tenants are set up.

Made by the edges of the request's key, carried by the job, read by routing, waiting, quotas and the worker.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Caller:
    """One request's sender."""

    tenant: str = ""
    """Empty: nobody in particular; all such callers share caches and turns."""
    weight: float = 1.0
    """Its share beside other tenants where they compete; above 0."""
    salt: bytes = b""
    """Of its prefix caches; empty for nobody in particular. Never told to anyone."""
    top_priority: int = 0
    """The lowest number, which is the soonest turn, that it may ask for."""
    models: tuple[str, ...] = ()
    """Patterns of the models it may use (see naru_proto.tenants.matches); empty: all."""


ANYONE = Caller()
