"""All links to workers: opened and closed as the route map changes, counted for routing.

The registry reader applies each new map; the dispatcher surveys who can serve a model and waits for changes here.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from naru_proto.errors import NaruError
from naru_proto.names import WORKER_LEASE_TTL_S
from naru_proto.registry import WorkerRecord
from naru_proto.v1 import worker_pb2
from naru_router.adapters.health import Health, Incarnation
from naru_router.adapters.metrics import Metrics
from naru_router.adapters.news import News
from naru_router.adapters.worker_link import WorkerLink
from naru_router.core.holding import Absence, Holder, Nearness, absence, nearness
from naru_router.core.pending_keys import PendingKeys
from naru_router.core.retry import FailureKind
from naru_router.core.route_map import RouteMap
from naru_router.core.routing.model import WorkerView
from naru_router.core.tenant_queues import TenantQueues

logger = logging.getLogger(__name__)

PROBE_INTERVAL_S = 1.0
"""How often a worker without a lease is asked whether it lives, while requests are open on it."""


@dataclass(frozen=True, slots=True)
class Survey:
    """Who can serve a model at this instant, or soon."""

    candidates: tuple[Holder, ...]
    """Connected, not excluded, and not known to lack the model. Where one is ready, the ready ones alone."""
    num_pending: int
    """Not connected yet, or still on an older generation."""
    num_unaware: int
    """Said that they do not know the model, and may be told of it yet."""
    is_known: bool
    """The registry has the model: the control plane wants it to be served."""
    failures: tuple[str, ...]
    """Why some have failed to load it."""


class Fleet:
    """Links by worker id."""

    def __init__(self, *, id_prefix: str, metrics: Metrics, news: News | None = None) -> None:
        self.route_map = RouteMap(is_read=False)
        self.seed = b""
        """Of hash rings; the same in all routers of an installation. Empty until the first reading."""
        self.news = news or News()
        self.health = Health(metrics)
        self.pending = PendingKeys()
        self.queues = TenantQueues()
        self._id_prefix = id_prefix
        self._metrics = metrics
        self._links: dict[str, WorkerLink] = {}
        self._retired: dict[asyncio.Task[None], WorkerLink] = {}
        """Links that take no more requests, by the task that sees them out."""
        self._absences: dict[tuple[Incarnation, str], tuple[Absence, float]] = {}
        """What workers said that they do not know, and until when that is believed."""
        self._held: dict[str, Counter[str]] = {}
        """Worker id to model to the requests that wait there for the model to be loaded."""
        self._change = asyncio.Event()
        self._num_links = 0
        self._others = metrics.others_in_flight
        self._shown = (0, 0)
        """Damaged news and dropped keys that the metrics count already."""

    def apply(self, route_map: RouteMap) -> None:
        """Takes a new map: links to new workers open, those of lost leases take no more requests."""
        self.route_map = route_map
        for worker_id, record in route_map.workers.items():
            link = self._links.get(worker_id)
            if link is not None and link.address != record.address:
                self._retire(worker_id)
                link = None
            if link is None:
                self._open(worker_id, record.address)
        for worker_id in self._links.keys() - route_map.workers.keys():
            logger.info("worker %s has lost its lease", worker_id)
            self._retire(worker_id)
        self._absences = {key: it for key, it in self._absences.items() if self._is_absent(*key)}
        self._show_news()
        living = {(worker_id, record.epoch) for worker_id, record in route_map.workers.items()}
        self.health.keep(living, route_map.models)
        self._notify()

    def survey(self, model: str, excluded: frozenset[Incarnation] = frozenset()) -> Survey:
        """Asks the map and the links who can serve a model."""
        ready = [self._holder(record, Nearness.READY, model) for record in self.ready(model, excluded)]
        wanted = self.route_map.models.get(model)
        is_known = wanted is not None
        if ready:
            return Survey(tuple(ready), 0, 0, is_known, ())
        candidates = []
        num_pending = num_unaware = 0
        for record in self.route_map.workers.values():
            incarnation = (record.worker_id, record.epoch)
            near = nearness(record, wanted) if wanted is not None else None
            if near is None or incarnation in excluded:
                continue
            if self._is_absent(incarnation, model):
                num_unaware += not self._absences[incarnation, model][0].was_ready
            elif near is Nearness.OUTDATED or not self._links[record.worker_id].is_up:
                num_pending += 1
            else:
                candidates.append(self._holder(record, near, model))
        return Survey(tuple(candidates), num_pending, num_unaware, is_known, tuple(self.route_map.failures(model)))

    def ready(self, model: str, excluded: frozenset[Incarnation] = frozenset()) -> list[WorkerRecord]:
        """Workers that have a model ready, are connected, not excluded, and did not say that they lack it."""
        return [
            record
            for record in self.route_map.ready_workers(model)
            if self._links[record.worker_id].is_up and self._is_open(record, model, excluded)
        ]

    def views(self, model: str, records: Sequence[WorkerRecord]) -> list[WorkerView]:
        """What routing may know of workers that have a model ready."""
        health, news, now_s = self.health, self.news, self.health.clock()
        found = []
        for record in records:
            worker_id = record.worker_id
            told = news.load(worker_id, model)
            condition = health.condition((worker_id, record.epoch), model, now_s)
            link = self._links[worker_id]
            found.append(
                WorkerView(
                    worker_id,
                    link.num_open(model) + told.num_others,
                    link.num_in_flight + news.num_others(worker_id),
                    told.waiting_tokens,
                    told.prefill_tokens_per_s,
                    told.decode_step_s,
                    is_leaving=record.leaving,
                    is_suspect=condition.is_suspect,
                    is_probe=condition.is_probe,
                    observed_wait_s=condition.observed_wait_s,
                )
            )
        return found

    def matches(self, model: str, keys: tuple[bytes, ...]) -> Mapping[str, int]:
        """How many leading keys of a prompt each worker holds, or is computing for this router."""
        return self.pending.with_pending(keys, self.news.matches(model, keys))

    def link(self, worker_id: str) -> tuple[WorkerLink, Incarnation]:
        """The link of a surveyed candidate, and which life of the worker it leads to."""
        return self._links[worker_id], (worker_id, self.route_map.workers[worker_id].epoch)

    def is_back(self, incarnation: Incarnation, life: object) -> bool:
        """Whether a worker that lost its stream has another one since, of the same life of the worker."""
        link, record = self._links.get(incarnation[0]), self.route_map.workers.get(incarnation[0])
        return link is not None and record is not None and link.is_up and link.life is not life

    def is_ready(self, worker_id: str, model: str) -> bool:
        """Whether the map has the model ready on the worker."""
        return any(record.worker_id == worker_id for record in self.route_map.ready_workers(model))

    def mark_not_loaded(self, incarnation: Incarnation, model: str) -> None:
        """Notes that a worker does not know a model, until its lease has had time to say so, or says otherwise."""
        record = self.route_map.workers.get(incarnation[0])
        if record is not None:
            until_s = time.monotonic() + WORKER_LEASE_TTL_S
            self._absences[incarnation, model] = (absence(record, model), until_s)

    @contextlib.contextmanager
    def holding(self, worker_id: str, model: str) -> Iterator[None]:
        """While it lasts, a request waits on the worker for the model to be loaded; others follow it there."""
        held = self._held.setdefault(worker_id, Counter())
        held[model] += 1
        try:
            yield
        finally:
            held[model] -= 1
            if not held[model]:
                del held[model]
            if not held:
                self._held.pop(worker_id, None)

    def _holder(self, record: WorkerRecord, near: Nearness, model: str) -> Holder:
        held = self._held.get(record.worker_id, Counter())
        num_in_flight = self._links[record.worker_id].num_in_flight
        return Holder(record.worker_id, near, num_in_flight, len(held), held[model], record.leaving)

    def _is_open(self, record: WorkerRecord, model: str, excluded: frozenset[Incarnation]) -> bool:
        incarnation = (record.worker_id, record.epoch)
        return incarnation not in excluded and not self._is_absent(incarnation, model)

    def _is_absent(self, incarnation: Incarnation, model: str) -> bool:
        noted = self._absences.get((incarnation, model))
        record = self.route_map.workers.get(incarnation[0])
        if noted is None or record is None:
            return False
        said, until_s = noted
        return time.monotonic() < until_s and said.holds_for(record, model)

    def num_up(self) -> int:
        """Links that stand."""
        return sum(link.is_up for link in self._links.values())

    async def changed(self, timeout_s: float) -> None:
        """Returns at the next change of the map or of a link, or after the time."""
        with contextlib.suppress(TimeoutError):  # the caller looks at its own deadline
            async with asyncio.timeout(timeout_s):
                await self._change.wait()

    def fail_all(self, error: NaruError) -> None:
        """Ends every open request with an error that is not tried again."""
        for link in [*self._links.values(), *self._retired.values()]:
            link.fail_all(error, FailureKind.SHUTDOWN, is_retryable=False)
        self._notify()

    async def close(self) -> None:
        """Closes all links."""
        for worker_id in list(self._links):
            self._retire(worker_id)
        retired = dict(self._retired)
        await asyncio.gather(*(link.close() for link in retired.values()), *retired)

    def _open(self, worker_id: str, address: str) -> None:
        def take_news(_: str, frame: worker_pb2.WorkerFrame) -> None:
            # What a forerunner says whose requests are seen out is no news of its successor.
            if self._links.get(worker_id) is link:
                self._take_news(worker_id, frame)

        self._num_links += 1
        self._metrics.worker_up.labels(worker_id).set(0)
        link = self._links[worker_id] = WorkerLink(
            worker_id,
            address,
            id_prefix=f"{self._id_prefix}-{self._num_links}",
            on_change=functools.partial(self._link_changed, worker_id),
            on_news=take_news,
            metrics=self._metrics,
        )

    def _take_news(self, worker_id: str, frame: worker_pb2.WorkerFrame) -> None:
        self.news.take(worker_id, frame)
        if not frame.HasField("load"):
            return
        self._others.labels(worker_id).set(frame.load.num_others)
        record = self.route_map.workers.get(worker_id)
        if record is not None and frame.load.models:
            known = self.route_map.models
            steps = [(each.model, each.decode_step_s) for each in frame.load.models if each.model in known]
            self.health.told_steps((worker_id, record.epoch), steps)
            self.health.review()

    def _show_news(self) -> None:
        """Brings the series about what workers told up to now."""
        news, metrics, (num_damaged, num_dropped) = self.news, self._metrics, self._shown
        metrics.route_keys.set(news.index.num_keys)
        metrics.damaged_news.inc(news.num_damaged - num_damaged)
        metrics.dropped_route_keys.inc(news.index.num_dropped - num_dropped)
        self._shown = news.num_damaged, news.index.num_dropped

    def _link_changed(self, worker_id: str) -> None:
        link = self._links.get(worker_id)
        is_up = link is not None and link.is_up
        self._metrics.worker_up.labels(worker_id).set(is_up)
        if not is_up:
            self.news.lost(worker_id)
            self._others.labels(worker_id).set(0)
        self._notify()

    def _retire(self, worker_id: str) -> None:
        link = self._links.pop(worker_id)
        self.news.lost(worker_id)
        task = asyncio.create_task(self._see_out(link))
        self._retired[task] = link
        task.add_done_callback(lambda _: self._retired.pop(task))

    async def _see_out(self, link: WorkerLink) -> None:
        """Closes a link when its last request has ended or its worker is gone.

        Without a lease the requests may still end well: only Redis may have lost sight of the worker.
        """
        while link.num_in_flight and await link.answers():
            await self.changed(PROBE_INTERVAL_S)
        await link.close()
        if link.worker_id not in self._links:
            self.news.forget(link.worker_id)
            self._metrics.forget_worker(link.worker_id)

    def _notify(self) -> None:
        change, self._change = self._change, asyncio.Event()
        change.set()
