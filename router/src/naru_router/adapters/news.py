"""What workers have told this router: who holds which prefixes, how much there is to do, and how fast they are.

The links hand in frames, the fleet asks for each decision, the dispatcher notes what it sends. A worker's word counts
as long as its stream stands; what was sent to it and is not in its numbers yet is counted here, and no longer: its
frames name the newest request they count in. Event loop's thread only.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from naru_proto.v1 import worker_pb2
from naru_router.core.prefix_index import DamagedUpdate, PrefixIndex

logger = logging.getLogger(__name__)

MAX_MODELS = 10_000
"""Of one worker; what it tells of more is left out, and counted as damage."""
MAX_NAME_CHARS = 512


@dataclass(frozen=True, slots=True)
class ModelNews:
    """A model on a worker, as last told; zeros: nothing was."""

    num_running: int = 0
    num_waiting: int = 0
    num_others: int = 0
    """Requests for it that came from other routers."""
    waiting_tokens: int = 0
    """Prompt tokens that are neither cached nor computed yet, those of what was sent since among them."""
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    kv_usage: float = 0.0


NO_NEWS = ModelNews()


@dataclass(slots=True)
class _Worker:
    epoch: str = ""
    num_others: int = 0
    num_updates: int = 0
    """Of keys on this stream, by the worker's own count."""
    models: dict[str, ModelNews] = field(default_factory=dict)
    sent: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Model and tokens of requests that no frame has counted in yet, in the order they were sent."""
    sent_tokens: dict[str, int] = field(default_factory=dict)


class News:
    """All workers' news."""

    def __init__(self, index: PrefixIndex | None = None) -> None:
        self.index = PrefixIndex() if index is None else index
        self.num_damaged = 0
        """Frames, or parts of them, that could not be taken."""
        self._workers: dict[str, _Worker] = {}
        self._blamed: set[str] = set()
        """Workers whose damage was logged."""

    # --- what workers say -------------------------------------------------------------------------------------------

    def take(self, worker_id: str, frame: worker_pb2.WorkerFrame) -> None:
        """Takes a frame, in the order of its stream. Never raises: what is damaged is left out, and counted."""
        try:
            self._take(worker_id, frame)
        except Exception as exc:
            # The top of a frame: whatever is in it must not cost the requests on its stream.
            self._blame(worker_id, exc)

    def lost(self, worker_id: str) -> None:
        """Its stream is down: nothing it told counts any more, nor what was sent to it."""
        self.index.void_worker(worker_id)
        self._workers.pop(worker_id, None)

    def forget(self, worker_id: str) -> None:
        """It is no worker of this installation any more."""
        self.lost(worker_id)
        self._blamed.discard(worker_id)

    # --- what this router does --------------------------------------------------------------------------------------

    def sent(self, worker_id: str, request_id: str, model: str, num_tokens: int) -> None:
        """A request is on its way, with 0 or more prompt tokens to compute, as expected. Its id is the stream's."""
        worker = self._workers.setdefault(worker_id, _Worker())
        if request_id in worker.sent:
            _settle(worker, request_id)
        worker.sent[request_id] = (model, num_tokens)
        worker.sent_tokens[model] = worker.sent_tokens.get(model, 0) + num_tokens

    def settled(self, worker_id: str, request_id: str) -> None:
        """A request has had output, has ended, or was taken back: it is counted here no longer. As often as liked."""
        worker = self._workers.get(worker_id)
        if worker is not None and request_id in worker.sent:
            _settle(worker, request_id)

    # --- what is asked ----------------------------------------------------------------------------------------------

    def load(self, worker_id: str, model: str) -> ModelNews:
        """A model's load on a worker."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return NO_NEWS
        told = worker.models.get(model, NO_NEWS)
        num_sent = worker.sent_tokens.get(model)
        if not num_sent:
            return told
        return ModelNews(  # dataclasses.replace takes three times as long, and each request asks for each worker
            told.num_running,
            told.num_waiting,
            told.num_others,
            told.waiting_tokens + num_sent,
            told.prefill_tokens_per_s,
            told.decode_step_s,
            told.kv_usage,
        )

    def num_others(self, worker_id: str) -> int:
        """Requests on a worker, of any model, that came from other routers."""
        worker = self._workers.get(worker_id)
        return 0 if worker is None else worker.num_others

    def epoch(self, worker_id: str) -> str:
        """The worker's life that its last frame named; empty: none has come on this stream."""
        worker = self._workers.get(worker_id)
        return "" if worker is None else worker.epoch

    def matches(self, model: str, keys: Sequence[bytes]) -> Mapping[str, int]:
        """How many leading keys of a prompt each worker holds; those that hold none are left out."""
        return self.index.match(model, keys)

    # --- parts ------------------------------------------------------------------------------------------------------

    def _take(self, worker_id: str, frame: worker_pb2.WorkerFrame) -> None:
        worker = self._workers.get(worker_id)
        if worker is None:
            worker = self._workers[worker_id] = _Worker(frame.epoch)
        elif frame.epoch != worker.epoch:
            if worker.epoch:
                self.index.void_worker(worker_id)
                worker.models.clear()
            worker.epoch = frame.epoch
        if frame.HasField("load"):
            self._take_load(worker_id, worker, frame.load)
        for update in frame.route_keys:
            self._take_keys(worker_id, worker, update)

    def _take_load(self, worker_id: str, worker: _Worker, load: worker_pb2.Load) -> None:
        worker.num_others = max(0, load.num_others)
        for each in load.models:
            name = each.model
            news = _read_load(each)
            if news == NO_NEWS:
                worker.models.pop(name, None)
            elif len(name) > MAX_NAME_CHARS or (name not in worker.models and len(worker.models) >= MAX_MODELS):
                self._blame(worker_id, ValueError(f"too many models, or a long name: {name[:80]!r}"))
            else:
                worker.models[name] = news
        if load.last_request_id in worker.sent:
            while _settle(worker, next(iter(worker.sent))) != load.last_request_id:
                pass

    def _take_keys(self, worker_id: str, worker: _Worker, update: worker_pb2.RouteKeyUpdate) -> None:
        try:
            if update.number:
                self._count(worker_id, worker, update.number)
            if len(update.model) > MAX_NAME_CHARS:
                raise DamagedUpdate(f"a model's name of {len(update.model)} characters")
            self.index.update(
                worker_id,
                update.model,
                update.epoch,
                is_snapshot=update.is_snapshot,
                added=update.added,
                removed=update.removed,
            )
        except DamagedUpdate as exc:
            self._blame(worker_id, exc)

    def _count(self, worker_id: str, worker: _Worker, number: int) -> None:
        """Sees that no update is missing or comes twice: keys that may be wrong are not used.

        Raises:
            DamagedUpdate: it came before.
        """
        last = worker.num_updates
        if number <= last:
            raise DamagedUpdate(f"update {number} came behind {last}")
        worker.num_updates = number
        if number > last + 1:
            self.index.void_worker(worker_id)
            self._blame(worker_id, DamagedUpdate(f"update {number} came next to {last}"))

    def _blame(self, worker_id: str, exc: Exception) -> None:
        self.num_damaged += 1
        if worker_id not in self._blamed:
            self._blamed.add(worker_id)
            logger.warning("worker %s tells what cannot be: %s; more of it is only counted", worker_id, exc)


def _settle(worker: _Worker, request_id: str) -> str:
    model, num_tokens = worker.sent.pop(request_id)
    left = worker.sent_tokens.get(model, 0) - num_tokens
    if left:
        worker.sent_tokens[model] = left
    else:
        worker.sent_tokens.pop(model, None)
    return request_id


def _read_load(each: worker_pb2.ModelLoad) -> ModelNews:
    """Numbers as they may be: what is below 0 or no number counts as unknown."""
    return ModelNews(
        max(0, each.num_running),
        max(0, each.num_waiting),
        max(0, each.num_others),
        max(0, each.waiting_tokens),
        _sound(each.prefill_tokens_per_s),
        _sound(each.decode_step_s),
        min(1.0, _sound(each.kv_usage)),
    )


def _sound(value: float) -> float:
    return value if value > 0.0 and math.isfinite(value) else 0.0
