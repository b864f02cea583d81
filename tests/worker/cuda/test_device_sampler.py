"""What goes up for rows that ask for the same as in the step before: their counters, and nothing is mixed up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sampling_batches import sampling_batch

from naru_worker.adapters.ops.protocol import SamplingBatch

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from fake_cuda_streams import FakeStreams  # noqa: E402

from naru_worker.adapters.ops.cuda.device_sampler import DeviceSampler  # noqa: E402

VOCAB_SIZE = 40
ROWS: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.0, "presence_penalty": 2.0, "penalties": [(5, 1)]},
    {"temperature": 1.5, "seed": 9, "bias": [(7, 2.0)]},
]


def batch_at(counter: int, rows: list[dict[str, Any]] = ROWS) -> SamplingBatch:
    return sampling_batch([row | {"counter": counter} for row in rows], VOCAB_SIZE)


@pytest.mark.parametrize("seed", range(3))
def test_a_batch_that_comes_again_draws_as_a_new_one(seed: int) -> None:
    streams = FakeStreams(seed)
    sampler = DeviceSampler(torch.device("cpu"), streams, 4)
    logits = torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    pending = torch.tensor([1, int(logits[1].argmax()), 2], dtype=torch.int32)
    kept, other = batch_at(0), batch_at(0, ROWS[:2])
    found: list[list[int]] = []
    expected: list[list[int]] = []
    for counter, (batch, ahead) in enumerate(
        [(kept, None), (kept, None), (kept, pending), (kept, pending), (other, None), (kept, None), (kept, None)]
    ):
        batch.counter[:] = counter
        rows = len(batch.target)
        for given, results in ((batch, found), (replace(batch, counter=batch.counter.copy()), expected)):
            fresh = sampler if given is batch else DeviceSampler(torch.device("cpu"), FakeStreams(seed), 4)
            handle = fresh.launch(lambda rows=rows: logits[:rows], given, None, ahead)  # type: ignore[misc]
            given.counter[:] = 99  # the arrays are the sampler's no more
            results.append(fresh.fetch(handle).token_ids.tolist())
    assert found == expected
    assert len({tuple(tokens) for tokens in found}) > 2, "counters and pending tokens matter"


def test_only_counters_go_up_again() -> None:
    streams = FakeStreams(0)
    sizes: list[int] = []
    upload = streams.compute.upload

    def counted(host: Any, device: Any) -> None:
        sizes.append(host.nbytes)
        upload(host, device)

    streams.compute.upload = counted  # type: ignore[method-assign]
    sampler = DeviceSampler(torch.device("cpu"), streams, 4)
    batch = batch_at(0)
    for _ in range(3):
        sampler.fetch(sampler.launch(lambda: torch.zeros(3, VOCAB_SIZE), batch, None))
    assert sizes[0] > 300 and sizes[1:] == [np.dtype(np.int64).itemsize * 3] * 2
