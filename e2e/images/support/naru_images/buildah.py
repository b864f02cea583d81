"""The few buildah commands that are needed, on a storage of their own. Called by the base and the images.

Needs root. The storage is a folder of ours: it touches no other images of the machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

TOOLS = ("buildah", "debootstrap", "runc")
"""Programs; Debian's packages have the same names."""
_DRIVERS = ("overlay", "vfs")


class BuildError(Exception):
    """An image could not be built; the message says what to do."""


def require_tools(*names: str) -> None:
    """Raises:
    BuildError: a program is not there, or this user may not use it.
    """
    if os.geteuid() != 0:
        raise BuildError("images are built as root: the storage is mounted while it is written; use sudo")
    if missing := [name for name in names if shutil.which(name) is None]:
        raise BuildError(f"{', '.join(missing)} not found; on Debian and Ubuntu: apt-get install {' '.join(missing)}")


def install_tools() -> None:
    """Installs the Debian packages of programs that are missing.

    Raises:
        BuildError: this is no Debian, or there is no network.
    """
    missing = [name for name in TOOLS if shutil.which(name) is None]
    if missing and shutil.which("apt-get"):
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        run(["apt-get", "update"], env, is_shown=True)
        run(["apt-get", "install", "--yes", "--no-install-recommends", *missing], env, is_shown=True)
    require_tools(*TOOLS)


def run(command: Sequence[str], env: Mapping[str, str] | None = None, *, is_shown: bool = False) -> str:
    """What the command printed. ``is_shown`` sends it on to standard error instead, as it comes.

    Raises:
        BuildError: it failed; the last lines of its errors are in the message.
    """
    out: Any = sys.stderr if is_shown else subprocess.PIPE
    done = subprocess.run(
        command, env=None if env is None else dict(env), stdout=out, stderr=subprocess.STDOUT if is_shown else out,
        stdin=subprocess.DEVNULL, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        last = "\n".join((done.stderr or done.stdout or "").splitlines()[-15:])
        raise BuildError(f"{command[0]} failed with exit status {done.returncode}: {' '.join(command)}\n{last}")
    return "" if is_shown else str(done.stdout)


class Buildah:
    """Commands on one storage folder."""

    def __init__(self, folder: Path) -> None:
        """Chooses a storage driver that works below ``folder``; remembers it there."""
        require_tools("buildah")
        self._folder = folder
        self._env = {**os.environ, "TMPDIR": str(folder / "tmp")}
        (folder / "tmp").mkdir(parents=True, exist_ok=True)
        self._driver = self._choose_driver()

    def _choose_driver(self) -> str:
        chosen = self._folder / "driver"
        if chosen.is_file():
            return chosen.read_text(encoding="ascii")
        for driver in _DRIVERS:
            with contextlib.suppress(BuildError):
                container = run([*self._prefix(driver), "from", "scratch"], self._env).strip()
                run([*self._prefix(driver), "mount", container], self._env)
                run([*self._prefix(driver), "rm", container], self._env)
                chosen.write_text(driver, encoding="ascii")
                return driver
            shutil.rmtree(self._folder / driver, ignore_errors=True)
        raise BuildError(f"no storage driver of buildah works below {self._folder}: tried {', '.join(_DRIVERS)}")

    def _prefix(self, driver: str) -> list[str]:
        folder = self._folder / driver
        return ["buildah", "--root", f"{folder}/root", "--runroot", f"{folder}/run", "--storage-driver", driver]

    def __call__(self, *arguments: str, is_shown: bool = False) -> str:
        """What a buildah command printed."""
        return run([*self._prefix(self._driver), *arguments], self._env, is_shown=is_shown).strip()

    def has_image(self, name: str) -> bool:
        """Whether the storage has an image of that name."""
        with contextlib.suppress(BuildError):
            return bool(self("inspect", "--type", "image", "--format", "{{.FromImageID}}", name))
        return False

    def config(self, image: str) -> dict[str, Any]:
        """The OCI configuration of an image: Entrypoint, Env, User, Labels."""
        config: dict[str, Any] = json.loads(self("inspect", "--type", "image", image))["OCIv1"]["config"]
        return config

    @contextlib.contextmanager
    def container(self, image: str) -> Iterator[str]:
        """A working container of an image, removed in the end."""
        name = self("from", "--pull-never", image)
        try:
            yield name
        finally:
            self("rm", name)

    @contextlib.contextmanager
    def mounted(self, container: str) -> Iterator[Path]:
        """The container's root file system as a folder."""
        folder = Path(self("mount", container))
        try:
            yield folder
        finally:
            self("umount", container)
