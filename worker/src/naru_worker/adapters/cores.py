"""How many threads may compute here: what was asked for, cut by everything that limits this process.

Called by `app` at start. More computing threads than cores, or than a quota grants, only take turns: the quota of a
period is spent early, and then all of them stand still.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_TOPOLOGY = Path("/sys/devices/system/cpu")
_ALMOST = 0.1
"""A quota of 1.9 cores still carries two threads."""


@dataclass(frozen=True, slots=True)
class ComputeThreads:
    """The number of threads, at least 1, and the sentence for the log when something cut it."""

    count: int
    warning: str = ""


def compute_threads(
    asked: int,
    *,
    cgroup_root: Path = _CGROUP_ROOT,
    own_cgroups: Path = _OWN_CGROUPS,
    topology: Path = _TOPOLOGY,
    cpus: frozenset[int] | None = None,
) -> ComputeThreads:
    """Threads that compute: as many as asked (0: all that pay), cut by affinity, hyperthreads and the CPU quota."""
    allowed = allowed_cpus() if cpus is None else cpus
    count = physical_cores(allowed, topology)
    limit, remedy = f"this process may run on {len(allowed)} CPUs, which are {count} cores", "widen its CPU set"
    quota = cpu_quota(cgroup_root, own_cgroups)
    if quota is not None and quota + _ALMOST < count:
        count = max(1, int(quota + _ALMOST))
        limit, remedy = f"the CPU quota grants {quota:g} cores", "raise the container's CPU limit"
    if asked > count:
        return ComputeThreads(count, f"{count} threads compute, not {asked}: {limit}; {remedy}, or ask for {count}")
    count = asked or count
    if quota is not None and quota + _ALMOST < count:
        return ComputeThreads(count, f"{limit}, so that steps stand still for a part of the time; {remedy}")
    return ComputeThreads(count)


def allowed_cpus() -> frozenset[int]:
    """Numbers of the CPUs that the affinity mask and the CPU set let this process run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def physical_cores(cpus: frozenset[int], topology: Path = _TOPOLOGY) -> int:
    """Cores behind these CPUs, at least 1: hyperthreads of one core share its arithmetic and count once."""
    cores = set()
    for cpu in cpus:
        siblings = _read(topology / f"cpu{cpu}" / "topology" / "thread_siblings_list").strip()
        cores.add(siblings or str(cpu))
    return max(1, len(cores))


def cpu_quota(cgroup_root: Path = _CGROUP_ROOT, own_cgroups: Path = _OWN_CGROUPS) -> float | None:
    """Cores granted by the tightest CPU quota of this process's groups (cgroup version 1 or 2), or None."""
    quotas = [quota for folder in _folders(cgroup_root, own_cgroups) if (quota := _quota_of(folder)) is not None]
    return min(quotas, default=None)


def _folders(root: Path, own_cgroups: Path) -> Iterator[Path]:
    """Where quotas of this process may stand: its own groups, those around them, and the root as containers see it."""
    for top in (root, root / "unified", root / "cpu", root / "cpu,cpuacct"):
        yield top
    for line in _read(own_cgroups).splitlines():
        fields = line.split(":", 2)
        if len(fields) != 3 or (fields[1] and "cpu" not in fields[1].split(",")):
            continue
        tops = (root / "cpu", root / "cpu,cpuacct") if fields[1] else (root, root / "unified")
        parts = [part for part in fields[2].split("/") if part not in ("", "..")]
        for length in range(1, len(parts) + 1):
            for top in tops:
                yield top.joinpath(*parts[:length])


def _quota_of(folder: Path) -> float | None:
    version2 = _read(folder / "cpu.max").split()
    if len(version2) == 2:
        return _ratio(*version2)
    return _ratio(_read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip())


def _ratio(quota: str, period: str) -> float | None:
    """None for `max`, -1 and what is no number."""
    if not (quota.isdigit() and period.isdigit() and int(period) > 0):
        return None
    return int(quota) / int(period)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
