"""What kernels are launched as: every launch within a block is taken down instead of done. No GPU, no driver.

A kernel's code depends on its arguments: types, constants, which integers are 1 and which are divisible by 16. What
launches make of it can so be compiled and judged as it is, not as somebody thought it would be.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from naru_worker.adapters.ops.cuda.figures import load_triton
from naru_worker.adapters.ops.cuda.interpreter import is_interpreted
from naru_worker.adapters.ops.cuda.kernels.compile_case import CompileCase

_FIRST_DEVICE = 1000
# Kernels remember by device what they were compiled for; no real one has such a number.


class _NoDriver:
    """What Triton asks before it launches."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return _FIRST_DEVICE + int(self._target.arch)

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


@contextmanager
def recorded_launches(arch: int) -> Iterator[list[CompileCase]]:
    """Takes down what is launched within: each different specialisation once, named by its kernel and number.

    Tensors may lie anywhere, in the CPU's memory too; nothing is computed, so outputs stay as they were. For one thread
    at a time.

    Args:
        arch: One of `ARCHITECTURES`, what the kernels are specialised for.

    Raises:
        RuntimeError: the kernels were imported for the interpreter, which specialises nothing.
    """
    if is_interpreted():
        raise RuntimeError("TRITON_INTERPRET is set: launches run in Python and are not specialised; unset it")
    triton = load_triton()
    cases: list[CompileCase] = []
    seen: set[tuple[Any, str]] = set()

    def take_down(**launch: Any) -> bool:
        kernel = launch["fn"].jit_function
        key = (kernel, str(launch["key"]))
        if key not in seen:
            seen.add(key)
            cases.append(_case(kernel, len(cases), arch, launch["compile"]))
        return True

    knobs, drivers = triton.knobs.runtime, triton.runtime.driver
    before = knobs.jit_cache_hook, getattr(drivers, "_active", None)
    drivers.set_active(_NoDriver(triton.backends.compiler.GPUTarget("cuda", arch, 32)))
    knobs.jit_cache_hook = take_down
    try:
        yield cases
    finally:
        knobs.jit_cache_hook = before[0]
        # Not `reset_active`, which looks for a GPU. None: the next one who asks looks for it.
        drivers.set_active(before[1])


def same_code(one: CompileCase, other: CompileCase) -> bool:
    """Whether two cases are compiled to the same code."""
    return _identity(one) == _identity(other)


def _identity(case: CompileCase) -> tuple[Any, ...]:
    return (
        case.kernel, case.arch, tuple(case.signature.items()), tuple(sorted(case.constexprs.items())),
        frozenset(case.aligned), case.num_warps, case.num_stages,
    )  # fmt: skip


def _case(kernel: Any, number: int, arch: int, launch: dict[str, Any]) -> CompileCase:
    names = list(kernel.arg_names)
    (attributes,) = launch["configs"]
    return CompileCase(
        name=f"{kernel.__name__}#{number}",
        kernel=kernel,
        arch=arch,
        signature={name: str(kind) for name, kind in launch["signature"].items()},
        constexprs={names[path[0]]: value for path, value in launch["constants"].items()},
        num_warps=launch["num_warps"],
        num_stages=launch["num_stages"],
        aligned=tuple(names[path[0]] for path, found in sorted(attributes.items()) if found),
    )
