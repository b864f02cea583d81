"""The engine of a model that does not generate: inputs of many requests computed together, each answered by itself.

The engine loop owns it and calls it in its thread. What runs together is decided by `core.batching`; what it runs is a
runner of `batch_runner`. A batch that fails is tried again one input at a time, so that a bad one costs its own request
alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from naru_proto.errors import InternalError, InvalidRequest, NaruError, Overloaded
from naru_worker.adapters.engine.batch_request import BatchInput, BatchRequest
from naru_worker.adapters.engine.batch_runner import Array, EncoderInput, EncoderRunner, TensorRunner
from naru_worker.adapters.engine.deltas import Outbox, SequenceDelta, UsageCounts
from naru_worker.adapters.engine.key_news import KeyNews
from naru_worker.adapters.engine.stats import EngineStats
from naru_worker.adapters.engine.task_output import NamedArray, TaskOutput, Vector
from naru_worker.adapters.memory.kv_space import KVSpace
from naru_worker.adapters.ops.protocol import DeviceFault, FloatArray
from naru_worker.core.batching import BatchItem, BatchLimits, BatchQueue
from naru_worker.core.kv_stats import KVStats
from naru_worker.core.request import FinishReason, Request, RequestId
from naru_worker.core.step_rates import StepRates

_log = logging.getLogger(__name__)

MAX_WAITING_INPUTS = 1 << 16
"""Of one model; requests that bring more are refused as overload."""
MAX_WAITING_BYTES = 1 << 29
"""Of their tensors, likewise; one request alone may have more."""
LIKE_SIZE_WINDOW = 4
"""Batches' worth of texts among which those of like length are computed together."""
Result = FloatArray | tuple[NamedArray, ...]


class Batches(Protocol):
    """Runs inputs of one group together."""

    counts_tokens: bool
    """Whether sizes are tokens, for the usage."""

    def run(self, inputs: Sequence[BatchInput], outputs: Sequence[str]) -> Sequence[Result]:
        """One result for each input. Blocks; may raise anything."""


class EncoderBatches:
    """Over texts."""

    counts_tokens = True

    def __init__(self, runner: EncoderRunner) -> None:
        self._runner = runner

    def run(self, inputs: Sequence[BatchInput], outputs: Sequence[str]) -> Sequence[Result]:
        """One vector for each."""
        values = [each.value for each in inputs]
        rows = self._runner.encode([value for value in values if isinstance(value, EncoderInput)])
        return list(rows)


class TensorBatches:
    """Over tensors, joined along their first dimension where that is one of rows."""

    counts_tokens = False

    def __init__(self, runner: TensorRunner, output_names: Sequence[str] = ()) -> None:
        """`output_names`: given where none is asked for; none: all."""
        self._runner = runner
        self._output_names = tuple(output_names)

    def run(self, inputs: Sequence[BatchInput], outputs: Sequence[str]) -> Sequence[Result]:
        """All wanted outputs for each.

        Raises:
            InternalError: an output has not as many rows as the inputs.
        """
        outputs = outputs or self._output_names
        values = [each.value for each in inputs if isinstance(each.value, Mapping)]
        if len(values) == 1:
            return [_named(self._runner.infer(values[0], outputs))]
        joined = {name: np.concatenate([value[name] for value in values]) for name in values[0]}
        found = self._runner.infer(joined, outputs)
        ends = np.cumsum([each.rows for each in inputs])
        for name, array in found.items():
            if not array.ndim or len(array) != ends[-1]:
                raise InternalError(f"output {name!r} has shape {array.shape} for {ends[-1]} rows")
        # Copies: a small answer must not keep the whole batch in memory.
        return [
            _named({name: array[end - each.rows : end].copy() for name, array in found.items()})
            for each, end in zip(inputs, ends, strict=True)
        ]


@dataclass(slots=True, eq=False)
class _Open:
    """A request that has inputs waiting."""

    request: BatchRequest
    arrived_s: float
    first_key: int
    results: dict[int, Result] = field(default_factory=dict)
    """By the place of the input."""

    @property
    def keys(self) -> range:
        """Of all its inputs."""
        return range(self.first_key, self.first_key + len(self.request.inputs))


