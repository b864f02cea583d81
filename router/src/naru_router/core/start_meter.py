"""How long requests wait for their turn on a worker, by how fast earlier ones got theirs.

A queue's tokens divided by the prefill rate say it where prompts are what takes the time. Where answers fill the worker
and a request starts when another one ends, they say far too little. The fleet keeps one meter for each pair of worker
and model, tells it of this router's requests, and puts `wait_s` into its views. Time is passed in.

    wait = work that waits ÷ (work that started ÷ time during which some waited)
    work of a request = its uncached tokens + a constant, as one without any has its turn as well

Only time with somebody waiting counts, so that a quiet hour is not taken for a slow worker; older time counts less.
"""

from __future__ import annotations

REQUEST_TOKENS = 32
"""What a request weighs beside its tokens."""
_HALF_LIFE_S = 10.0
"""Of time during which some waited."""
_MIN_BUSY_S = 0.5
_MIN_STARTS = 4


class StartMeter:
    """One model on one worker. Mutable."""

    def __init__(self) -> None:
        self.num_waiting = 0
        """Requests of this router without output."""
        self._waiting_work = 0
        self._started_work = 0.0
        self._busy_s = 0.0
        self._num_starts = 0
        self._seen_s = 0.0

    def sent(self, num_tokens: int, now_s: float) -> None:
        """A request goes there, with so many uncached tokens as expected."""
        self._pass(now_s)
        self.num_waiting += 1
        self._waiting_work += num_tokens + REQUEST_TOKENS

    def started(self, num_tokens: int, now_s: float) -> None:
        """Its first output is here; the same number as it was sent with."""
        self.ended(num_tokens, now_s)
        self._started_work += num_tokens + REQUEST_TOKENS
        self._num_starts += 1

    def ended(self, num_tokens: int, now_s: float) -> None:
        """It has ended without output."""
        self._pass(now_s)
        self.num_waiting -= 1
        self._waiting_work -= num_tokens + REQUEST_TOKENS

    @property
    def wait_s(self) -> float:
        """For a request that is sent now; 0: none waits, or too little has been seen."""
        if not self.num_waiting or self._num_starts < _MIN_STARTS or self._busy_s < _MIN_BUSY_S:
            return 0.0
        return self._waiting_work * self._busy_s / self._started_work

    def _pass(self, now_s: float) -> None:
        passed_s = max(0.0, now_s - self._seen_s)
        self._seen_s = now_s
        if self.num_waiting:
            keep = 0.5 ** (passed_s / _HALF_LIFE_S)
            self._started_work *= keep
            self._busy_s = self._busy_s * keep + passed_s
