"""Whether an instruction set does here what the CPU's flags promise: a library's own test, run in a child process.

Called by the loader before a variant is used. Flags lie under some hypervisors and emulators: an instruction is
missing, or computes something else. What passed is noted under the cache folder and not tried again on the same CPU.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

_TRIAL = (
    "import ctypes, sys; library = ctypes.CDLL(sys.argv[1]); library.naru_tiles(); sys.exit(library.naru_self_test())"
)
_TIMEOUT_S = 20.0
_PASSED = "passed\n"


def trial_failure(library: Path, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Why the library cannot be used on this machine; empty when its test passed, now or before."""
    note = _note(library, cpuinfo)
    if _read(note) == _PASSED:
        return ""
    failure = _run(library)
    if not failure:
        _write(note)
    return failure


def _run(library: Path) -> str:
    # No site packages and no user's settings: the child only loads the library.
    command = [sys.executable, "-I", "-S", "-c", _TRIAL, str(library)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"its self-test did not end within {_TIMEOUT_S:g} s"
    except OSError:
        return ""  # no child can be started: nothing is known against the library
    if done.returncode < 0:
        return f"its self-test was ended by {_signal_name(-done.returncode)}"
    if done.returncode > 0:
        return f"its self-test computed wrong numbers (code {done.returncode})"
    return ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _note(library: Path, cpuinfo: Path) -> Path:
    """Where the verdict on this library and this CPU is noted: the library's name has the hash of its sources."""
    home = os.environ.get("NARU_HOME", "")
    folder = Path(home) / "cache" if home else Path.home() / ".cache" / "naru"
    wanted = ("vendor_id", "cpu family", "model", "stepping", "microcode", "flags")
    facts = [library.name]
    for line in _read(cpuinfo).split("\n\n")[0].splitlines():
        if line.partition(":")[0].strip() in wanted:
            facts.append(line)
    digest = hashlib.blake2b("\n".join(facts).encode(), digest_size=8).hexdigest()
    return folder / "isa_trials" / digest


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _write(note: Path) -> None:
    """Renaming is atomic; where nothing can be written, the next process tries again."""
    try:
        note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=note.parent, delete=False) as file:
            file.write(_PASSED)
        Path(file.name).replace(note)
    except OSError:
        return