class BatchEngine:
    """One model's requests from submission to their last delta: a `SteppedEngine`. Not thread-safe, but for `stats`."""

    kv_space: KVSpace | None = None
    kv_committed_bytes = 0

    def __init__(self, batches: Batches, limits: BatchLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.stats = EngineStats(num_blocks=0)
        self.key_news = KeyNews()
        self._batches = batches
        self._clock = clock
        self._queue = BatchQueue(limits)
        self._open: dict[RequestId, _Open] = {}
        self._owners: dict[int, _Open] = {}
        """By the key of a waiting input."""
        self._num_keys = 0
        self._num_bytes = 0
        """Of all requests that are not answered."""
        self._rates = StepRates()

    @property
    def has_work(self) -> bool:
        """Whether a batch is to run now."""
        due_s = self._queue.due_s
        return due_s is not None and self._clock() >= due_s

    @property
    def wake_s(self) -> float | None:
        """When a batch is due though more might come; None: nothing waits."""
        return self._queue.due_s

    def queue_age_s(self) -> float:
        """How long ago the request of the next input arrived; 0: none waits."""
        first = self._queue.first
        return 0.0 if first is None else self._clock() - self._owners[first.key].arrived_s

    def trim_kv(self, num_bytes: int) -> int:
        """There is nothing to give up."""
        return 0

    def rest(self) -> None:
        """Nothing is kept between batches."""

    def kv_stats(self) -> KVStats:
        """There are no blocks."""
        return KVStats(0, 0, 0, 0, 0, 0)

    def submit(self, request: Request, arrived_s: float, outbox: Outbox) -> None:
        """Refuses a request for text; the server has looked before."""
        error = InvalidRequest("this model does not generate text", param="model")
        self._refuse(request.request_id, error, outbox)

    def submit_batch(self, request: BatchRequest, arrived_s: float, outbox: Outbox) -> None:
        """Takes a request; what is wrong with it becomes its last delta."""
        num_bytes = sum(each.num_bytes for each in request.inputs)
        is_full = len(self._queue) + len(request.inputs) > MAX_WAITING_INPUTS
        if is_full or (self._open and self._num_bytes + num_bytes > MAX_WAITING_BYTES):
            error = Overloaded(f"{len(self._queue)} inputs wait for this model already; ask again later")
            self._refuse(request.request_id, error, outbox)
            return
        self._num_bytes += num_bytes
        owner = _Open(request, arrived_s, self._num_keys)
        self._num_keys += len(request.inputs)
        self._open[request.request_id] = owner
        now_s = self._clock()
        for key, each, arrival in zip(owner.keys, request.inputs, request.arrivals, strict=True):
            self._owners[key] = owner
            self._queue.add(BatchItem(key, (request.priority, arrival), now_s, each.size, each.rows, each.group))
        self.stats.num_taken += 1
        self._refresh(())

    def cancel(self, request_id: RequestId, error: NaruError | None, outbox: Outbox) -> None:
        """Ends a request, as cancelled or with `error`; an unknown or finished one is ignored."""
        owner = self._open.get(request_id)
        if owner is None:
            return
        reason = FinishReason.CANCELLED if error is None else None
        self._end(owner, SequenceDelta(request_id, finish_reason=reason, error=error, is_last=True), outbox)
        self._refresh(())

    def step(self, outbox: Outbox, *, is_alone: bool = True, before_long: Callable[[], object] | None = None) -> None:
        """One batch, where one is due. A fault ends requests at most, and is not raised.

        Raises:
            DeviceFault: nothing more can be computed by this process.
        """
        started_s = self._clock()
        items = self._queue.plan(started_s).items
        if not items:
            return
        for item in items:
            self._queue.remove(item.key)
        self._refresh(items)
        inputs = [self._input(item.key) for item in items]
        if before_long is not None:
            before_long()
        try:
            results = self._batches.run(inputs, self._owners[items[0].key].request.outputs)
            assert len(results) == len(items), "a result for each input"
        except DeviceFault:
            raise  # nothing more can be computed here: the loop ends, and the process with it
        except Exception as exc:
            # The top of a batch: a fault must cost the input that is to blame, not the model.
            self._fail(items, exc, outbox)
        else:
            now_s = self._clock()
            self._measure(items, started_s, now_s)
            for item, result in zip(items, results, strict=True):
                self._take(item.key, result, now_s, outbox)
        self._refresh(())

    def _input(self, key: int) -> BatchInput:
        owner = self._owners[key]
        return owner.request.inputs[key - owner.first_key]

    def _take(self, key: int, result: Result, now_s: float, outbox: Outbox) -> None:
        owner = self._owners.pop(key)
        owner.results[key - owner.first_key] = result
        request = owner.request
        if len(owner.results) < len(request.inputs):
            return
        size = request.size if self._batches.counts_tokens else 0
        self.stats.prompt_tokens += size
        delta = SequenceDelta(
            request.request_id,
            finish_reason=FinishReason.STOP,
            usage=UsageCounts(size, 0, 0),
            is_last=True,
            output=_output(owner),
        )
        self._end(owner, delta, outbox)
        self.stats.e2e_s.observe(now_s - owner.arrived_s)

    def _fail(self, items: Sequence[BatchItem], exc: Exception, outbox: Outbox) -> None:
        self.stats.num_failed_steps += 1
        if len(items) > 1:
            _log.warning("a batch of %d inputs failed and is tried one by one: %s", len(items), exc)
            for item in items:
                self._queue.add(replace(item, group=("alone", item.key), has_run=True))
            return
        if isinstance(exc, NaruError):
            error: NaruError = exc
        else:
            _log.error("an input failed", exc_info=exc)
            error = InternalError(f"the model failed on it ({type(exc).__name__}); the worker's log has the reason")
        owner = self._owners[items[0].key]
        self._end(owner, SequenceDelta(owner.request.request_id, error=error, is_last=True), outbox)

    def _end(self, owner: _Open, delta: SequenceDelta, outbox: Outbox) -> None:
        """Forgets a request and all that waits of it."""
        del self._open[owner.request.request_id]
        self._num_bytes -= sum(each.num_bytes for each in owner.request.inputs)
        for key in owner.keys:
            if self._owners.pop(key, None) is not None:
                self._queue.remove(key)
        outbox.append(delta)
        self._count_end(delta)

    def _refuse(self, request_id: RequestId, error: NaruError, outbox: Outbox) -> None:
        delta = SequenceDelta(request_id, error=error, is_last=True)
        outbox.append(delta)
        self._count_end(delta)
        self.stats.num_taken += 1

    def _count_end(self, delta: SequenceDelta) -> None:
        reason = "error" if delta.finish_reason is None else delta.finish_reason.value
        self.stats.finished[reason] = self.stats.finished.get(reason, 0) + 1

    def _measure(self, items: Sequence[BatchItem], started_s: float, now_s: float) -> None:
        stats, size = self.stats, sum(item.size for item in items)
        stats.num_steps += 1
        stats.step_s.observe(now_s - started_s)
        stats.batch_rows.observe(sum(item.rows for item in items))
        for item in items:
            stats.batch_wait_s.observe(started_s - item.since_s)
        stats.prefilled_tokens += size
        self._rates.observe(size, 0, now_s - started_s)
        stats.prefill_tokens_per_s = self._rates.prefill_tokens_per_s

    def _refresh(self, running: Sequence[BatchItem]) -> None:
        stats = self.stats
        stats.num_running = len(running)
        stats.num_waiting = len(self._queue)
        stats.num_waiting_tokens = self._queue.total_size


def encoder_engine(runner: EncoderRunner, *, max_batch_size: int, max_batch_delay_s: float) -> BatchEngine:
    """The engine of a model that gives texts a vector or a score."""
    limits = BatchLimits(max_batch_size, max_batch_delay_s, runner.max_num_tokens, window=LIKE_SIZE_WINDOW)
    return BatchEngine(EncoderBatches(runner), limits)


def tensor_engine(runner: TensorRunner, limits: BatchLimits, output_names: Sequence[str] = ()) -> BatchEngine:
    """The engine of a model of tensors. `output_names`: given where a request names none."""
    return BatchEngine(TensorBatches(runner, output_names), limits)


def _named(arrays: Mapping[str, Array]) -> tuple[NamedArray, ...]:
    return tuple(NamedArray(name, values) for name, values in arrays.items())


def _output(owner: _Open) -> TaskOutput:
    """Of a request whose results are all there."""
    inputs, results = owner.request.inputs, owner.results
    if isinstance(results[0], tuple):
        return TaskOutput(arrays=results[0])
    rows = [results[index] for index in range(len(inputs))]
    return TaskOutput(
        vectors=tuple(
            Vector(index, row, each.size)
            for index, (row, each) in enumerate(zip(rows, inputs, strict=True))
            if not isinstance(row, tuple)
        )
    )
