"""The cases of the sampler: tokens drawn from a step's logits. For `gpu`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from bench.gpu_cases import KernelCase, Setup
from sampling_batches import sampling_batch
from torch import Tensor

from naru_worker.adapters.ops import sampling_ref
from naru_worker.adapters.ops.cuda.kernels.sampler import SamplerSpace, sample
from naru_worker.adapters.ops.cuda.sampling_tensors import (
    SamplingKinds,
    SamplingLayout,
    SamplingTensors,
    pack,
    row_flags,
)

ROWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
}


def sampler_cases(setup: Setup) -> Iterator[KernelCase]:
    """A batch of the likeliest tokens, and one of drawn ones."""
    for name, row in ROWS.items():
        yield _sampler(setup, name, [{**row, "seed": seed} for seed in range(setup.batch)])


def _sampler(setup: Setup, name: str, rows: list[dict[str, Any]]) -> KernelCase:
    logits = setup.normal(len(rows), setup.vocab) * 4.0
    batch = sampling_batch(rows, setup.vocab)
    layout, flags = SamplingLayout.of(batch), row_flags(batch)
    kinds = SamplingKinds.of(batch, flags)
    buffer = np.zeros(layout.num_bytes, np.uint8)
    pack(batch, layout, buffer, flags)
    tensors = SamplingTensors.views(layout, torch.from_numpy(buffer).to(setup.device))
    space = SamplerSpace.make(len(rows), setup.vocab, kinds.max_logprobs, setup.device)

    def run() -> Tensor:
        sample(logits, tensors, kinds, space)
        return space.token_ids

    def expected() -> Tensor:
        found = sampling_ref.sample(logits.float().cpu().numpy(), batch)
        return torch.from_numpy(found.token_ids).to(setup.device)

    return KernelCase(f"sampler, {name}", run, expected, 0.0, logits.numel() * logits.itemsize)
