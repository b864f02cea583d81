"""Sampling on the GPU: what rows ask for goes up, what they drew comes down beside the next step.

Between `launch` and `fetch` the host is free; `drawn` has the tokens on the device all along.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from naru_worker.adapters.ops.cuda.kernels.sampler import SamplerSpace, sample
from naru_worker.adapters.ops.cuda.sampling_tensors import (
    SamplingKinds,
    SamplingLayout,
    SamplingTensors,
    pack,
    pack_counters,
    row_flags,
)
from naru_worker.adapters.ops.cuda.staging import Staging
from naru_worker.adapters.ops.cuda.streams import Event, Streams
from naru_worker.adapters.ops.protocol import SampleOutput, SamplingBatch
from naru_worker.adapters.ops.sampling_ref import await_masks

_NUM_RESULTS = 3
"""A step's results are read while the next one's are on their way."""
_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Sampled:
    """A step whose results are on their way to the host. Holds the tensors that they come from."""

    num_rows: int
    num_best: int
    places: dict[str, Tensor]
    """On the host, to be read once `done`."""
    done: Event
    sources: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class _Placed:
    """A batch on the device."""

    batch: SamplingBatch
    has_pending: bool
    kinds: SamplingKinds
    layout: SamplingLayout
    tensors: SamplingTensors


class DeviceSampler:
    """Scratch and results of one model's sampler. For one thread; up to two steps may be on their way."""

    def __init__(self, device: torch.device, streams: Streams, max_rows: int) -> None:
        """`max_rows`: of steps whose tokens the next one may read on the device."""
        self.drawn = torch.zeros(max_rows, dtype=torch.int32, device=device)
        """(max_rows,) what each row of the newest step drew, in the order of the stream of computation."""
        self._device = device
        self._streams = streams
        self._staging = Staging(device, streams)
        self._placed: _Placed | None = None
        self._space: SamplerSpace | None = None
        self._space_limit = -1
        self._left: Event | None = None
        """When the results of the newest step have left the device."""
        self._hosts = [streams.host_buffer(_ALIGNMENT_BYTES) for _ in range(_NUM_RESULTS)]
        self._next = 0

    def launch(
        self,
        logits: Callable[[], Tensor],
        batch: SamplingBatch,
        hidden: tuple[int, Callable[[], Tensor]] | None,
        pending: Tensor | None = None,
    ) -> Sampled:
        """Samples once the logits are there. Waits on the host for the masks alone.

        Args:
            logits: Gives (≥ R, vocab) to work on the stream of computation.
            batch: May change after the call. The same object again differs in its counters alone: only they go up.
            hidden: Width of the hidden states that are wanted, and what gives them: (R, width).
            pending: (≥ R,) int32 on the device, of a step ahead: each row's newest token, which the batch does not
                count for penalties yet.
        """
        if batch.masks is not None:
            await_masks(batch.masks)
        num_rows = len(batch.target)
        if not num_rows:
            return Sampled(0, max(0, batch.max_logprobs), {}, self._streams.copies.record(), ())
        placed = self._place(batch, has_pending=pending is not None)
        kinds, tensors = placed.kinds, placed.tensors
        space = self._room(num_rows, kinds)
        compute, copies = self._streams.compute, self._streams.copies
        if self._left is not None:
            compute.wait(self._left)  # long since done: a forward pass lies between
        newest = None if pending is None else pending[:num_rows]
        compute.submit(lambda: sample(logits()[:num_rows], tensors, kinds, space, pending=newest))
        sources = _results(space, num_rows, kinds)
        if hidden is not None:
            width, states = hidden
            kept = torch.empty((num_rows, width), dtype=torch.float32, device=self._device)
            compute.submit(lambda: kept.copy_(states()))
            sources["hidden"] = kept
        copies.wait(compute.record())
        places = self._host_places(sources)
        for name, source in sources.items():
            copies.download(source, places[name])
        self._left = copies.record()
        return Sampled(num_rows, kinds.max_logprobs, places, self._left, tuple(sources.values()))

    def fetch(self, sampled: Sampled) -> SampleOutput:
        """Waits for one step's results only; the arrays are the caller's own.

        Raises:
            DeviceError: the device failed.
        """
        sampled.done.synchronize()
        num_rows, num_best = sampled.num_rows, sampled.num_best

        def got(name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
            place = sampled.places.get(name)
            return np.zeros(shape, dtype) if place is None else place.numpy().copy()

        return SampleOutput(
            token_ids=got("token_ids", (num_rows,), np.int32),  # type: ignore[arg-type]
            logprobs=got("logprobs", (num_rows,), np.float32),  # type: ignore[arg-type]
            ranks=got("ranks", (num_rows,), np.int32),  # type: ignore[arg-type]
            top_ids=got("top_ids", (num_rows, num_best), np.int32),  # type: ignore[arg-type]
            top_logprobs=got("top_logprobs", (num_rows, num_best), np.float32),  # type: ignore[arg-type]
            hidden=sampled.places["hidden"].numpy().copy() if "hidden" in sampled.places else None,
        )

    def _place(self, batch: SamplingBatch, *, has_pending: bool) -> _Placed:
        """Sends what rows ask for, or what has changed of it."""
        last, self._placed = self._placed, None
        if last is not None and last.batch is batch and last.has_pending == has_pending and batch.masks is None:
            num_bytes = last.layout.num_bytes
            self._staging.finish(num_bytes, pack_counters(batch, last.layout, self._staging.begin(num_bytes)))
            self._placed = last
            return last
        flags = row_flags(batch, has_pending=has_pending)
        layout = SamplingLayout.of(batch)
        pack(batch, layout, self._staging.begin(layout.num_bytes), flags)
        staged = self._staging.finish(layout.num_bytes)
        is_there = last is not None and last.layout == layout and last.tensors.seed.data_ptr() == staged.data_ptr()
        tensors = last.tensors if last is not None and is_there else SamplingTensors.views(layout, staged)
        self._placed = _Placed(batch, has_pending, SamplingKinds.of(batch, flags), layout, tensors)
        return self._placed

    def _room(self, num_rows: int, kinds: SamplingKinds) -> SamplerSpace:
        """What most steps need is made once; rows with logprobs, and scored prompts, get room of their own."""
        max_rows, limit = len(self.drawn), kinds.vocab_limit
        if num_rows > max_rows:
            with_work = kinds.has_draws or kinds.has_edits
            return SamplerSpace.make(num_rows, limit, kinds.max_logprobs, self._device, with_work=with_work)
        if self._space is None or limit > self._space_limit:
            space = SamplerSpace.make(max_rows, limit, 0, self._device)
            self._space, self._space_limit = replace(space, token_ids=self.drawn), limit
        if not kinds.max_logprobs:
            return self._space
        own = SamplerSpace.make(max_rows, limit, kinds.max_logprobs, self._device, with_work=False)
        return replace(own, work=self._space.work, token_ids=self.drawn)

    def _host_places(self, sources: dict[str, Tensor]) -> dict[str, Tensor]:
        sizes = {name: -(-source.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for name, source in sources.items()}
        if sum(sizes.values()) > len(self._hosts[self._next]):
            self._hosts[self._next] = self._streams.host_buffer(2 * sum(sizes.values()))
        host, self._next = self._hosts[self._next], (self._next + 1) % _NUM_RESULTS
        places, start = {}, 0
        for name, source in sources.items():
            places[name] = host[start : start + source.nbytes].view(source.dtype).view(source.shape)
            start += sizes[name]
        return places


def _results(space: SamplerSpace, num_rows: int, kinds: SamplingKinds) -> dict[str, Tensor]:
    names = ["token_ids"]
    if kinds.has_scores:
        names += ["logprobs", "ranks"]
        if kinds.max_logprobs:
            names += ["top_ids", "top_logprobs"]
    return {name: getattr(space, name)[:num_rows] for name in names}
