"""Commands to a node's containerd through `ctr`: whether it answers, import of images, the end of a container."""

from __future__ import annotations

import subprocess
from pathlib import Path

from naru_cluster.errors import ClusterError
from naru_cluster.layout import NodeLayout
from naru_cluster.namespaces import Namespaces


def answers(where: NodeLayout) -> bool:
    """Whether it answers; the socket of one that was killed stays and tells nothing."""
    if not where.containerd_socket.exists():
        return False
    return not _ctr(where, "--connect-timeout", "1s", "version").returncode


def import_image(where: NodeLayout, namespaces: Namespaces, archive: Path) -> None:
    """Imports an archive (OCI or docker) for the kubelet.

    Raises:
        ClusterError: containerd refuses it.
    """
    command = _command(where, "--namespace", "k8s.io", "images", "import", str(archive))
    # Unpacking mounts, and that must be seen by containerd alone: so it happens inside.
    done = subprocess.run(namespaces.command(command), check=False, capture_output=True, text=True)
    if done.returncode:
        raise ClusterError(f"the image {str(archive)!r} cannot be imported: {done.stderr.strip()}")


def kill_container(where: NodeLayout, container: str) -> None:
    """Kills all processes of a container.

    Raises:
        ClusterError: it does not run.
    """
    done = _ctr(where, "--namespace", "k8s.io", "tasks", "kill", "--all", "--signal", "SIGKILL", container)
    if done.returncode:
        raise ClusterError(f"container {container!r} cannot be killed: {done.stderr.strip()}")


def _ctr(where: NodeLayout, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(_command(where, *arguments), check=False, capture_output=True, text=True)


def _command(where: NodeLayout, *arguments: str) -> list[str]:
    return ["ctr", "--address", str(where.containerd_socket), *arguments]
