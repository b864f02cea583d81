"""Runs an image as a cluster would: runc, numeric user, read-only root, no capabilities, tmpfs for a pod's volumes."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from naru_images.buildah import Buildah

DEADLINE_S = 60.0
_UID = 65532


@dataclass(frozen=True)
class Image:
    """An unpacked image: its root file system and its configuration."""

    name: str
    root: Path
    config: dict[str, Any]

    @property
    def site_packages(self) -> Path:
        """Of the environment in the image."""
        (found,) = (self.root / "opt/naru/lib").glob("python3.*/site-packages")
        return found


@dataclass
class Container:
    """A running container and what it prints."""

    id: str
    state: Path
    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    def signal(self, name: str) -> None:
        """Sends a signal to process 1."""
        subprocess.run(["runc", "--root", str(self.state), "kill", self.id, name], check=True)

    def wait_running(self) -> None:
        """Until process 1 has been started."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            command = ["runc", "--root", str(self.state), "state", self.id]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0 and json.loads(done.stdout)["status"] == "running":
                return
            assert self.process.poll() is None, f"it has ended: {self.read_rest()}"
        raise AssertionError("the container did not start")

    def wait_line(self, words: str) -> str:
        """The next line with these words."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if words in line:
                return line
        raise AssertionError(f"it ended without {words!r}: {''.join(self.lines)}")

    def read_rest(self) -> str:
        """All it printed, until it ends."""
        assert self.process.stdout is not None
        self.lines += list(self.process.stdout)
        return "".join(self.lines)


@contextlib.contextmanager
def unpacked(buildah: Buildah, name: str) -> Iterator[Image]:
    """The image's root file system while the context lasts."""
    with buildah.container(name) as container, buildah.mounted(container) as root:
        yield Image(name, root, buildah.config(name))


@contextlib.contextmanager
def started(
    image: Image, folder: Path, arguments: Sequence[str], entrypoint: Sequence[str] = ()
) -> Iterator[Container]:
    """A container with the image's entry point (or another) and arguments; killed in the end."""
    args = [*(entrypoint or image.config.get("Entrypoint", ())), *arguments]
    (folder / "config.json").write_text(json.dumps(_runtime_config(image, args)))
    name, state = f"naru-test-{uuid.uuid4().hex[:12]}", folder / "state"
    command = ["runc", "--root", str(state), "run", "--bundle", str(folder), name]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield Container(name, state, process)
        finally:
            subprocess.run(["runc", "--root", str(state), "delete", "--force", name], capture_output=True, check=False)


def run(
    image: Image, folder: Path, arguments: Sequence[str], entrypoint: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """A container that ends by itself: exit status and all it printed."""
    with started(image, folder, arguments, entrypoint) as container:
        output = container.read_rest()
        return subprocess.CompletedProcess(container.process.args, container.process.wait(DEADLINE_S), output)


def _runtime_config(image: Image, args: Sequence[str]) -> dict[str, Any]:
    def tmpfs(path: str, *options: str) -> dict[str, Any]:
        return {"destination": path, "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", *options]}

    uid, _, gid = str(image.config["User"]).partition(":")
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": int(uid), "gid": int(gid or 0)},
            "args": list(args),
            "env": image.config["Env"],
            "cwd": image.config.get("WorkingDir", "/"),
            "capabilities": {},
            "noNewPrivileges": True,
        },
        "root": {"path": str(image.root), "readonly": True},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            tmpfs("/dev", "mode=755"),
            tmpfs("/dev/shm", "mode=1777"),
            # A pod's emptyDirs.
            tmpfs("/tmp", "mode=1777"),
            *(
                [tmpfs("/var/cache/naru", f"uid={_UID}", f"gid={_UID}")]
                if image.name.startswith("naru.local/worker")
                else []
            ),
        ],
        # The network is this machine's: tests use its loopback addresses.
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")]},
    }
