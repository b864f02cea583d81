"""One specialisation of a kernel as the backend launches it: what is compiled ahead of time, without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ARCHITECTURES = (80, 89, 90)
"""Compute capabilities that kernels are tuned and checked for: A100; L40S; H100 and H200. Others run with the tiles of
the next lower one that do not ask for more shared memory than they have."""
_LIKE_89 = 12
"""Compute capability 12.x (RTX 50, RTX PRO 6000): newer than H100, with 99 KiB for a program as on an L40S, not 227."""


@dataclass(frozen=True, slots=True)
class CompileCase:
    """A kernel with all that decides about its code."""

    name: str
    """Unique over all kernels and without the architecture: ``attention_decode/f16/kv-int8/d128/g4``."""
    kernel: Any
    """The function under ``@triton.jit``."""
    arch: int
    """One of `ARCHITECTURES`."""
    signature: Mapping[str, str]
    """Type of every parameter, in order: ``*fp16``, ``*i32``, ``i32``, ``i64``, ``fp32`` or ``constexpr``."""
    constexprs: Mapping[str, Any]
    num_warps: int
    num_stages: int
    aligned: tuple[str, ...] = ()
    """Parameters that are divisible by 16, as launches see them: pointers and row strides."""
    expects: tuple[str, ...] = ()
    """SASS instructions that must occur: ``HGMMA`` (tensor cores by warp groups), ``HMMA``, ``LDGSTS``."""
    max_spill_bytes: int = 0


def tuned_arch(capability: tuple[int, int]) -> int:
    """The architecture whose tiles a GPU of this compute capability runs with.

    Raises:
        ValueError: the GPU is older than all that kernels are made for.
    """
    number = 10 * capability[0] + capability[1]
    if capability[0] == _LIKE_89:
        return 89
    fitting = [arch for arch in ARCHITECTURES if arch <= number]
    if not fitting:
        raise ValueError(
            f"a GPU of compute capability {capability[0]}.{capability[1]} is too old; 8.0 (A100) or newer is needed"
        )
    return fitting[-1]
