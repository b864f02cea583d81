"""Naru itself: the router's real index, books of what is pending, and `route`, on what workers tell by then.

Called by the fleet. Load comes with the frames of each step, route keys as they enter and leave a cache; what a router
has sent since is added from its own books. Left out of the real router: sessions, priorities, circuits, tenants.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from bench.fleet_sim.cache import KeyLog
from bench.fleet_sim.policies.policy import Policy, Surroundings
from bench.fleet_sim.prompts import RouteKey
from bench.fleet_sim.reports import Report
from bench.fleet_sim.requests import Request

from naru_proto.route_keys import pack_keys
from naru_router.core.pending_keys import PendingKeys
from naru_router.core.prefix_index import PrefixIndex
from naru_router.core.routing.model import RouteRequest, WorkerView
from naru_router.core.routing.ring import route_key
from naru_router.core.routing.route import route

SEED = b"fleet"


class KeyStream:
    """Mutable: takes one worker's changes to the index, as its updates would."""

    def __init__(self, worker_id: str, log: KeyLog, key_of_block: Mapping[int, RouteKey], index: PrefixIndex) -> None:
        self._worker_id = worker_id
        self._log = log
        self._key_of_block = key_of_block
        self._index = index
        self._num_read = 0

    def read(self, until_s: float) -> None:
        """Takes what has come by then."""
        times_s, changes = self._log.times_s, self._log.changes
        added: dict[str, list[bytes]] = {}
        removed: dict[str, list[bytes]] = {}
        while self._num_read < len(times_s) and times_s[self._num_read] <= until_s:
            entered, block = changes[self._num_read]
            model, key = self._key_of_block[block]
            if not entered and added:
                # An update's removals are applied first, so none may come after an addition.
                self._update(added, removed)
            (added if entered else removed).setdefault(model, []).append(key)
            self._num_read += 1
        self._update(added, removed)

    def _update(self, added: dict[str, list[bytes]], removed: dict[str, list[bytes]]) -> None:
        for model in dict.fromkeys((*removed, *added)):
            self._index.update(
                self._worker_id,
                model,
                0,
                is_snapshot=self._index.epoch(self._worker_id, model) is None,
                added=pack_keys(added.get(model, ())),
                removed=pack_keys(removed.get(model, ())),
            )
        added.clear()
        removed.clear()


def ring_key(request: Request) -> bytes:
    """As the router makes it: the chat up to its first user message."""
    messages = request.prompt.messages
    first = next((index for index, message in enumerate(messages) if message.role == "user"), len(messages) - 1)
    return route_key(request.prompt.model, [message.text for message in messages[: first + 1]])


class Naru(Policy):
    """One router."""

    def __init__(self, around: Surroundings) -> None:
        super().__init__(around)
        self.index = PrefixIndex()
        self._pending = PendingKeys()
        self._streams = [
            KeyStream(engine.name, engine.cache.keys, engine.cache.key_of_block, self.index)
            for engine in around.engines
        ]
        self._sent: list[deque[tuple[float, int]]] = [deque() for _ in around.engines]
        """(when it is there, uncached tokens as expected) of requests that the last report may not count."""
        self._open: list[dict[str, int]] = [{} for _ in around.engines]
        """This router's open requests by model."""
        self._turn = 0

    def choose(self, request: Request, candidates: Sequence[int], now_s: float) -> int:
        """What the real router decides."""
        self._turn += 1
        decision = route([self._view(request, worker, now_s) for worker in candidates], self._ask(request, now_s))
        worker = next(index for index in candidates if self.around.engines[index].name == decision.worker_id)
        request.expected_cached_tokens = decision.expected_cached_tokens
        uncached = request.prompt.num_tokens - decision.expected_cached_tokens
        self._sent[worker].append((now_s + self.around.network_s, uncached))
        model = request.prompt.model
        self._open[worker][model] = self._open[worker].get(model, 0) + 1
        self._pending.add(str(request.number), decision.worker_id, request.prompt.keys)
        return worker

    def on_first_token(self, request: Request, now_s: float) -> None:
        """From now on the worker tells its keys."""
        self._pending.remove(str(request.number), request.prompt.keys)

    def on_end(self, request: Request, now_s: float) -> None:
        """It is over."""
        self._open[request.worker][request.prompt.model] -= 1

    def _ask(self, request: Request, now_s: float) -> RouteRequest:
        prompt = request.prompt
        for stream in self._streams:
            stream.read(now_s - self.around.network_s)
        cached_keys = self._pending.with_pending(prompt.keys, self.index.match(prompt.model, prompt.keys))
        return RouteRequest(
            ring_key(request),
            prompt.num_tokens,
            prompt.key_tokens,
            seed=SEED,
            turn=self._turn,
            cached_keys=cached_keys,
        )

    def _view(self, request: Request, worker: int, now_s: float) -> WorkerView:
        around, model = self.around, request.prompt.model
        report = around.pushed(worker, now_s)
        return WorkerView(
            around.engines[worker].name,
            num_in_flight=self._open[worker].get(model, 0) + report.alive_of_others(around.router, model),
            num_in_flight_all=around.in_flight[worker] + report.alive_of_others(around.router),
            waiting_tokens=int(report.waiting_tokens_at(now_s - around.network_s))
            + self._unseen_tokens(worker, report, now_s),
            prefill_tokens_per_s=report.prefill_tokens_per_s,
            decode_step_s=report.decode_step_s,
        )

    def _unseen_tokens(self, worker: int, report: Report, now_s: float) -> int:
        sent = self._sent[worker]
        while sent and sent[0][0] <= min(report.time_s, now_s):
            sent.popleft()
        return sum(tokens for _, tokens in sent)


class NaruHashing(Naru):
    """The same router when nobody tells it of caches, loads and rates: consistent hashing with bounded loads."""

    def _view(self, request: Request, worker: int, now_s: float) -> WorkerView:
        name = self.around.engines[worker].name
        return WorkerView(name, num_in_flight=self._open[worker].get(request.prompt.model, 0))

    def _ask(self, request: Request, now_s: float) -> RouteRequest:
        return RouteRequest(ring_key(request), seed=SEED)
