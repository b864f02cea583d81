"""What the benchmark runs on, and what processes use: /proc and psutil. Called by `engine`, `servers`, `worker`."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_ISA_LEVELS = (
    ("amx", ("amx_tile", "amx_int8")),
    ("avx512-vnni", ("avx512f", "avx512bw", "avx512vl", "avx512_vnni")),
    ("avx512", ("avx512f", "avx512bw", "avx512vl")),
    ("avx2-vnni", ("avx2", "fma", "avx_vnni")),
    ("avx2", ("avx2", "fma")),
)


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts that decide how figures compare."""

    cpu_model: str
    isa: str
    """The widest instruction set for quantized arithmetic the CPU offers."""
    num_cores: int
    """Cores this process may use: affinity and cgroup quota."""
    memory_gb: float
    kernel: str
    load_average: float
    """Of the last minute, before the first server was started."""


def describe() -> Machine:
    """This machine, now."""
    cpu_model, flags = _cpu_info(_read("/proc/cpuinfo"))
    return Machine(
        cpu_model=cpu_model or platform.processor() or "unknown",
        isa=isa_of(flags) if flags else platform.machine(),
        num_cores=usable_cores(len(os.sched_getaffinity(0)), _read("/sys/fs/cgroup/cpu.max")),
        memory_gb=round(psutil.virtual_memory().total / 1e9, 1),
        kernel=platform.release(),
        load_average=round(os.getloadavg()[0], 2),
    )


def isa_of(flags: Iterable[str]) -> str:
    """The name of the widest level whose flags are all there; ``baseline`` for none."""
    present = set(flags)
    return next((name for name, needed in _ISA_LEVELS if present.issuperset(needed)), "baseline")


def usable_cores(affinity: int, cpu_max: str) -> int:
    """Whole cores under an affinity mask of that size and a cgroup's ``cpu.max`` text (empty: no quota), at least 1."""
    quota, _, period = cpu_max.strip().partition(" ")
    if quota.isdigit() and period.isdigit() and int(period) > 0:
        return max(1, min(affinity, int(quota) // int(period)))
    return max(1, affinity)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process and its descendants have used so far."""

    rss_bytes: int
    """Summed; pages shared by several processes count in each."""
    cpu_s: float


def usage_of(pid: int) -> Usage:
    """Of the process and all its living descendants; those that are gone count nothing."""
    rss_bytes, cpu_s = 0, 0.0
    for process in process_tree(pid):
        try:
            with process.oneshot():
                rss_bytes += process.memory_info().rss
                times = process.cpu_times()
                cpu_s += times.user + times.system
        except psutil.NoSuchProcess:
            continue
    return Usage(rss_bytes, cpu_s)


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """One process of a tree."""

    name: str
    """Its program, or the module that Python runs in it."""
    rss_mb: float
    cpu_s: float


def usage_by_process(pid: int) -> list[ProcessUsage]:
    """Of the process and each of its living descendants, parents first."""
    result = []
    for process in process_tree(pid):
        try:
            with process.oneshot():
                times = process.cpu_times()
                rss_mb = process.memory_info().rss / 1e6
                result.append(ProcessUsage(program_name(process.cmdline()), rss_mb, times.user + times.system))
        except psutil.NoSuchProcess:
            continue
    return result


def program_name(argv: Sequence[str]) -> str:
    """``redis-server`` of its path, ``naru_worker`` of ``python -m naru_worker``, ``naru`` of ``python bin/naru``."""
    if not argv:
        return ""
    names = [Path(argument.split(" ")[0]).name for argument in argv]  # a program may write its title into argv[0]
    if not names[0].startswith("python"):
        return names[0]
    if "-m" in argv[:-1]:
        return argv[argv.index("-m") + 1]
    return next((name for name in names[1:] if not name.startswith("-")), names[0])


def process_tree(pid: int) -> list[psutil.Process]:
    """The process and its living descendants; empty when it is gone. psutil guards against reused ids."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _cpu_info(text: str) -> tuple[str, tuple[str, ...]]:
    """(model name, flags) of the first CPU of a /proc/cpuinfo text; empty where it has none."""
    fields: dict[str, str] = {}
    for line in text.split("\n\n", 1)[0].splitlines():
        key, _, value = line.partition(":")
        fields[key.strip()] = value.strip()
    return fields.get("model name", ""), tuple(fields.get("flags", fields.get("Features", "")).split())


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
