"""What GPUs can do, by their makers' data sheets. Nothing here is measured.

Source: NVIDIA's data sheets of A100, L40S, H100 and H200 Tensor Core GPUs. Operations are those without sparsity, which
is half of what the sheets of H100 and H200 print.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from naru_proto.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU's limits."""

    name: str
    title: str
    arch: int
    """Compute capability, 90 for 9.0."""
    memory_bytes: int
    bandwidth: float
    """Of its memory, in bytes a second."""
    flops_16: float
    """Operations a second of the tensor cores on float16 or bfloat16; a product with a sum is two."""
    flops_8: float
    """The same on FP8; 0: it has no units for that."""


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-40", "A100 40 GB", 80, 40 * 10**9, 1.555e12, 312e12, 0.0),
        Gpu("a100-80", "A100 80 GB SXM", 80, 80 * 10**9, 2.039e12, 312e12, 0.0),
        Gpu("l40s", "L40S", 89, 48 * 10**9, 0.864e12, 362.05e12, 733e12),
        Gpu("h100", "H100 SXM", 90, 80 * 10**9, 3.35e12, 989.4e12, 1978.9e12),
        Gpu("h100-pcie", "H100 PCIe", 90, 80 * 10**9, 2.0e12, 756.5e12, 1513e12),
        Gpu("h200", "H200 SXM", 90, 141 * 10**9, 4.8e12, 989.4e12, 1978.9e12),
    )
}
"""By the name that a user writes."""


def gpus_named(names: str) -> Sequence[Gpu]:
    """The GPUs of a list like "h100,h200", in its order.

    Raises:
        InvalidRequest: one is not known, or none is named; lists those that are.
    """
    wanted = [name.strip().lower() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in GPUS]
    if unknown or not wanted:
        what = f"GPU {unknown[0]!r} is not known" if unknown else f"--gpu {names!r} names no GPU"
        raise InvalidRequest(f"{what}: use one or more of {', '.join(GPUS)}", param="gpu")
    return [GPUS[name] for name in dict.fromkeys(wanted)]
