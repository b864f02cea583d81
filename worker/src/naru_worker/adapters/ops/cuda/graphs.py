"""CUDA graphs of decode steps: a step of generated tokens only is one launch instead of hundreds.

A graph is made for a number of rows and a reach of context, since these decide the grids of kernels; a step is padded
up to the next of both. `graph_key` says which graph a step takes, or why none; `DecodeGraphs` keeps them.
"""

from __future__ import annotations

import enum
import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from naru_worker.adapters.ops.cuda.staging import Staging, staged_bytes
from naru_worker.adapters.ops.cuda.step_tensors import StepArrays, StepTensors, step_tensors
from naru_worker.adapters.ops.cuda.streams import Graph, Streams
from naru_worker.adapters.ops.protocol import BatchInputs, Int32Array

_log = logging.getLogger(__name__)

NUM_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Of the graphs there may be; a step computes at most a third of its rows in vain beyond eight."""
FIRST_REACH = 256
"""Tokens of context of the smallest graphs; the others reach twice as far as the one before."""
MAX_CELLS = 1 << 20
"""Rows times reach: attention keeps partial sums for each 256 of them; where there are more, kernels take longer than
their launches."""
MAX_GRAPHS = 48
MAX_GRAPH_BYTES = 1 << 30


class NoGraph(enum.Enum):
    """Why a step is launched kernel by kernel."""

    PROMPTS = "it computes prompt tokens"
    COPIES = "blocks are copied first"
    ROWS = "not every token's logits are wanted"
    HIDDEN = "its hidden states are wanted"
    TOO_MANY = "more rows than any graph has"
    TOO_LONG = "more context than any graph reaches"
    TOO_WIDE = "so many rows with so much context need too much memory"
    OFF = "there are no graphs here"


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What a graph is made for."""

    num_rows: int
    reach: int
    """Tokens that a row may see."""


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """Of one model."""

    max_rows: int
    max_reach: int
    max_graphs: int = MAX_GRAPHS
    max_bytes: int = MAX_GRAPH_BYTES


def graph_key(batch: BatchInputs, limits: GraphLimits, *, wants_hidden: bool = False) -> GraphKey | NoGraph:
    """The smallest graph that holds a step, or why there is none. Guessed tokens are rows like others."""
    num_rows = len(batch.token_ids)
    longest = int(batch.positions.max(initial=0)) + 1
    obstacles = (
        (batch.num_generated_tokens < num_rows or not num_rows, NoGraph.PROMPTS),
        (len(batch.copies) > 0, NoGraph.COPIES),
        # As many as there are tokens, ascending: all of them.
        (len(batch.logits_rows) != num_rows, NoGraph.ROWS),
        (wants_hidden, NoGraph.HIDDEN),
        (num_rows > limits.max_rows, NoGraph.TOO_MANY),
        (longest > limits.max_reach, NoGraph.TOO_LONG),
    )
    for is_there, reason in obstacles:
        if is_there:
            return reason
    key = GraphKey(rounded_rows(num_rows, limits.max_rows), rounded_reach(longest, limits.max_reach))
    return NoGraph.TOO_WIDE if key.num_rows * key.reach > MAX_CELLS else key


def rounded_rows(num_rows: int, max_rows: int) -> int:
    """Rows of the smallest graph that has so many."""
    place = bisect_left(NUM_ROWS, num_rows)
    return min(NUM_ROWS[place], max_rows) if place < len(NUM_ROWS) else max_rows


def rounded_reach(longest: int, max_reach: int) -> int:
    """Context of the smallest graph that reaches so far."""
    reach = FIRST_REACH
    while reach < longest:
        reach *= 2
    return min(reach, max_reach)


