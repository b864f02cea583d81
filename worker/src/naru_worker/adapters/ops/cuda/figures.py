"""What a kernel costs, read off its machine code: compiled ahead of time, without a GPU or a driver."""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from naru_worker.adapters.ops.cuda.kernels.compile_case import CompileCase

_PACKAGE = "naru_worker.adapters.ops.cuda.kernels"
_THREADS_PER_WARP = 32
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
# /*01a0*/   @!P2 LDG.E.128 R4, desc[UR4][R20.64+0x800] ;
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P[T0-9]+\s+)?([A-Z][A-Za-z0-9_.]*)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class KernelFigures:
    """What one program of a compiled kernel takes of a multiprocessor."""

    name: str
    """The name of its case."""
    arch: int
    threads: int
    registers: int
    """A thread's."""
    shared_bytes: int
    spill_bytes: int
    """Local memory of a thread: registers that did not fit."""
    cubin_bytes: int
    instructions: frozenset[str]
    """Opcodes with their modifiers (``HGMMA.64x64x16.F32.BF16``); empty where the case promises none."""
    seconds: float
    """That it took to compile, or to find among those compiled before."""

    @property
    def key(self) -> str:
        """Unique over all kernels and architectures."""
        return f"{self.name}@{self.arch}"


def load_triton() -> Any:
    """The package `triton` with its compiler, set up as launches have it."""
    # The same as Triton's default; unset, it warns. Part of the key of its cache.
    import triton.backends.compiler
    import triton.compiler

    return triton


def kernel_modules() -> list[str]:
    """The names of all modules that have kernels, in alphabetical order, without the package's.

    A module is one that defines `compile_cases`; importing it decides whether its kernels can be compiled: not where
    the environment variable TRITON_INTERPRET is set.
    """
    package = importlib.import_module(_PACKAGE)
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    return [name for name in names if hasattr(importlib.import_module(f"{_PACKAGE}.{name}"), "compile_cases")]


def cases_of(module: str, arch: int) -> Iterator[CompileCase]:
    """The cases of one of `kernel_modules` on an architecture."""
    cases: Iterator[CompileCase] = importlib.import_module(f"{_PACKAGE}.{module}").compile_cases(arch)
    yield from cases


def compile_case(case: CompileCase) -> KernelFigures:
    """Compiles a kernel, or finds it in Triton's cache, and reads what it costs.

    A launch on such a GPU finds the same entry in the cache, so this also warms it.

    Raises:
        ValueError: the case names a parameter that its kernel hasn't, or leaves one out.
        Exception: what Triton or ptxas raise about code that they cannot compile.
    """
    triton = load_triton()
    started = time.perf_counter()
    compiled = triton.compile(
        triton.compiler.ASTSource(**_source(case)),
        target=triton.backends.compiler.GPUTarget("cuda", case.arch, _THREADS_PER_WARP),
        options={"num_warps": case.num_warps, "num_stages": case.num_stages},
    )
    seconds = time.perf_counter() - started
    cubin: bytes = compiled.asm["cubin"]
    registers, spilled, static_shared = resource_usage(_ask_cuobjdump("-res-usage", cubin))
    return KernelFigures(
        name=case.name,
        arch=case.arch,
        threads=_THREADS_PER_WARP * compiled.metadata.num_warps,
        registers=registers,
        shared_bytes=static_shared + compiled.metadata.shared,
        spill_bytes=spilled,
        cubin_bytes=len(cubin),
        instructions=opcodes(_ask_cuobjdump("-sass", cubin)) if case.expects else frozenset(),
        seconds=seconds,
    )


def resource_usage(text: str) -> tuple[int, int, int]:
    """Registers, bytes of local memory and bytes of static shared memory, from what `cuobjdump -res-usage` printed.

    Raises:
        ValueError: the text has no such line.
    """
    found = _USAGE.search(text)
    if found is None:
        raise ValueError(f"cuobjdump -res-usage printed no registers: {text.strip()[:200]!r}")
    registers, stack, shared, local = (int(number) for number in found.groups())
    return registers, stack + local, shared


def opcodes(text: str) -> frozenset[str]:
    """The different opcodes in what `cuobjdump -sass` printed."""
    return frozenset(_INSTRUCTION.findall(text))


def _source(case: CompileCase) -> dict[str, Any]:
    names = list(case.kernel.arg_names)
    if list(case.signature) != names:
        raise ValueError(f"{case.name}: the signature has {list(case.signature)}, the kernel {names}")
    unknown = [name for name in (*case.constexprs, *case.aligned) if name not in names]
    if unknown:
        raise ValueError(f"{case.name}: the kernel has no parameter {', '.join(unknown)}")
    # In the order of the parameters: it is part of the cache's key.
    return {
        "fn": case.kernel,
        "signature": dict(case.signature),
        "constexprs": {(at,): case.constexprs[name] for at, name in enumerate(names) if name in case.constexprs},
        "attrs": {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if name in case.aligned},
    }


def _ask_cuobjdump(question: str, cubin: bytes) -> str:
    program = Path(load_triton().__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        answer = subprocess.run([program, question, file.name], capture_output=True, text=True, check=True)
    return answer.stdout
