"""The seven conditions of a ModelDeployment, each a function of one summary. Pure.

Messages hold no numbers that a load in progress moves: conditions change when something is decided or has happened.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from naru_operator.core.models.facts import CopyFact, ModelFacts
from naru_operator.core.models.model import Verdict
from naru_proto.crd.metadata import Condition, ConditionStatus
from naru_proto.crd.model_status import ModelDeploymentStatus
from naru_proto.crd.units import timestamp_of

MAX_MESSAGE_LENGTH = 1024
_MAX_NAMES = 8
_PASSWORD = re.compile(r"//[^/@\s]*:[^/@\s]*@")
_CACHED = ("host", "loading", "ready", "active", "draining")
"""States that a model reaches after its files."""


@dataclass(frozen=True, slots=True)
class Told:
    """A condition but for its times."""

    type: str
    status: ConditionStatus
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Summary:
    """One ModelDeployment at one moment, as its status tells it."""

    verdict: Verdict
    facts: ModelFacts

    @property
    def serving(self) -> str:
        """Digest of the revision whose copies answer requests."""
        return self.verdict.current or self.verdict.update

    def copies_of(self, digest: str) -> tuple[CopyFact, ...]:
        """Copies of one revision, by worker."""
        return tuple(copy for copy in self.facts.copies if copy.digest == digest)

    @property
    def num_ready(self) -> int:
        """Copies that answer requests."""
        return sum(copy.takes_requests for copy in self.copies_of(self.serving))

    @property
    def failure(self) -> tuple[str | None, str]:
        """Worker (None: not known) and words of the first failure, of the wanted revision first; ('', '') for none."""
        failed = [copy for copy in self.copies_of(self.verdict.update) if copy.is_failed]
        failed += [copy for copy in self.copies_of(self.verdict.current) if copy.is_failed]
        if failed:
            return failed[0].worker_id, failed[0].resident.error or "no reason given"
        return None, self.facts.failed

    def states(self, digest: str) -> set[str]:
        """States of a revision's copies."""
        return {copy.resident.state for copy in self.copies_of(digest)}


def conditions(
    summary: Summary, previous: ModelDeploymentStatus, *, generation: int | None, now_s: int
) -> tuple[Condition, ...]:
    """All of them; a time moves only with its condition's status."""
    before = {each.type: each for each in previous.conditions}
    return tuple(_dated(told, before.get(told.type), generation, now_s) for told in _tell(summary, previous))


def clean(message: str, max_length: int = MAX_MESSAGE_LENGTH) -> str:
    """A message without passwords of URLs, cut to its length."""
    text = _PASSWORD.sub("//***@", message)
    return text if len(text) <= max_length else text[: max_length - 1] + "…"


def _tell(summary: Summary, previous: ModelDeploymentStatus) -> Iterable[Told]:
    verdict = summary.verdict
    loaded = _loaded(summary)
    yield Told("Accepted", "True" if verdict.is_accepted else "False", verdict.reason, verdict.message)
    yield _placed(verdict)
    yield _weights_cached(summary, previous)
    yield loaded
    yield _available(summary, loaded)
    is_going = verdict.is_accepted and not verdict.has_rollout_failed
    yield Told("Progressing", "True" if is_going else "False", verdict.rollout_reason, verdict.rollout_message)
    yield _degraded(summary)


def _dated(told: Told, before: Condition | None, generation: int | None, now_s: int) -> Condition:
    is_same = before is not None and before.status == told.status
    return Condition.model_construct(
        type=told.type,
        status=told.status,
        reason=told.reason or "Unknown",
        message=clean(told.message),
        last_transition_time=before.last_transition_time if before is not None and is_same else timestamp_of(now_s),
        observed_generation=generation,
    )


def _placed(verdict: Verdict) -> Told:
    placed = verdict.placed_on
    pools = _shown(verdict.pools)
    if not verdict.is_accepted:
        return Told("Placed", "False", "NotAccepted", "it is not accepted")
    if not placed:
        return Told("Placed", "False", "NoWorker", f"no worker of the pools {pools} takes models now")
    if verdict.is_on_demand:
        return Told("Placed", "True", "KnownToWorkers", f"{_shown(placed)} load it for the first request")
    if len(placed) < verdict.num_desired and verdict.rollout_reason != "RevisionFailed":
        message = (
            f"{len(placed)} of {verdict.num_desired} copies have a worker, one each: {_shown(placed)}; add workers to "
            f"the pools {pools} or lower replicas.min"
        )
        return Told("Placed", "False", "TooFewWorkers", message)
    return Told("Placed", "True", "Placed", f"on {_shown(placed)}")


