"""Which instruction set the native library is built for and run with.

Called by the builder and the loader. Reads what the kernel reports: Linux lists a vector extension in /proc/cpuinfo
only when it also saves the registers on a context switch, so CPU and system are asked in one.
"""

from __future__ import annotations

import os
from pathlib import Path

FORCE_VARIABLE = "NARU_CPU_ISA"
"""Environment variable that forces a variant, for tests and for hunting a fault."""

_BASE = ("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-exceptions", "-Wall", "-Wextra")
# GCC 12 warns about the undefined values inside its own intrinsics headers.
_QUIET = ("-Wno-maybe-uninitialized", "-Wno-uninitialized")
_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mprefer-vector-width=512")
_AVX512_BF16 = (*_AVX512, "-mavx512bf16")

VARIANTS: dict[str, tuple[str, ...]] = {
    "plain": (*_BASE, *_QUIET, "-march=x86-64"),
    "avx2": (*_BASE, *_QUIET, *_AVX2),
    "avx512": (*_BASE, *_QUIET, *_AVX512),
    "avx512_bf16": (*_BASE, *_QUIET, *_AVX512_BF16),
    "amx": (*_BASE, *_QUIET, *_AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
}
"""Compiler flags per variant, slowest first. Never -march=native: a library may run elsewhere than it was built."""

_AVX2_FLAGS = frozenset({"avx2", "fma", "f16c", "bmi2"})
_AVX512_FLAGS = _AVX2_FLAGS | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"}

_NEEDS: dict[str, frozenset[str]] = {
    "plain": frozenset(),
    "avx2": _AVX2_FLAGS,
    "avx512": _AVX512_FLAGS,
    "avx512_bf16": _AVX512_FLAGS | {"avx512_bf16"},
    "amx": _AVX512_FLAGS | {"avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"},
}


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Feature flags that CPU and system both offer; empty where the file cannot be read."""
    try:
        with cpuinfo.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("flags"):
                    return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def runnable(variant: str, flags: frozenset[str] | None = None) -> bool:
    """Whether this machine can run the variant."""
    return _NEEDS[variant] <= (cpu_flags() if flags is None else flags)


def detect_isa(flags: frozenset[str] | None = None, forced: str | None = None) -> str:
    """The best variant for this machine, or the one that `NARU_CPU_ISA` forces.

    Raises:
        ValueError: the forced name is unknown, or this machine cannot run it.
    """
    flags = cpu_flags() if flags is None else flags
    forced = os.environ.get(FORCE_VARIABLE, "") if forced is None else forced
    if not forced:
        return [name for name in VARIANTS if runnable(name, flags)][-1]
    if forced not in VARIANTS:
        raise ValueError(f"{FORCE_VARIABLE} is {forced!r}; use one of {', '.join(VARIANTS)}, or unset it")
    if not runnable(forced, flags):
        missing = ", ".join(sorted(_NEEDS[forced] - flags))
        raise ValueError(f"{FORCE_VARIABLE} is {forced!r}, but this machine lacks {missing}; unset it")
    return forced
