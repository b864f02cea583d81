"""What this machine can do at most, measured: reading memory, and operations by each instruction set.

``python -m bench.limits`` prints them; `bench.engine` puts them beside its figures in the same run. The fastest of many
short runs counts: other processes only ever add. All cores work at once for the figures of all cores, each on memory of
its own.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from bench.machine import describe
from bench.peers import PeerError

from naru_worker.native.isa import cpu_flags

_SOURCE = Path(__file__).resolve().parent / "limits.cc"
DRAM_BYTES = 768 * 2**20
"""More than caches keep, on most machines. One with a larger last-level cache says so by a figure that is no lower."""
BUDGET_S = 0.5
"""Of each figure."""
_ROUND_S = 0.002
"""About the length of one run of arithmetic."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One way to multiply and add."""

    name: str
    function: str
    isas: tuple[str, ...]
    """Of the engine, that may use it."""
    flags: frozenset[str]
    kind: str
    """``float`` (float32 or bfloat16) or ``int8``."""


_AVX2, _AVX512 = frozenset({"avx2", "fma"}), frozenset({"avx512f", "avx512_vnni"})
_WIDE = ("avx512", "avx512_bf16", "amx")
INSTRUCTIONS = (
    Instruction("AVX2 FMA, float32", "fma_avx2", ("avx2",), _AVX2, "float"),
    Instruction("AVX2 maddubs, int8", "int8_avx2", ("avx2",), _AVX2, "int8"),
    Instruction("AVX512 FMA, float32", "fma_avx512", _WIDE, _AVX512, "float"),
    Instruction("AVX512 VNNI, int8", "int8_vnni", _WIDE, _AVX512, "int8"),
    Instruction("AVX512 dot, bfloat16", "bf16_avx512", _WIDE[1:], _AVX512 | {"avx512_bf16"}, "float"),
    Instruction("AMX, bfloat16", "bf16_amx", _WIDE[2:], frozenset({"amx_tile", "amx_bf16"}), "float"),
    Instruction("AMX, int8", "int8_amx", _WIDE[2:], frozenset({"amx_tile", "amx_int8"}), "int8"),
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Measured on all cores, and on one."""

    num_cores: int
    read_gb_s: Mapping[str, float] = field(default_factory=dict)
    """10**9 bytes a second by what was read: a buffer's size in MB, on all cores together."""
    read_one_core_gb_s: Mapping[str, float] = field(default_factory=dict)
    gop_s: Mapping[str, float] = field(default_factory=dict)
    """10**9 operations a second by instruction, on all cores together."""
    gop_one_core_s: Mapping[str, float] = field(default_factory=dict)


def measure(isa: str, sizes: Mapping[str, int], num_cores: int, budget_s: float = BUDGET_S) -> Limits:
    """Reads buffers of these sizes (bytes, by name) and runs the instructions an engine for `isa` may use.

    Raises:
        PeerError: no compiler, or it refused the source.
    """
    with tempfile.TemporaryDirectory(prefix="naru-bench-") as folder:
        library = _compiled(Path(folder))
        read = library.read_avx2 if isa == "avx2" else library.read_avx512
        limits = Limits(num_cores, {}, {}, {}, {})
        for cores, reading, computing in (
            (1, limits.read_one_core_gb_s, limits.gop_one_core_s),
            (num_cores, limits.read_gb_s, limits.gop_s),
        ):
            for name, num_bytes in sizes.items():
                reading[name] = _reading(read, num_bytes, cores, budget_s)  # type: ignore[index]
            for instruction in usable(isa):
                function = getattr(library, instruction.function)
                computing[instruction.name] = _computing(function, cores, budget_s)  # type: ignore[index]
        return limits


def usable(isa: str) -> tuple[Instruction, ...]:
    """Those that this CPU has and an engine for `isa` may use."""
    flags = cpu_flags()
    return tuple(one for one in INSTRUCTIONS if isa in one.isas and one.flags <= flags)


def best_gop_s(limits: Limits, isa: str, kind: str) -> float:
    """Of all cores, by the best instruction of that kind; 0 where none was measured."""
    return max((limits.gop_s.get(one.name, 0.0) for one in usable(isa) if one.kind == kind), default=0.0)


def _reading(read: Callable[[int, int], int], num_bytes: int, cores: int, budget_s: float) -> float:
    part = num_bytes // cores // 4096 * 4096
    buffers = [np.ones(part, np.uint8) for _ in range(cores)]
    pieces = [buffer.ctypes.data for buffer in buffers]
    seconds = _fastest(lambda core: lambda: read(pieces[core], part), cores, budget_s)
    return cores * part / seconds / 1e9


def _computing(function: Callable[[int], int], cores: int, budget_s: float) -> float:
    operations = function(10)
    started_s = time.perf_counter()
    function(10_000)
    rounds = max(10_000, int(10_000 * _ROUND_S / (time.perf_counter() - started_s)))
    seconds = _fastest(lambda core: lambda: function(rounds), cores, budget_s)
    return cores * rounds * operations / seconds / 1e9


def _fastest(work: Callable[[int], Callable[[], object]], cores: int, budget_s: float) -> float:
    """Seconds from the first core's start to the last one's end, in the fastest of many runs; cores start together."""
    barrier = threading.Barrier(cores)
    spans: list[list[tuple[float, float]]] = [[] for _ in range(cores)]
    allowed = sorted(os.sched_getaffinity(0))
    end_s = time.perf_counter() + budget_s

    def run(core: int) -> None:
        os.sched_setaffinity(0, {allowed[core % len(allowed)]})
        go = work(core)
        go()
        while True:
            is_over = time.perf_counter() > end_s and len(spans[core]) >= 5
            if core == 0 and is_over:
                barrier.abort()
            try:
                barrier.wait()
            except threading.BrokenBarrierError:
                return
            started_s = time.perf_counter()
            go()
            spans[core].append((started_s, time.perf_counter()))

    threads = [threading.Thread(target=run, args=(core,)) for core in range(cores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    together = zip(*spans, strict=False)
    fastest: float = min(max(end for _, end in run) - min(start for start, _ in run) for run in together)
    return fastest


def _compiled(folder: Path) -> ctypes.CDLL:
    compiler = os.environ.get("CXX", "g++")
    target = folder / "limits.so"
    argv = [*compiler.split(), "-O2", "-std=c++17", "-fPIC", "-shared", str(_SOURCE), "-o", str(target)]
    try:
        done = subprocess.run(argv, check=False, capture_output=True, text=True)
    except OSError as exc:
        raise PeerError(f"cannot run the compiler {compiler!r}: {exc}") from exc
    if done.returncode != 0:
        raise PeerError(f"{compiler} refused {_SOURCE.name}: {done.stderr[-1000:]}")
    library = ctypes.CDLL(str(target))
    for name in ("read_avx2", "read_avx512"):
        getattr(library, name).argtypes = [ctypes.c_void_p, ctypes.c_int64]
        getattr(library, name).restype = ctypes.c_int64
    for instruction in INSTRUCTIONS:
        getattr(library, instruction.function).argtypes = [ctypes.c_int64]
        getattr(library, instruction.function).restype = ctypes.c_int64
    library.allow_amx.restype = ctypes.c_int64
    library.allow_amx()
    return library


def table(limits: Limits) -> str:
    """One line a figure: a core alone, and all of them."""
    lines = [f"{'limit of this machine':28}{'one core':>12}{f'{limits.num_cores} cores':>12}"]
    for name, value in limits.read_gb_s.items():
        lines.append(f"{f'read {name}':28}{limits.read_one_core_gb_s[name]:12.1f}{value:12.1f} GB/s")
    for name, value in limits.gop_s.items():
        lines.append(f"{name:28}{limits.gop_one_core_s[name]:12.0f}{value:12.0f} GFLOP/s or GOP/s")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """The command."""
    from naru_worker.native.isa import VARIANTS, detect_isa

    parser = argparse.ArgumentParser(prog="python -m bench.limits", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--isa", default=detect_isa(), choices=[*VARIANTS], help="instruction set (the best here)")
    parser.add_argument("--megabytes", type=int, default=98, help="size of weights to read, in 10**6 bytes (98)")
    arguments = parser.parse_args(argv)
    sizes = {f"{arguments.megabytes} MB": arguments.megabytes * 10**6, f"{DRAM_BYTES >> 20} MiB": DRAM_BYTES}
    try:
        print(table(measure(arguments.isa, sizes, describe().num_cores)))
    except PeerError as exc:
        print(f"limits: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
