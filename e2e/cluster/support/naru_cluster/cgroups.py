"""The control groups of a node's pods: made before the kubelet starts, removed when all its processes have ended."""

from __future__ import annotations

import os
import time
from pathlib import Path

from naru_cluster.errors import ClusterError
from naru_cluster.layout import NodeLayout

CGROUPS = Path("/sys/fs/cgroup")


def make_cgroup(where: NodeLayout) -> None:
    """Makes the control group of the node's pods: one in each hierarchy of version 1, or the one of version 2."""
    if (CGROUPS / "cgroup.controllers").exists():
        (CGROUPS / where.cgroup).mkdir(exist_ok=True)
        return
    for hierarchy in _hierarchies():
        (hierarchy / where.cgroup).mkdir(exist_ok=True)
    for name in ("cpuset.cpus", "cpuset.mems"):
        source = CGROUPS / "cpuset" / name
        if source.exists():
            (CGROUPS / "cpuset" / where.cgroup / name).write_text(source.read_text())


def remove_cgroup(name: str, timeout_s: float = 10.0) -> None:
    """Removes it and all below it, once no process is left in it.

    Raises:
        ClusterError: it does not go away.
    """
    roots = [CGROUPS / name, CGROUPS / "unified" / name, *(hierarchy / name for hierarchy in _hierarchies())]
    deadline = time.monotonic() + timeout_s
    while left := [folder for root in roots for folder in _inner_first(root) if not _removed(folder)]:
        if time.monotonic() > deadline:
            raise ClusterError(f"control group {left[0]} cannot be removed")
        time.sleep(0.05)


def _inner_first(root: Path) -> list[Path]:
    return [Path(folder) for folder, _, _ in os.walk(root, topdown=False)]


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _hierarchies() -> list[Path]:
    if (CGROUPS / "cgroup.controllers").exists():
        return []
    return [path for path in CGROUPS.iterdir() if path.is_dir() and not path.is_symlink() and path.name != "unified"]
