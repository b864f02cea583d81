"""Compiles the native library, one shared object per instruction set, named by the hash of its sources.

Called by the build hook at install time and by the loader when a library is missing. Needs g++ only. Does not load
anything.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

if __package__:
    from naru_worker.native.isa import VARIANTS, detect_isa
else:  # loaded from its file by the build hook, before the package is installed
    from isa import VARIANTS, detect_isa  # type: ignore[import-not-found,no-redef]

PACKAGE_DIR = Path(__file__).resolve().parent
SOURCE_DIR = PACKAGE_DIR / "src"
# The C++ runtime is linked in: slim images have no libstdc++.
_LINK_FLAGS = ("-shared", "-pthread", "-static-libstdc++", "-static-libgcc")
_MAX_COMPILE_S = 600


class BuildError(Exception):
    """The library could not be compiled; the message says what to do."""


def source_files() -> list[Path]:
    """The C++ sources and headers, in a fixed order."""
    return sorted([*SOURCE_DIR.glob("*.cc"), *SOURCE_DIR.glob("*.h")])


def source_hash(variant: str) -> str:
    """Twelve hex digits that change when a source or a flag of the variant does."""
    digest = hashlib.blake2b(digest_size=6)
    for item in (*VARIANTS[variant], *_LINK_FLAGS):
        digest.update(item.encode() + b"\0")
    for path in source_files():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def library_name(variant: str) -> str:
    """File name of a variant's library for the present sources."""
    return f"libnaru_cpu_{variant}_{source_hash(variant)}.so"


def cache_dir() -> Path:
    """Where libraries go when the package folder cannot be written: under `NARU_HOME`, else the user's cache."""
    home = os.environ.get("NARU_HOME", "")
    return Path(home) / "native" if home else Path.home() / ".cache" / "naru" / "native"


def find_library(variant: str) -> Path | None:
    """The compiled library for the present sources, if there is one."""
    name = library_name(variant)
    for folder in (PACKAGE_DIR, cache_dir()):
        if (folder / name).is_file():
            return folder / name
    return None


def ensure_library(variant: str) -> Path:
    """The compiled library, built now when missing; several processes may ask at once.

    Raises:
        BuildError: no compiler, no writable folder, or the compiler failed.
    """
    found = find_library(variant)
    if found is not None:
        return found
    compiler = find_compiler()
    folder = _writable_folder()
    with _locked(folder):
        found = find_library(variant)
        if found is None:
            found = folder / library_name(variant)
            _compile(compiler, variant, found)
            _drop_stale(found, variant)
    return found


def find_compiler() -> str:
    """Path of the C++ compiler: `CXX` when set, else g++.

    Raises:
        BuildError: there is none.
    """
    wanted = os.environ.get("CXX", "") or "g++"
    path = shutil.which(wanted)
    if path is None:
        raise BuildError(
            f"no C++ compiler ({wanted!r} is not on PATH), and the CPU kernels are not compiled yet; "
            "install g++ 12 or newer (Debian and Ubuntu: apt install g++; Fedora: dnf install gcc-c++) and start again"
        )
    return path


def _writable_folder() -> Path:
    for folder in (PACKAGE_DIR, cache_dir()):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError:
            continue
    raise BuildError(
        f"no folder for the compiled CPU kernels: {str(PACKAGE_DIR)!r} and {str(cache_dir())!r} cannot be written; "
        "set NARU_HOME to a writable folder"
    )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the folder itself: a lock that leaves no file behind."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _compile(compiler: str, variant: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build_") as scratch:
        sources = [path for path in source_files() if path.suffix == ".cc"]
        objects = [Path(scratch) / f"{path.stem}.o" for path in sources]
        commands = [
            [compiler, *VARIANTS[variant], "-c", str(source), "-o", str(out)]
            for source, out in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            list(pool.map(_run, commands))
        library = Path(scratch) / target.name
        _run([compiler, *_LINK_FLAGS, *map(str, objects), "-o", str(library)])
        # Renaming is atomic: nobody ever loads half a library.
        library.replace(target)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_MAX_COMPILE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the compiler did not run: {error}") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        detail = lines[0] if lines else f"exit status {done.returncode}"
        raise BuildError(f"{command[0]} could not compile the CPU kernels: {detail}; g++ 12 or newer is needed")


def _drop_stale(built: Path, variant: str) -> None:
    # Only beside the sources: a cache folder may serve several installations.
    if built.parent == PACKAGE_DIR:
        for path in built.parent.glob(f"libnaru_cpu_{variant}_*.so"):
            if path != built:
                path.unlink(missing_ok=True)


def main(arguments: list[str] | None = None) -> None:
    """Builds the variants named on the command line; without names, the one for this machine."""
    parser = argparse.ArgumentParser(description="Compile Naru's CPU kernels.")
    parser.add_argument("variants", nargs="*", choices=[*VARIANTS, []], help="default: the best for this machine")
    try:
        for variant in parser.parse_args(arguments).variants or [detect_isa()]:
            print(ensure_library(variant))
    except (BuildError, ValueError) as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
