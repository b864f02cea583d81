"""How a model stands, for people and the route map: its state, how far its operation is, and what is left of it."""

from __future__ import annotations

from dataclasses import replace

from naru_proto.errors import LoadError
from naru_worker.adapters.engine.resident import Progress, Resident
from naru_worker.adapters.weights.watched_checkpoint import OnShare
from naru_worker.core.hub.hub import Hub
from naru_worker.core.residency import ModelState

PACE_S = 5.0
PACE_SHARE = 0.05
"""After either of them the pace of a fetch is known: its first bytes alone come late, and would tell of hours."""
_TOLD_SHARE = 0.05
"""Long work tells of itself so often: each report goes to everybody who watches the load, and to the route map."""


def progress_of(core: Hub, resident: Resident, now_s: float, *, with_reason: bool = False) -> Progress:
    """How a model stands at `now_s`; where it rests, with the reason if asked for."""
    entry, last = resident.entry, resident.progress
    if entry.state is ModelState.FAILED:
        error = resident.error or LoadError(entry.error or "the load failed", param="model")
        return Progress(ModelState.FAILED, error=error)
    state = ModelState.READY if entry.state is ModelState.ACTIVE else entry.state
    if state is last.state:
        return replace(last, eta_s=_eta_s(core, resident, now_s))
    detail = ""
    if with_reason and entry.state in (ModelState.COLD, ModelState.HOST) and not entry.is_busy:
        detail = next(iter(core.explain(entry.name, now_s)), "")
    return Progress(state, detail=detail)


def seldom(tell: OnShare) -> OnShare:
    """Passes on every twentieth of what is done, and the end."""
    told = 0

    def on_share(done: int, total: int) -> None:
        nonlocal told
        if done == total or done - told >= total * _TOLD_SHARE:
            told = done
            tell(done, total)

    return on_share


def _eta_s(core: Hub, resident: Resident, now_s: float) -> float:
    """Seconds left of the operation under way: by its own pace, or by past loads; 0: unknown."""
    entry, last = resident.entry, resident.progress
    if entry.state is ModelState.FETCHING and last.bytes_done < last.bytes_total:
        spent_s, num_bytes = now_s - resident.count_began_s, last.bytes_done - resident.count_first_bytes
        is_known = num_bytes > 0 and (spent_s >= PACE_S or num_bytes >= PACE_SHARE * last.bytes_total)
        return spent_s * (last.bytes_total - last.bytes_done) / num_bytes if is_known else 0.0
    spent_s = now_s - resident.began_s
    expected_s = core.expected_load_s(entry.name) if entry.state is ModelState.LOADING else 0.0
    return max(0.0, expected_s - spent_s)
