"""The pods of a pool, sorted by what they are to the plan. Called by the plan and the status; decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

from naru_operator.core.pools.member_names import member_name
from naru_operator.core.pools.model import ObservedPod, PoolSnapshot
from naru_proto import names
from naru_proto.registry import WorkerRecord

RETRY_S = 30.0
"""A pod that failed sooner after its creation keeps its place for so long: what refuses it at once would refuse the
next one too, and pods would come and go as fast as the API server makes them."""
_STALE_LEASE_S = 5 * names.WORKER_LEASE_TTL_S
"""A lease outlives its worker; for so long after a pod's creation it may be that of the slot's last pod."""


@dataclass(frozen=True, slots=True)
class Member:
    """A pod of the pool with its worker."""

    pod: ObservedPod
    worker: WorkerRecord | None
    """Its lease."""
    is_outdated: bool
    """Made from something other than what the pool asks for now, or not to be told which slot it has."""

    @property
    def name(self) -> str:
        """The pod's, which is the worker's."""
        return self.pod.key.name

    @property
    def is_leaving(self) -> bool:
        """Whether its worker has been told to end."""
        return self.worker is not None and (self.worker.leaving or self.worker.draining)

    @property
    def unready_since_s(self) -> float:
        """Unix seconds; of one that is not ready."""
        return max(self.pod.created_s, self.pod.ready_changed_s)

    @property
    def is_ready(self) -> bool:
        """Whether it takes models and requests: both the kubelet and its lease say so."""
        return self.pod.is_ready and not self.pod.is_terminating and self.worker is not None and not self.is_leaving


@dataclass(frozen=True, slots=True)
class Members:
    """All pods of a snapshot."""

    living: tuple[Member, ...]
    """Those that count, in order of names."""
    going: tuple[Member, ...]
    """Living ones that do not count: terminating, or their worker has been told to end."""
    finished: tuple[ObservedPod, ...]
    """Succeeded, failed or evicted; to be deleted."""
    resting: tuple[ObservedPod, ...]
    """Finished too, but so soon that their places are filled a little later."""
    foreign: tuple[str, ...]
    """Names that pods of other owners have: of the pool's slots, none of the pool's."""
    taken_names: frozenset[str]
    """Of all pods there are: no new one can be called so."""

    @property
    def has_registry(self) -> bool:
        """Whether any lease of the pool is seen. Without one, pods without a lease may serve all the same."""
        return any(member.worker is not None for member in (*self.living, *self.going))


def sort_members(snapshot: PoolSnapshot, current_hash: str, *, now_s: float) -> Members:
    """Sorts the snapshot's pods; those of other owners are never the pool's, whatever their labels say."""
    pool = snapshot.pool.metadata
    uid = snapshot.raw["metadata"]["uid"]
    living: list[Member] = []
    going: list[Member] = []
    finished: list[ObservedPod] = []
    resting: list[ObservedPod] = []
    foreign: list[str] = []
    for pod in sorted(snapshot.pods, key=lambda pod: pod.key):
        if pod.owner_uid != uid:
            foreign.append(pod.key.name)
            continue
        lost_slot = pod.slot is None or member_name(pool.name, pod.slot) != pod.key.name
        member = Member(pod, _lease(pod, snapshot), lost_slot or pod.template_hash != current_hash)
        if pod.is_terminating:
            going.append(member)
        elif pod.is_finished:
            (resting if 0 <= now_s - pod.created_s < RETRY_S else finished).append(pod)
        elif member.is_leaving and now_s - pod.created_s >= _STALE_LEASE_S:
            going.append(member)
        else:
            living.append(member)
    taken = snapshot.taken_names | {pod.key.name for pod in snapshot.pods}
    return Members(
        living=tuple(living),
        going=tuple(going),
        finished=tuple(finished),
        resting=tuple(resting),
        foreign=tuple(sorted({*foreign, *snapshot.taken_names})),
        taken_names=frozenset(taken),
    )


def _lease(pod: ObservedPod, snapshot: PoolSnapshot) -> WorkerRecord | None:
    record = snapshot.workers.get(pod.key.name)
    return record if record is not None and record.pool == snapshot.pool.metadata.name else None
