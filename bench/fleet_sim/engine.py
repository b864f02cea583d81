"""One simulated engine: continuous batching with chunked prefill over a paged prefix cache, in virtual time.

Called by the fleet. Requests begin in the order they come; the steps of one batch share decodes and prompt chunks.
Steps in which nothing can change are taken together, so that an hour of traffic is seconds of work. Not simulated:
preemption (a request begins when all the blocks it will ever need are there), and attention's growth with length.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping

from bench.fleet_sim.cache import PrefixCache
from bench.fleet_sim.machines import Machine
from bench.fleet_sim.prompts import BLOCK_TOKENS, RouteKey
from bench.fleet_sim.reports import Report, Reports
from bench.fleet_sim.requests import Request
from bench.sim.clock import Event, InvariantViolation, Simulation

RATE_MEMORY = 0.8
"""Of measured rates: the weight of what was measured before."""


class Engine:
    """Mutable."""

    def __init__(
        self,
        sim: Simulation,
        name: str,
        machine: Machine,
        key_of_block: Mapping[int, RouteKey],
        on_first_token: Callable[[Request], None],
        on_end: Callable[[Request], None],
    ) -> None:
        self.name = name
        self.machine = machine
        self.cache = PrefixCache(machine.cache_tokens // BLOCK_TOKENS, key_of_block)
        self.reports = Reports()
        self.waiting: deque[Request] = deque()
        self.prefilling: list[Request] = []
        self.num_waiting_tokens = 0
        """Prompt tokens that are neither cached nor computed, of all requests here; as matched at their arrival."""
        self.busy_s = 0.0
        self._sim = sim
        self._on_first_token = on_first_token
        self._on_end = on_end
        self._decoding: list[tuple[int, int, Request]] = []
        self._num_steps = 0
        self._step_end: Event | None = None
        self._pure_decode_from_s = 0.0
        self._uncached: dict[int, int] = {}
        self._origins: dict[tuple[int, str], int] = {}
        self._prefill_rate = 0.0
        self._decode_step_s = 0.0
        self._draining_rate = 0.0
        self._begun_s = self._step_s = 0.0

    @property
    def num_decoding(self) -> int:
        """Sequences that get a token in each step."""
        return len(self._decoding)

    @property
    def num_alive(self) -> int:
        """Requests here, waiting or running."""
        return len(self.waiting) + len(self.prefilling) + len(self._decoding)

    def steps_until_places(self, num_places: int) -> int:
        """Steps until so many of the decoding sequences have ended."""
        if num_places <= 0 or not self._decoding:
            return 0
        ends = heapq.nsmallest(num_places, self._decoding)
        return max(0, ends[-1][0] - self._num_steps)

    def computed_since_step(self, now_s: float) -> float:
        """Prompt tokens of the steps under way that are done by now."""
        return self._draining_rate * (now_s - self._begun_s) if self._step_end is not None else 0.0

    def arrive(self, request: Request) -> None:
        """A request has come over the network."""
        self.waiting.append(request)
        uncached = request.prompt.num_tokens - self._match(request) * BLOCK_TOKENS
        self._uncached[request.number] = uncached
        self.num_waiting_tokens += uncached
        origin = (request.router, request.prompt.model)
        self._origins[origin] = self._origins.get(origin, 0) + 1
        if self._step_end is None:
            self._begin_step()
        elif self._pure_decode_from_s >= 0.0:
            self._cut_decode()
        self._report()

    # --- steps

    def _begin_step(self) -> None:
        """Plans the next step, or as many as are alike."""
        self._step_end, self._pure_decode_from_s = None, -1.0
        room = self.machine.max_step_tokens - len(self._decoding)
        chunks = self._plan_chunks(room)
        step_s = self.machine.decode_step_s(len(self._decoding))
        if not chunks:
            if not self._decoding:
                if self.waiting:
                    raise InvariantViolation(f"{self.name}: {len(self.waiting)} requests wait for an idle engine")
                self._draining_rate = 0.0
                return
            num_steps = self._decoding[0][0] - self._num_steps
            self._pure_decode_from_s = self._sim.now_s
            self._plan_end(num_steps, step_s, {})
            return
        num_tokens = sum(chunks.values())
        step_s += num_tokens / self.machine.prefill_tokens_per_s
        self._plan_end(self._num_alike(chunks, room), step_s, chunks)

    def _plan_chunks(self, room: int) -> dict[Request, int]:
        """Prompt tokens of each request in the next step, the oldest request first."""
        chunks: dict[Request, int] = {}
        for request in self.prefilling:
            if room <= 0:
                return chunks
            chunks[request] = min(room, request.prompt.num_tokens - request.num_computed)
            room -= chunks[request]
        while room > 0 and self.waiting and self._admit(self.waiting[0]):
            request = self.waiting.popleft()
            self.prefilling.append(request)
            chunks[request] = min(room, request.prompt.num_tokens - request.num_computed)
            room -= chunks[request]
        return chunks

    def _num_alike(self, chunks: dict[Request, int], room: int) -> int:
        """Steps that only go on with one long prompt, until a sequence or the prompt ends."""
        if len(chunks) > 1:
            return 1
        ((request, chunk),) = chunks.items()
        left = request.prompt.num_tokens - request.num_computed
        if chunk < room or left <= chunk:
            return 1
        num_steps = (left - 1) // chunk
        if self._decoding:
            num_steps = min(num_steps, self._decoding[0][0] - self._num_steps)
        return max(1, num_steps)

    def _plan_end(self, num_steps: int, step_s: float, chunks: dict[Request, int]) -> None:
        self._draining_rate = sum(chunks.values()) / step_s
        self._step_s, self._begun_s = step_s, self._sim.now_s
        self._step_end = self._sim.after(num_steps * step_s, lambda: self._end_steps(num_steps, step_s, chunks))
        self._report()

    def _cut_decode(self) -> None:
        """A request has come while only decodes run: it joins after the step under way."""
        assert self._step_end is not None
        done = int((self._sim.now_s - self._begun_s) / self._step_s) + 1
        end_s = self._begun_s + done * self._step_s
        if end_s < self._step_end.time_s - self._step_s / 2:
            step_s = self._step_s
            self._step_end.cancel()
            self._step_end = self._sim.at(end_s, lambda: self._end_steps(done, step_s, {}))

    def _end_steps(self, num_steps: int, step_s: float, chunks: dict[Request, int]) -> None:
        self._num_steps += num_steps
        self.busy_s += num_steps * step_s
        self._measure(step_s, chunks)
        for request, chunk in chunks.items():
            self._compute(request, num_steps * chunk)
        while self._decoding and self._decoding[0][0] <= self._num_steps:
            self._end(heapq.heappop(self._decoding)[2])
        self._begin_step()
        self._report()

    def _measure(self, step_s: float, chunks: dict[Request, int]) -> None:
        """Rates as a worker measures them: prompt tokens by time of the steps that had some."""
        if chunks:
            rate = sum(chunks.values()) / step_s
            self._prefill_rate = _mix(self._prefill_rate, rate) if sum(chunks.values()) >= 64 else self._prefill_rate
        else:
            self._decode_step_s = _mix(self._decode_step_s, step_s)

    # --- one request

    def _match(self, request: Request) -> int:
        """Known blocks; the last token is always computed."""
        return self.cache.match(request.prompt.blocks, (request.prompt.num_tokens - 1) // BLOCK_TOKENS)

    def _admit(self, request: Request) -> bool:
        if len(self.prefilling) + len(self._decoding) >= self.machine.max_sequences:
            return False
        prompt, cache = request.prompt, self.cache
        num_known = self._match(request)
        num_total = -(-(prompt.num_tokens + request.turn.num_answer_tokens) // BLOCK_TOKENS)
        if num_total > cache.num_blocks:
            raise InvariantViolation(f"request {request.number} needs {num_total} blocks of {cache.num_blocks}")
        if not cache.has_room(prompt.blocks, num_known, num_total):
            return False
        cache.acquire(prompt.blocks, num_known, num_total, self._sim.now_s)
        request.held = list(prompt.blocks[:num_known])
        request.num_private = num_total - num_known
        request.num_cached_tokens = request.num_computed = num_known * BLOCK_TOKENS
        self._set_uncached(request, prompt.num_tokens - request.num_computed)
        return True

    def _set_uncached(self, request: Request, num_tokens: int) -> None:
        self.num_waiting_tokens += num_tokens - self._uncached[request.number]
        self._uncached[request.number] = num_tokens

    def _compute(self, request: Request, num_tokens: int) -> None:
        prompt = request.prompt
        first = request.num_computed // BLOCK_TOKENS
        request.num_computed += num_tokens
        self._set_uncached(request, prompt.num_tokens - request.num_computed)
        self._store(request, prompt.blocks[first : request.num_computed // BLOCK_TOKENS], is_prompt=True)
        if request.num_computed < prompt.num_tokens:
            return
        self.prefilling.remove(request)
        request.first_token_s = self._sim.now_s
        self._on_first_token(request)
        if request.turn.num_answer_tokens == 1:
            self._end(request)
        else:
            end = self._num_steps + request.turn.num_answer_tokens - 1
            heapq.heappush(self._decoding, (end, request.number, request))

    def _store(self, request: Request, blocks: tuple[int, ...], *, is_prompt: bool) -> None:
        stored = self.cache.store(blocks, self._sim.now_s, is_prompt=is_prompt)
        request.held += stored
        request.num_private -= len(stored)

    def _end(self, request: Request) -> None:
        self._store(request, request.turn.answer_blocks[len(request.prompt.blocks) :], is_prompt=False)
        self.cache.release(request.held, request.num_private)
        request.ended_s = self._sim.now_s
        del self._uncached[request.number]
        self._origins[request.router, request.prompt.model] -= 1
        self._on_end(request)

    def _report(self) -> None:
        self.reports.add(
            Report(
                self._sim.now_s,
                len(self.prefilling) + len(self._decoding),
                len(self.waiting),
                self.num_waiting_tokens,
                self._draining_rate,
                self.cache.usage,
                self._prefill_rate,
                self._decode_step_s,
                tuple(self._origins.items()),
            )
        )


def _mix(old: float, new: float) -> float:
    return new if old == 0.0 else RATE_MEMORY * old + (1 - RATE_MEMORY) * new
