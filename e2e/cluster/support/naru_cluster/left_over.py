"""Clusters on disk, and the removal of those whose owner was killed: processes are gone then, files are not."""

from __future__ import annotations

from naru_cluster import layout
from naru_cluster.cluster import Cluster
from naru_cluster.layout import FIRST_NODE
from naru_cluster.namespaces import read_pid
from naru_cluster.parts import Parts


def clusters() -> list[str]:
    """Names of the clusters that are on disk, running or not."""
    folder = layout.clusters_folder()
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def remove_left_over(parts: Parts) -> list[str]:
    """Removes what clusters left that have ended without being taken down; returns their names."""
    removed = []
    for name in clusters():
        supervisor = layout.clusters_folder() / name / FIRST_NODE / "run" / "supervisor.pid"
        if supervisor.exists() and read_pid(supervisor) is None:
            Cluster(name, parts).down()
            removed.append(name)
    return removed
