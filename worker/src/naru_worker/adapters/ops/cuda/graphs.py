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

from naru_worker.adapters.ops.cuda.staging import Staging
from naru_worker.adapters.ops.cuda.step_tensors import StepArrays, StepTensors
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
    most_run_rows: int
    """Most rows of a sequence that are computed together."""


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """Of one model."""

    max_rows: int
    max_reach: int
    max_graphs: int = MAX_GRAPHS
    max_bytes: int = MAX_GRAPH_BYTES


def graph_key(
    batch: BatchInputs, step: StepArrays, limits: GraphLimits, *, wants_hidden: bool = False
) -> GraphKey | NoGraph:
    """The smallest graph that holds a step, or why there is none. Guessed tokens are rows like others."""
    num_rows, longest = len(batch.token_ids), step.longest_generated
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
    reach = rounded_reach(longest, limits.max_reach)
    key = GraphKey(rounded_rows(num_rows, limits.max_rows), reach, step.most_run_rows)
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


_STAGED = ("token_ids", "positions", "slots", "generated_lens", "run_start", "run_lines")
"""A graph's inputs, one behind the other: a row more than it has is for the end of the last run."""


def staged_words(num_rows: int) -> int:
    """int32s of each of a graph's inputs, whole 16 bytes of them."""
    return -(-(num_rows + 1) // 4) * 4


def fill_padded(words: Int32Array, step: StepArrays, num_rows: int) -> None:
    """Writes a step of generated tokens with the shape of its graph. Rows too many see nothing and write nowhere.

    Args:
        words: (6, staged_words) in the order of `_STAGED`. Mutated, whole.
        step: Of generated tokens alone.
        num_rows: Of the graph.
    """
    arrays = step.arrays
    words.fill(0)
    for i, name in enumerate(_STAGED):
        words[i, : len(arrays[name])] = arrays[name]
    count, num_runs = len(arrays["token_ids"]), len(arrays["run_lines"])
    words[2, count:] = -1
    # Each of those rows is a run, so that somebody gives it zeros; runs too many have no rows.
    ends = words[4, num_runs + 1 : num_rows + 1]
    ends[:] = num_rows
    ends[: num_rows - count] = np.arange(count + 1, num_rows + 1)


class DecodeGraphs:
    """The graphs of one model. For one thread.

    The first step of a kind runs as it is, so that all kernels are compiled; the second is captured. A capture that
    fails is the last one: from then on every step is launched kernel by kernel.
    """

    def __init__(
        self,
        device: torch.device,
        streams: Streams,
        table: Tensor,
        limits: GraphLimits,
        compute: Callable[[StepTensors], Tensor],
    ) -> None:
        """Makes none yet.

        Args:
            device: Where steps are computed.
            streams: Of that device.
            table: Block tables of all sequences; it stays where it is.
            limits: Of the model.
            compute: Launches the forward pass, and returns logits.
        """
        self.limits = limits
        self.failure = "" if streams.can_capture else NoGraph.OFF.value
        """Why no graph is made any more; empty: they are."""
        self.num_replays = 0
        self.num_bytes = 0
        """Device memory that captures have taken."""
        self._streams = streams
        self._table = table
        self._compute = compute
        self._seen: set[GraphKey] = set()
        self._graphs: dict[GraphKey, Graph] = {}  # the one used last stands last
        self._inputs: dict[GraphKey, StepTensors] = {}
        # With room for the largest step: should it grow, graphs would read memory that is gone.
        self._staging = Staging(device, streams, input_bytes(limits.max_rows))
        self._nothing = torch.zeros(1, dtype=torch.int32, device=device)
        self._iota = torch.arange(limits.max_rows, dtype=torch.int32, device=device)

    @property
    def num_graphs(self) -> int:
        """Graphs there are now."""
        return len(self._graphs)

    def launch(self, step: StepArrays, key: GraphKey) -> tuple[Callable[[], Tensor], Tensor]:
        """Launches a step; gives, to work behind it on the same stream, its logits and its tokens.

        These are (key.num_rows, vocab) and (key.num_rows,).
        """
        num_bytes = input_bytes(key.num_rows)
        words = self._staging.begin(num_bytes)[:num_bytes].view(np.int32)
        fill_padded(words.reshape(len(_STAGED), -1), step, key.num_rows)
        staged = self._staging.finish(num_bytes)
        tensors = self._inputs.get(key)
        if tensors is None:
            tensors = self._inputs[key] = self._tensors(key, staged.view(torch.int32).view(len(_STAGED), -1))
        graph = self._graph(key, tensors)
        if graph is None:
            results: list[Tensor] = []
            self._streams.compute.submit(lambda: results.append(self._compute(tensors)))
            return (lambda: results[0]), tensors.token_ids
        graph.replay()
        self.num_replays += 1
        return graph.output, tensors.token_ids

    def close(self) -> None:
        """Gives up all graphs and whatever they read. No step is launched any more."""
        self._graphs.clear()
        self._inputs.clear()
        for name in ("_staging", "_table", "_nothing", "_iota"):
            self.__dict__.pop(name, None)

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

    def _tensors(self, key: GraphKey, words: Tensor) -> StepTensors:
        """The inputs of a graph where they are staged."""
        rows, nothing = key.num_rows, self._nothing
        staged = {name: words[i, : rows + (name == "run_start")] for i, name in enumerate(_STAGED)}
        return StepTensors(
            **staged,
            logits_rows=self._iota[:rows],
            prompt_start=nothing,
            prompt_lens=nothing[:0],
            prompt_table=nothing[:0].view(0, 1),
            generated_table=self._table,
            num_generated=rows,
            longest_generated=key.reach,
            most_run_rows=key.most_run_rows,
            longest_prompt_chunk=0,
        )


def input_bytes(num_rows: int) -> int:
    """Of a graph's inputs that are sent with each step."""
    return 4 * len(_STAGED) * staged_words(num_rows)
