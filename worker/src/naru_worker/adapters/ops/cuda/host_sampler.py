"""Sampling on the host: the plain path, which takes all logits off the GPU."""

from __future__ import annotations

from torch import Tensor

from naru_worker.adapters.ops.protocol import SampleOutput, SamplingBatch
from naru_worker.adapters.ops.sampling_ref import sample


class HostSampler:
    """The reference sampler behind a copy. Has no state."""

    def sample(self, logits: Tensor, batch: SamplingBatch) -> SampleOutput:
        """Samples, or scores the given target of, each row of (R, vocab) raw logits; waits for the device."""
        return sample(logits.float().cpu().numpy(), batch)