def _weights_cached(summary: Summary, previous: ModelDeploymentStatus) -> Told:
    update = summary.verdict.update
    states = summary.states(update)
    if states & set(_CACHED):
        return Told("WeightsCached", "True", "Cached", "a worker has the files")
    before = next((each for each in previous.conditions if each.type == "WeightsCached"), None)
    if before is not None and before.status == "True" and previous.update_revision == update:
        return Told("WeightsCached", "True", "Cached", "a worker had the files")
    if "fetching" in states:
        return Told("WeightsCached", "False", "Fetching", "the files are being fetched")
    if "failed" in states or summary.facts.failed:
        return Told("WeightsCached", "Unknown", "LoadFailed", "the load failed; see Loaded")
    return Told("WeightsCached", "False", "NotFetched", "no worker has fetched the files yet")


def _loaded(summary: Summary) -> Told:
    verdict, update = summary.verdict, summary.verdict.update
    if not verdict.is_accepted:
        return Told("Loaded", "False", "NotAccepted", "it is not accepted")
    ready = [copy.worker_id for copy in summary.copies_of(update) if copy.takes_requests]
    if len(ready) >= (1 if verdict.is_on_demand else max(1, verdict.num_desired)):
        return Told("Loaded", "True", "Loaded", f"revision {update} is loaded on {_shown(ready)}")
    return Told("Loaded", "False", *_why_not_loaded(summary, len(ready)))


def _why_not_loaded(summary: Summary, num_ready: int) -> tuple[str, str]:
    verdict, update = summary.verdict, summary.verdict.update
    states = summary.states(update)
    worker_id, words = summary.failure
    if words:
        return "LoadFailed", f"{worker_id}: {words}" if worker_id else words
    for state, reason in (("loading", "Loading"), ("fetching", "Fetching")):
        if state in states:
            return reason, f"revision {update} is on its way into memory"
    if not verdict.placed_on:
        return "NoWorker", "no worker takes it now"
    if verdict.is_on_demand:
        return "NotAskedFor", "the next request loads it"
    if summary.facts.num_known or "host" in states:
        return "Evicted", "its memory was needed; the next request loads it"
    return "Waiting", f"{num_ready} of {verdict.num_desired} copies are loaded"


def _available(summary: Summary, loaded: Told) -> Told:
    verdict = summary.verdict
    if summary.num_ready:
        copies = f"{summary.num_ready} copies of revision {summary.serving} take requests"
        return Told("Available", "True", "Serving", copies)
    if loaded.reason in ("NotAskedFor", "Evicted"):
        return Told("Available", "True", "LoadsOnRequest", loaded.message)
    if verdict.is_on_demand and loaded.reason in ("Loading", "Fetching"):
        return Told("Available", "True", "LoadsOnRequest", "requests wait for its load")
    return Told("Available", "False", loaded.reason, loaded.message or "no copy takes requests")


def _degraded(summary: Summary) -> Told:
    verdict = summary.verdict
    if not verdict.is_accepted:
        if summary.num_ready:
            message = f"the spec is refused ({verdict.reason}); revision {summary.serving} goes on serving"
            return Told("Degraded", "True", "SpecRefused", message)
        return Told("Degraded", "False", "NotAccepted", "nothing of it is served")
    if verdict.has_rollout_failed:
        return Told("Degraded", "True", verdict.rollout_reason, verdict.rollout_message)
    worker_id, words = summary.failure
    if words:
        return Told("Degraded", "True", "LoadFailed", f"{worker_id}: {words}" if worker_id else words)
    if verdict.rollout_reason == "RolloutComplete" and not verdict.is_on_demand:
        if summary.num_ready < verdict.num_desired:
            message = f"{summary.num_ready} of {verdict.num_desired} copies take requests"
            return Told("Degraded", "True", "TooFewCopies", message)
    return Told("Degraded", "False", "AsAskedFor", "nothing is missing")


def _shown(items: Iterable[str]) -> str:
    items = list(items)
    more = f" and {len(items) - _MAX_NAMES} more" if len(items) > _MAX_NAMES else ""
    return ", ".join(repr(item) for item in items[:_MAX_NAMES]) + more
