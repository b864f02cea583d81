"""The load of a worker's models in numbers, looked at once for all streams.

Kept by the teller. A number that a stream was told counts in every request that came on it before the look.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from naru_proto.v1 import worker_pb2
from naru_worker.adapters.engine.loaded import LoadedModel
from naru_worker.adapters.engine.resident import Resident
from naru_worker.adapters.server.board import RequestBoard
from naru_worker.adapters.server.stream import DeltaStream


class ModelNumbers(NamedTuple):
    """One model's; see `naru.v1.ModelLoad`."""

    num_running: int = 0
    num_waiting: int = 0
    num_others: int = 0
    waiting_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    kv_usage: float = 0.0


class _Own(NamedTuple):
    """What of the numbers is one stream's own, at the same instant."""

    newest_id: str
    num_requests: int
    counts: Mapping[str, int]


_NONE = _Own("", 0, {})


class ModelLoads:
    """Numbers of the last look. `num_others` counts the requests of all streams; a stream takes its own off."""

    def __init__(self, board: RequestBoard, streams: Collection[DeltaStream]) -> None:
        self._board = board
        self._streams = streams
        self.models: dict[str, ModelNumbers] = {}
        self.num_running = self.num_waiting = self.num_requests = 0
        self.kv_usage = 0.0
        self._own: dict[DeltaStream, _Own] = {}

    def look(self, residents: Collection[Resident]) -> None:
        """Looks at engines, streams and the board. `residents`: models on this worker."""
        counts: dict[str, int] = {}
        for stream in self._streams:
            for name, count in stream.counts.items():
                counts[name] = counts.get(name, 0) + count
        self.models = {name: ModelNumbers(0, count, count) for name, count in counts.items()}
        for resident in residents:
            if resident.model is not None:
                self.models[resident.name] = self._numbers(resident, resident.model, counts.get(resident.name, 0))
        for name, num_tokens in self._board.early_tokens.items():
            numbers = self.models.get(name)
            if numbers is not None:
                self.models[name] = numbers._replace(waiting_tokens=numbers.waiting_tokens + num_tokens)
        self._own = {s: _Own(s.last_request_id, len(s.live), dict(s.counts)) for s in self._streams}
        self.num_requests = sum(len(stream.live) for stream in self._streams)
        engines = [resident.model.engine.stats for resident in residents if resident.model is not None]
        self.num_running = sum(stats.num_running for stats in engines)
        self.num_waiting = sum(stats.num_waiting for stats in engines)
        self.kv_usage = max((stats.kv_usage_ratio for stats in engines), default=0.0)

    def counted_id(self, stream: DeltaStream) -> str:
        """The newest request of a stream that the numbers count in."""
        return self._own.get(stream, _NONE).newest_id

    def num_others(self, stream: DeltaStream) -> int:
        """Requests of all models that came on other streams."""
        return self.num_requests - self._own.get(stream, _NONE).num_requests

    def for_stream(self, stream: DeltaStream) -> dict[str, ModelNumbers]:
        """All models' numbers as one stream is told them."""
        own = self._own.get(stream, _NONE).counts
        return {
            name: numbers._replace(num_others=numbers.num_others - own[name]) if name in own else numbers
            for name, numbers in self.models.items()
        }

    @staticmethod
    def _numbers(resident: Resident, model: LoadedModel, num_requests: int) -> ModelNumbers:
        # What is on its way to the engine is counted before the engine's own numbers are read: twice for a moment where
        # the engine takes it in between, and never not at all.
        num_posted_tokens = model.posted_tokens()
        stats = model.engine.stats
        return ModelNumbers(
            stats.num_running,
            stats.num_waiting + resident.entry.num_held,
            num_requests,
            num_posted_tokens + stats.num_waiting_tokens,
            _rounded(stats.prefill_tokens_per_s),
            _rounded(stats.decode_step_s),
            round(stats.kv_usage_ratio, 3),
        )


def fill_model_load(message: worker_pb2.ModelLoad, name: str, numbers: ModelNumbers) -> None:
    """Writes one model's numbers into an empty message."""
    message.model = name
    message.num_running = numbers.num_running
    message.num_waiting = numbers.num_waiting
    message.num_others = numbers.num_others
    message.waiting_tokens = numbers.waiting_tokens
    message.prefill_tokens_per_s = numbers.prefill_tokens_per_s
    message.decode_step_s = numbers.decode_step_s
    message.kv_usage = numbers.kv_usage


def _rounded(value: float) -> float:
    """To three digits: a rate that hardly moves is no news."""
    return float(f"{value:.3g}")
