"""Judges what compiled kernels cost: against what the GPU has, what was promised, and what they cost before."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from naru_worker.adapters.ops.cuda.figures import KernelFigures
from naru_worker.adapters.ops.cuda.kernels.compile_case import CompileCase

SHARED_LIMITS = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
"""Bytes of shared memory that one program may have. Source: CUDA C++ Programming Guide, compute capabilities."""
REGISTERS = 65536
"""32-bit registers of a multiprocessor, on all architectures here."""
_REGISTERS_STEP = 8
# Registers are handed out in this step to a thread.
TOLERANCE = 1.1
"""A figure may be this many times what it was."""
_COMPARED = ("registers", "shared_bytes", "spill_bytes")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the kernels cost when the file was written."""

    triton: str = ""
    """Version of the compiler. Another one gives other figures."""
    kernels: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """`KernelFigures.key` to registers, shared_bytes and spill_bytes."""


def read_snapshot(path: Path) -> Snapshot:
    """The file's contents; an empty snapshot where there is no file.

    Raises:
        ValueError: it is no snapshot.
    """
    if not path.exists():
        return Snapshot()
    try:
        stored = json.loads(path.read_text())
        return Snapshot(stored["triton"], stored["kernels"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no snapshot of kernels ({error}); write it anew with --write-snapshot") from None


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Writes the file, a line a kernel, so that a change shows as that kernel's."""
    lines = [f"    {json.dumps(key)}: {json.dumps(snapshot.kernels[key])}" for key in sorted(snapshot.kernels)]
    head = f'{{\n  "triton": {json.dumps(snapshot.triton)},\n  "kernels": {{\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head + ",\n".join(lines) + "\n  }\n}\n")


def entry(figures: KernelFigures) -> dict[str, int]:
    """A kernel's line in the snapshot."""
    return {name: getattr(figures, name) for name in _COMPARED}


def own_faults(case: CompileCase, figures: KernelFigures) -> Iterator[str]:
    """What is wrong with a kernel by itself, with the value and the limit."""
    if figures.spill_bytes > case.max_spill_bytes:
        yield f"spills {figures.spill_bytes} bytes a thread; {case.max_spill_bytes} are allowed"
    for promised in case.expects:
        if not any(opcode == promised or opcode.startswith(f"{promised}.") for opcode in figures.instructions):
            yield f"has no {promised}, which it promises"
    limit = SHARED_LIMITS[figures.arch]
    if figures.shared_bytes > limit:
        yield f"takes {figures.shared_bytes} bytes of shared memory; sm_{figures.arch} has {limit}"
    taken = -(-figures.registers // _REGISTERS_STEP) * _REGISTERS_STEP * figures.threads
    if taken > REGISTERS:
        yield (
            f"takes {taken} registers ({figures.registers} a thread, {figures.threads} threads); "
            f"a multiprocessor has {REGISTERS}"
        )


def growth(figures: KernelFigures, snapshot: Snapshot) -> Iterator[str]:
    """Where a kernel costs more than the snapshot of the same compiler says, or is not in it."""
    before = snapshot.kernels.get(figures.key)
    if before is None:
        yield "is not in the snapshot; write it with --write-snapshot"
        return
    for name in _COMPARED:
        now = getattr(figures, name)
        if now > TOLERANCE * before[name]:
            yield f"{name.replace('_', ' ')}: {now}, in the snapshot {before[name]}"


def gone(found: Iterable[str], snapshot: Snapshot) -> list[str]:
    """Keys of the snapshot that no kernel has any more."""
    return sorted(set(snapshot.kernels) - set(found))