def padded(step: StepArrays, key: GraphKey, block_size: int) -> StepArrays:
    """A step of generated tokens with the shapes of its graph. Rows too many see nothing and write nowhere."""
    rows, columns = key.num_rows, -(-key.reach // block_size)
    arrays = step.arrays
    table = np.zeros((rows, columns), np.int32)
    given = arrays["generated_table"][:, :columns]
    table[: len(given), : given.shape[1]] = given
    nothing = np.zeros(0, np.int32)
    filled = {
        "token_ids": _filled(arrays["token_ids"], rows, 0),
        "positions": _filled(arrays["positions"], rows, 0),
        "slots": _filled(arrays["slots"], rows, -1),
        "logits_rows": np.arange(rows, dtype=np.int32),
        "generated_lens": _filled(arrays["generated_lens"], rows, 0),
        "generated_table": table,
        "prompt_start": np.zeros(1, np.int32),
        "prompt_lens": nothing,
        "prompt_table": np.zeros((0, columns), np.int32),
    }
    return StepArrays(filled, rows, key.reach, 0)


def _filled(values: Int32Array, count: int, rest: int) -> Int32Array:
    result = np.full(count, rest, np.int32)
    result[: len(values)] = values
    return result


NOTHING = StepArrays(
    {name: np.zeros(0, np.int32) for name in ("token_ids", "positions", "slots", "generated_lens")}
    | {"generated_table": np.zeros((0, 0), np.int32)},
    num_generated=0,
    longest_generated=0,
    longest_prompt_chunk=0,
)
"""A step of no rows, to be padded."""


class DecodeGraphs:
    """The graphs of one model. For one thread.

    The first step of a kind runs as it is, so that all kernels are compiled; the second is captured. A capture that
    fails is the last one: from then on every step is launched kernel by kernel.
    """

    def __init__(
        self,
        device: torch.device,
        streams: Streams,
        block_size: int,
        limits: GraphLimits,
        compute: Callable[[StepTensors], Tensor],
    ) -> None:
        """`compute` launches the forward pass, and returns logits."""
        self.limits = limits
        self.failure = "" if streams.can_capture else NoGraph.OFF.value
        """Why no graph is made any more; empty: they are."""
        self.num_replays = 0
        self.num_bytes = 0
        """Device memory that captures have taken."""
        self._streams = streams
        self._block_size = block_size
        self._compute = compute
        self._seen: set[GraphKey] = set()
        self._graphs: dict[GraphKey, Graph] = {}  # the one used last stands last
        self._staging: Staging | None = None
        self._device = device

    @property
    def num_graphs(self) -> int:
        """Graphs there are now."""
        return len(self._graphs)

    def launch(self, step: StepArrays, key: GraphKey) -> tuple[Callable[[], Tensor], Tensor]:
        """Launches a step; gives, to work behind it on the same stream, its logits and its tokens.

        These are (key.num_rows, vocab) and (key.num_rows,).
        """
        wide = padded(step, key, self._block_size)
        tensors = step_tensors(wide, self._place().put(wide.arrays))
        graph = self._graph(key, tensors)
        if graph is None:
            results: list[Tensor] = []
            self._streams.compute.submit(lambda: results.append(self._compute(tensors)))
            return (lambda: results[0]), tensors.token_ids
        graph.replay()
        self.num_replays += 1
        return graph.output, tensors.token_ids

    def forget(self) -> None:
        """Gives up all graphs and their inputs' place; they are made anew where steps still need them."""
        self._graphs.clear()
        self._staging = None

    def _graph(self, key: GraphKey, tensors: StepTensors) -> Graph | None:
        graph = self._graphs.pop(key, None)
        if graph is None:
            if key not in self._seen:
                self._seen.add(key)
                return None
            graph = self._captured(key, tensors)
            if graph is None:
                return None
        self._graphs[key] = graph
        return graph

    def _captured(self, key: GraphKey, tensors: StepTensors) -> Graph | None:
        if self.failure:
            return None
        if len(self._graphs) >= self.limits.max_graphs:
            self._streams.synchronize()  # it may be running
            del self._graphs[next(iter(self._graphs))]
        before = self._streams.held_bytes()
        try:
            graph = self._streams.capture(lambda: self._compute(tensors))
        except Exception as exc:
            # Whatever cannot be captured can still be launched: slower, and right.
            self._stop(f"the capture of {key.num_rows} rows failed: {type(exc).__name__}: {exc}")
            return None
        self.num_bytes += max(0, self._streams.held_bytes() - before)
        if self.num_bytes > self.limits.max_bytes:
            self._stop(f"they take {self.num_bytes} bytes, and may take {self.limits.max_bytes}")
        return graph

    def _stop(self, reason: str) -> None:
        self.failure = reason
        _log.warning("no more CUDA graphs are made: %s; such steps are launched kernel by kernel", reason)

    def _place(self) -> Staging:
        """Made with room for the largest step: should it grow, graphs would read memory that is gone."""
        if self._staging is None:
            limits = self.limits
            rows = [*(count for count in NUM_ROWS if count < limits.max_rows), limits.max_rows]
            keys = [GraphKey(count, min(limits.max_reach, max(MAX_CELLS // count, FIRST_REACH))) for count in rows]
            sizes = [staged_bytes(padded(NOTHING, key, self._block_size).arrays) for key in keys]
            self._staging = Staging(self._device, self._streams, max(sizes))
        return self._staging
