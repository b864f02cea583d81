"""What this process may really use of the machine's memory, and whether its parent still lives.

Called by `app` at start and by the model host before each load. The host's memory lies in a container; the cgroup's
files (version 1 and 2) do not.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_UNLIMITED_BYTES = 2**60
"""Version 1 writes a huge number for no limit."""
_PR_SET_PDEATHSIG = 1


def memory_limit_bytes(cgroup_root: Path = _CGROUP_ROOT) -> int:
    """The smaller of the cgroup's limit and the host's memory."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _memory_limit(cgroup_root)
    return host if limit is None else min(host, limit)


def memory_available_bytes(cgroup_root: Path = _CGROUP_ROOT) -> int:
    """Bytes that can be taken now without swapping or being killed: host and cgroup both asked."""
    available = memory_limit_bytes(cgroup_root)
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            available = min(available, int(line.split()[1]) * 1024)
    limit = _memory_limit(cgroup_root)
    if limit is not None:
        available = min(available, max(0, limit - _memory_used(cgroup_root)))
    return available


def huge_pages_warning(setting: Path = _HUGE_PAGES) -> str:
    """The sentence for the log where the system gives no huge pages; empty where it gives them to who asks."""
    if "[always]" in (known := _read(setting)) or "[madvise]" in known:
        return ""
    found = known.strip() or "missing"
    return (
        f"the system gives no huge pages ({setting} is {found!r}), so that weights and KV caches are read more slowly; "
        "set it to madvise on the node"
    )


def rss_bytes() -> int:
    """Memory of this process that is in RAM now."""
    fields = _read(Path("/proc/self/statm")).split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if len(fields) > 1 else 0


def peak_rss_bytes() -> int:
    """The most memory that this process had in RAM so far."""
    for line in _read(Path("/proc/self/status")).splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return rss_bytes()


def mapped_file_bytes(path: Path) -> int:
    """Bytes of a file that are mapped into this process, as the kernel tells."""
    num_bytes = 0
    for line in _read(Path("/proc/self/maps")).splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5] == str(path):
            first, _, last = fields[0].partition("-")
            num_bytes += int(last, 16) - int(first, 16)
    return num_bytes


def image_budget_bytes(folder: Path) -> int:
    """Half of what the disk has for packed images: free, or taken by them already."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    held = sum(file.stat().st_size for file in folder.glob("*.naru")) if folder.is_dir() else 0
    return (shutil.disk_usage(existing).free + held) // 2


def release_free_memory() -> None:
    """Gives memory that the allocator holds for later back to the system (glibc; nothing elsewhere)."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        return


def die_with_parent(parent_pid: int, number: signal.Signals = signal.SIGTERM) -> None:
    """Has the kernel send a signal to this process when its parent ends (Linux; nothing elsewhere).

    To be exact, when the thread that started it ends. `parent_pid` is the parent as it was at start: where it has gone
    before the call, the signal is sent at once.
    """
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    except (AttributeError, OSError):
        return
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), number)


def _memory_limit(root: Path) -> int | None:
    for path in (root / "memory.max", root / "memory" / "memory.limit_in_bytes"):
        text = _read(path).strip()
        if text.isdigit() and int(text) < _UNLIMITED_BYTES:
            return int(text)
    return None


def _memory_used(root: Path) -> int:
    """Used by the cgroup, less file pages that the kernel would drop first."""
    for folder, usage in ((root, "memory.current"), (root / "memory", "memory.usage_in_bytes")):
        text = _read(folder / usage).strip()
        if not text.isdigit():
            continue
        inactive = 0
        for line in _read(folder / "memory.stat").splitlines():
            if line.startswith(("inactive_file ", "total_inactive_file ")):
                inactive = max(inactive, int(line.split()[1]))
        return max(0, int(text) - inactive)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
