"""The Go parts of a cluster: built once from the module in `e2e/cluster/go`, kept by the digest of their sources.

Called by `make cluster-parts` and whenever a cluster starts. Debian's own programs are `naru_cluster.machine`'s.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from pathlib import Path

from naru_cluster import machine
from naru_cluster.errors import Unavailable

KUBERNETES_VERSION = "v1.34.4"
GO_SOURCES = Path(__file__).resolve().parents[2] / "go"
PAUSE_SOURCE = Path(__file__).with_name("pause.c")

PACKAGES = {
    "etcd": "./etcd",
    "kubernetes": "./kubernetes",
    "kubectl": "k8s.io/kubernetes/cmd/kubectl",
    "coredns": "./coredns",
    "helm": "helm.sh/helm/v3/cmd/helm",
}
"""Binary → Go package, in the order they are built."""
KUBERNETES_NAMES = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "kubelet")
"""What the binary `kubernetes` is called by; it picks the part by its name."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Parts:
    """A folder with all binaries."""

    folder: Path

    def path(self, name: str) -> str:
        """The absolute path of a binary."""
        return str(self.folder / name)


def cache_folder() -> Path:
    """Where parts are kept: NARU_CLUSTER_CACHE, or ~/.cache/naru/cluster."""
    given = os.environ.get("NARU_CLUSTER_CACHE")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(given) if given else cache / "naru" / "cluster"


def find_parts() -> Parts:
    """The parts built from the present sources.

    Raises:
        Unavailable: they were not built yet.
    """
    parts = Parts(parts_folder())
    missing = [name for name in _binaries() if not os.access(parts.path(name), os.X_OK)]
    if missing:
        raise Unavailable(f"{missing[0]} and perhaps more are not built: run `make cluster-parts` (minutes, once)")
    return parts


def build_parts(say: Say) -> Parts:
    """Builds what is missing and tells `say` of each step; several processes may call it at once.

    Raises:
        Unavailable: there is no Go, or a part does not build.
    """
    try:
        return find_parts()
    except Unavailable:
        pass
    folder = parts_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_suffix(".lock")):
        _build_pause(folder)
        for name, package in PACKAGES.items():
            if not os.access(folder / name, os.X_OK):
                _build_go(folder / name, package, say)
        for name in KUBERNETES_NAMES:
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to("kubernetes")
    _point_here(folder)
    return find_parts()


def _binaries() -> tuple[str, ...]:
    return (*PACKAGES, *KUBERNETES_NAMES, "pause")


def parts_folder() -> Path:
    """The folder of the parts of the present sources, built or not."""
    digest = hashlib.sha256()
    for path in sorted(path for path in GO_SOURCES.rglob("*") if path.suffix in (".go", ".mod", ".sum")):
        digest.update(f"{path.relative_to(GO_SOURCES)}\0".encode() + path.read_bytes() + b"\0")
    digest.update(" ".join(_build_arguments()).encode())
    return cache_folder() / f"parts-{digest.hexdigest()[:16]}"


def _build_arguments() -> list[str]:
    major, minor = KUBERNETES_VERSION.removeprefix("v").split(".")[:2]
    package = "k8s.io/component-base/version"
    version = [("gitVersion", KUBERNETES_VERSION), ("gitMajor", major), ("gitMinor", minor)]
    flags = " ".join(f"-X {package}.{name}={value}" for name, value in version)
    # Without debug information the build takes half the time and the binaries half the room.
    return ["-trimpath", "-gcflags=all=-dwarf=false", f"-ldflags=-s -w {flags}"]


def _build_go(target: Path, package: str, say: Say) -> None:
    if not machine.has_go():
        raise Unavailable("the cluster's parts are built with Go: install Go 1.24 or newer")
    say(f"building {target.name} ...")
    began = time.monotonic()
    # Under another name first: a build that is cut short leaves no half binary.
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    done = subprocess.run(
        ["go", "build", *_build_arguments(), "-o", str(unfinished), package],
        check=False,
        cwd=GO_SOURCES,
        env={**os.environ, "CGO_ENABLED": "0"},
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        raise Unavailable(f"`go build {package}` failed in {GO_SOURCES}: its output stands above")
    unfinished.rename(target)
    say(f"built {target.name} in {time.monotonic() - began:.0f} s")


def _build_pause(folder: Path) -> None:
    target = folder / "pause"
    if target.exists():
        return
    unfinished = folder / f".pause.{os.getpid()}"
    command = ["gcc", "-Os", "-static", "-s", "-o", str(unfinished), str(PAUSE_SOURCE)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise Unavailable(f"pause.c does not compile (gcc and libc6-dev are needed): {done.stderr.strip()}")
    unfinished.rename(target)


def _point_here(folder: Path) -> None:
    """The link `bin` beside the folders is for people."""
    link = folder.with_name("bin")
    if link.is_symlink() or not link.exists():
        fresh = folder.with_name(f".bin.{os.getpid()}")
        fresh.symlink_to(folder.name)
        fresh.replace(link)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as handle:
        flock(handle, LOCK_EX)
        yield
