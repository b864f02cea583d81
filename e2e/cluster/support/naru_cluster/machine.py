"""What a cluster needs of the machine: Linux, root, Debian's container tools, Go. Says what is missing.

Called before anything is built or started. Installs packages only when asked to.
"""

from __future__ import annotations

import ctypes.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from naru_cluster.errors import Unavailable

CNI_DIR = Path("/usr/lib/cni")
PACKAGES: Mapping[str, str] = {
    "containerd": "containerd",
    "runc": "runc",
    "ip": "iproute2",
    "nft": "nftables",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "unshare": "util-linux",
    "setpriv": "util-linux",
    "mount": "mount",
    "busybox": "busybox-static",
    "gcc": "gcc",
    str(CNI_DIR / "ptp"): "containernetworking-plugins",
}
"""Programs (or files, by absolute path) of the full node, and the Debian packages that have them."""
CONTROL_PLANE_PROGRAMS = ("unshare", "setpriv", "mount", "ip", "gcc")
"""The ones the control plane alone needs."""


def missing_packages(*, full_node: bool) -> list[str]:
    """Debian packages whose programs are not here, in alphabetical order."""
    wanted = PACKAGES if full_node else {name: PACKAGES[name] for name in CONTROL_PLANE_PROGRAMS}
    return sorted({package for program, package in wanted.items() if not _is_here(program)})


def check(*, full_node: bool) -> None:
    """Checks all but the Go parts.

    Raises:
        Unavailable: this machine cannot carry a cluster; says why.
    """
    if sys.platform != "linux":
        raise Unavailable(f"a cluster needs Linux namespaces, and this is {sys.platform}: use KUBECONFIG")
    if os.geteuid() != 0:
        raise Unavailable("a cluster needs root (namespaces, mounts): run as root or point KUBECONFIG at a cluster")
    if packages := missing_packages(full_node=full_node):
        raise Unavailable(f"programs are missing: run `apt-get install -y {' '.join(packages)}`")
    command = ["unshare", "--net", "--mount", "--pid", "--fork", "true"]
    probe = subprocess.run(command, check=False, capture_output=True, text=True)
    if probe.returncode:
        raise Unavailable(f"this machine gives no Linux namespaces: unshare says {probe.stderr.strip()!r}")


def install_packages() -> None:
    """Installs the missing Debian packages.

    Raises:
        Unavailable: this is no root on a Debian-like system, or the installation failed.
    """
    packages = missing_packages(full_node=True)
    if not packages:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise Unavailable(f"packages are missing, and only root with apt-get can add them: {' '.join(packages)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for arguments in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
        command = ["apt-get", "-q", *arguments]
        if subprocess.run(command, check=False, env=environment, stdin=subprocess.DEVNULL).returncode:
            raise Unavailable(f"`apt-get {' '.join(arguments)}` failed: its output stands above")


def has_go() -> bool:
    """Whether the Go compiler is here."""
    return shutil.which("go") is not None


def must_not_skip() -> bool:
    """Whether a missing part is an error: in CI, as root, with Go."""
    return os.environ.get("CI", "").lower() in ("1", "true", "yes") and os.geteuid() == 0 and has_go()


def _is_here(program: str) -> bool:
    return Path(program).exists() if program.startswith("/") else shutil.which(program) is not None


def enter_network(pid: int) -> None:
    """Moves the calling thread, and no other, into the network namespace of a process.

    Raises:
        OSError: the process is gone, or this is not root.
    """
    libc = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
    with open(f"/proc/{pid}/ns/net") as handle:
        if libc.setns(handle.fileno(), 0x40000000):  # CLONE_NEWNET; os.setns is there from Python 3.12 on
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
