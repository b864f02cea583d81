"""What the hub wants done. The shell carries actions out in order and reports each one's result with its attempt.

At most one operation per model is under way: Fetch, RaiseToHost, Load, Drain, Unload or DropHost. Stop aims at it.
"""

from __future__ import annotations

from dataclasses import dataclass

from naru_worker.core.residency import ModelState


@dataclass(frozen=True, slots=True)
class Fetch:
    """Get the files and pack them, unless the node has the image. Result: Fetched, Failed or Stopped."""

    model: str
    attempt: int


@dataclass(frozen=True, slots=True)
class RaiseToHost:
    """Bring the image into host memory. Result: HostReached, Failed or Stopped."""

    model: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Load:
    """Book `num_bytes`, load, and serve. Result: Loaded, NoRoom, Failed or Stopped."""

    model: str
    attempt: int
    num_bytes: int
    """Weights unless shared, KV floor, private bytes, and what the workspace must grow by."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the operation under way as soon as may be. Result: Stopped, or the operation's own if it was faster."""

    model: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Drain:
    """No further request reaches the engine; they are held. Result: Drained."""

    model: str
    attempt: int
    timeout_s: float | None
    """Seconds after which running requests are ended with an error; None: they may take as long as they need."""


@dataclass(frozen=True, slots=True)
class Unload:
    """Take the drained model out of the engine. Result: Unloaded."""

    model: str
    attempt: int
    keep_host: bool
    """Keep the image in host memory."""


@dataclass(frozen=True, slots=True)
class DropHost:
    """Let the image go from host memory. Result: HostDropped."""

    model: str
    attempt: int


@dataclass(frozen=True, slots=True)
class TrimKV:
    """Give up cached prefixes of a model until `num_bytes` have come back or none is left. Result: KVChanged."""

    model: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RejectHeld:
    """End the requests that wait for the model: it will not come up for them."""

    model: str
    reason: str
    retry_s: float
    """When trying again may help; 0: it will not."""


@dataclass(frozen=True, slots=True)
class Changed:
    """A model changed its state: to be told to whoever follows it. No result."""

    model: str
    old: ModelState
    new: ModelState
    reason: str
    is_eviction: bool = False


Action = Fetch | RaiseToHost | Load | Stop | Drain | Unload | DropHost | TrimKV | RejectHeld | Changed
