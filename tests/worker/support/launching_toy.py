"""The toy model on a device that takes steps ahead: what is launched runs later, at the latest when somebody waits."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from toy_model import ToyRunner

from naru_worker.adapters.ops.protocol import BatchInputs, RunnerOptions, SampleOutput, SamplingBatch


@dataclass
class Flight:
    """A step that was launched."""

    batch: BatchInputs
    sampling: SamplingBatch
    output: SampleOutput | None = None

    def writers(self, block_size: int) -> dict[int, list[int]]:
        """Of each block that it writes to: the blocks of the same sequence up to there, which tell whose it is."""
        found = {}
        owners = np.repeat(np.arange(len(self.batch.seq_lens)), np.diff(self.batch.query_start))
        for owner, position in zip(owners.tolist(), self.batch.positions.tolist(), strict=True):
            blocks = self.batch.block_table[owner, : position // block_size + 1].tolist()
            found[blocks[-1]] = blocks
        return found


class LaunchingToy(ToyRunner):
    """`before_step` is called at the launch, `before_fetch` when results are asked for; both may raise."""

    def __init__(self, options: RunnerOptions, revision: str = "") -> None:
        super().__init__(options, revision)
        self.flights: deque[Flight] = deque()
        """Launched and not fetched."""
        self.before_fetch: Callable[[], None] = lambda: None
        self._random = random.Random(7)
        self._drawn = np.zeros(0, np.int32)

    def run(self, batch: BatchInputs, sampling: SamplingBatch) -> SampleOutput:
        return self.fetch(self.launch(batch, sampling))

    def launch(self, batch: BatchInputs, sampling: SamplingBatch) -> Flight:
        assert len(self.flights) < 2, "three steps are in flight"
        self.before_step(batch)
        flight = Flight(copy.deepcopy(batch), replace(copy.deepcopy(sampling), masks=sampling.masks))
        for other in self.flights:
            theirs, ours = other.writers(self.kv.block_size), flight.writers(self.kv.block_size)
            for block in theirs.keys() & ours.keys():
                assert theirs[block] == ours[block], "a block is given to another while a step may write to it"
        self.flights.append(flight)
        if self._random.random() < 0.3:
            self._compute(flight)
        return flight

    def fetch(self, flight: Flight) -> SampleOutput:
        assert flight is self.flights[0], "results are asked for out of order"
        if flight.output is None:
            self._compute(flight)
        assert flight.output is not None
        try:
            self.before_fetch()
        finally:
            self.flights.popleft()
        return flight.output

    def release_blocks(self, first_block: int, num_blocks: int) -> None:
        for flight in self.flights:
            held = set(flight.batch.block_table.ravel().tolist())
            assert held.isdisjoint(range(first_block, first_block + num_blocks)), "a step needs the memory"
        super().release_blocks(first_block, num_blocks)

    def close(self) -> None:
        self.flights.clear()
        super().close()

    def _compute(self, flight: Flight) -> None:
        """All that were launched before come first."""
        if self.flights[0] is not flight and self.flights[0].output is None:
            self._compute(self.flights[0])
        ids = flight.batch.token_ids
        is_open = ids < 0
        ids[is_open] = self._drawn[-1 - ids[is_open]]
        sampling = _counted(flight.sampling, ids.tolist()) if is_open.any() else flight.sampling
        hook, self.before_step = self.before_step, lambda batch: None
        try:
            flight.output = super().run(flight.batch, sampling)
        finally:
            self.before_step = hook
        self._drawn = flight.output.token_ids


def _counted(sampling: SamplingBatch, pending: list[int]) -> SamplingBatch:
    """Each row's newest token counts for its penalties, if it has any."""
    ids, counts, starts = list[int](), list[int](), [0]
    neutral = (sampling.presence_penalty == 0.0) & (sampling.frequency_penalty == 0.0)
    neutral &= sampling.repetition_penalty == 1.0
    for i, token in enumerate(pending):
        place = slice(sampling.penalty_start[i], sampling.penalty_start[i + 1])
        seen = dict(
            zip(sampling.penalty_ids[place].tolist(), sampling.penalty_output_counts[place].tolist(), strict=True)
        )
        if not neutral[i]:
            seen[token] = seen.get(token, 0) + 1
        ids += seen.keys()
        counts += seen.values()
        starts.append(len(ids))
    return replace(
        sampling,
        penalty_start=np.array(starts, np.int32),
        penalty_ids=np.array(ids, np.int32),
        penalty_output_counts=np.array(counts, np.int32),
    )
