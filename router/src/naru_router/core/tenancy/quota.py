"""One router's part of one tenant's quota: what it may still give out, and what it must tell the others. Pure.

Redis keeps the sum; routers take shares ahead of use and tell what was used. A share counts as used up everywhere from
the moment it is taken, and what was really used for a whole window after it was told: the sum is never too small. What
is not told in time counts as used. The same books serve a limit on requests in flight, whose window is empty.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

WINDOW_S = 60.0
BUCKET_S = 1.0
"""Use is forgotten in steps of this size, late rather than early."""
SHARE_TTL_S = 6.0
"""A share that is not renewed for so long counts as used; one of requests in flight ends."""
RENEW_S = 2.0
TELL_S = 0.5
"""Use is told after so long; until then it counts as part of the share."""
LEAST_PAUSE_S = 0.05
IDLE_S = 1.0
"""A share that nobody has used for so long goes back."""
AHEAD_S = 1.0
"""A share is as much as was used in about so long."""
MAX_SHARE = 0.125
"""Of a limit divided by the living routers: the most that is taken without somebody waiting for it."""
ASK_AGAIN_S = 0.1
"""A limit that was found exhausted is believed for so long."""
NEVER_S = -math.inf


@dataclass(frozen=True, slots=True)
class Ask:
    """What to tell and ask the others. Every number is absolute, so that a lost reply costs nothing."""

    sequence: int
    """Grows with each of this router's; an older one that comes late is void."""
    used_total: int
    """Ever, by this router."""
    told_total: int
    """Of that, what the last answered one told."""
    held: int
    """Given out to requests that run, and not given out."""
    want: int
    """More than that; at least 0."""
    need: int = 1
    """The least that would be of use."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the sum allows."""

    held: int
    """What this router may hold from now on."""
    used: int
    """By all, in the window."""
    held_by_others: int
    retry_s: float
    """Until what is needed is free; 0: it is."""
    reset_s: float
    """Until all that was used is forgotten."""


@dataclass(slots=True)
class Share:
    """The books of one quota. Mutable; times are of one monotonic clock."""

    limit: int
    is_level: bool = False
    """A limit on what is in use at once: nothing is ever used up."""
    spare: int = 0
    """Of the share, not given out; below 0 where more was used than had been reserved."""
    reserved: int = 0
    """Given out to requests that run."""
    used_total: int = 0
    told_total: int = 0
    asked_s: float = NEVER_S
    """When the last answered ask was sent."""
    answer: Answer | None = None
    """The last one."""
    exhausted_until_s: float = NEVER_S
    touched_s: float = NEVER_S
    """When something was last given out or asked for."""
    rate_per_s: float = 0.0
    """Of what is given out, averaged."""
    rated_s: float = NEVER_S
    given: int = 0
    """Since `rated_s`."""
    waiting: int = 0
    """What waits for a share."""
    need: int = 1
    """The least that one of these takes."""
    recent: deque[tuple[float, int]] = field(default_factory=deque)
    """This router's own use in the window, by bucket."""

    def take(self, amount: int, now_s: float) -> bool:
        """Gives out of the share; False: it is too small, or too old to be ours."""
        self.touched_s = now_s
        if now_s - self.asked_s >= SHARE_TTL_S or self.spare < amount:
            return False
        self._give(amount)
        return True

    def take_apart(self, amount: int, now_s: float, num_routers: int) -> bool:
        """Gives out while the sum cannot be had: an equal part of what was left, then of the limit.

        Less than one for each router is rounded up to one.
        """
        self.touched_s = now_s
        if amount > self.room_apart(now_s, num_routers):
            return False
        self._give(amount)
        return True

    def room_apart(self, now_s: float, num_routers: int) -> int:
        """What may be given out without the sum."""
        routers = max(1, num_routers)
        own = 0 if self.is_level else self.used_in_window(now_s)
        room = max(1, self.limit // routers) - own - self.reserved
        last = self.answer
        if last is not None and not self.is_level and now_s - self.asked_s < WINDOW_S:
            left = max(0, self.limit - last.used) // routers
            room = min(room, left - (self.used_total - self.told_total) - self.reserved)
        return room

    def settle(self, reserved: int, used: int, now_s: float) -> None:
        """A request that had `reserved` has used `used`; what is left of it can be given out again."""
        self.reserved -= reserved
        self.spare += reserved
        if self.is_level:
            return
        self.spare -= used
        self.used_total += used
        bucket_s = math.floor(now_s / BUCKET_S) * BUCKET_S
        if self.recent and self.recent[-1][0] == bucket_s:
            self.recent[-1] = (bucket_s, self.recent[-1][1] + used)
        elif used:
            self.recent.append((bucket_s, used))

    def used_in_window(self, now_s: float) -> int:
        """This router's own use."""
        while self.recent and now_s - self.recent[0][0] > WINDOW_S + BUCKET_S:
            self.recent.popleft()
        return sum(used for _, used in self.recent)

    def ask(self, now_s: float, num_routers: int, sequence: int) -> Ask:
        """What to send now. What goes back is not ours from this moment on."""
        self._rate(now_s)
        if now_s - self.asked_s >= SHARE_TTL_S:
            self.spare = -self.reserved  # the others take it as used, or as free
        wanted = self.waiting
        if self.waiting or now_s - self.touched_s < IDLE_S:
            wanted += self._target(num_routers)
        self.spare = min(self.spare, wanted)
        held = max(0, self.reserved + self.spare)
        return Ask(sequence, self.used_total, self.told_total, held, max(0, self.reserved + wanted - held), self.need)

    def is_due(self, now_s: float, num_routers: int) -> bool:
        """Whether something is to be told or asked for."""
        if self.waiting:
            return True
        since_s = now_s - self.asked_s
        if since_s < LEAST_PAUSE_S:
            return False
        if self.used_total != self.told_total and since_s >= TELL_S:
            return True
        is_idle, target = now_s - self.touched_s >= IDLE_S, self._target(num_routers)
        if self.spare > 0 and (is_idle or (self.spare > 2 * target and since_s >= TELL_S)):
            return True
        if not is_idle and now_s >= self.exhausted_until_s and 2 * self.spare < target:
            return True
        return (self.reserved > 0 or self.spare > 0) and since_s >= RENEW_S

    def is_spent(self) -> bool:
        """Whether nothing of it would be missed."""
        return not (self.waiting or self.reserved or self.spare > 0 or self.used_total != self.told_total)

    def answered(self, ask: Ask, answer: Answer, asked_s: float, now_s: float) -> None:
        """Takes an answer; what was given out and used since it was asked for is counted against it."""
        used_since = self.used_total - ask.used_total
        self.spare = answer.held - self.reserved - used_since
        self.told_total = ask.used_total
        self.asked_s = asked_s
        self.answer = answer
        is_short = ask.want > 0 and answer.held < ask.held + ask.want
        self.exhausted_until_s = now_s + ASK_AGAIN_S if is_short else NEVER_S

    def retry_s(self, now_s: float) -> float:
        """Seconds until it may be worth to ask again, as far as is known; above 0."""
        last = self.answer
        if last is not None and last.retry_s > 0:
            return max(ASK_AGAIN_S, last.retry_s - (now_s - self.asked_s))
        return 1.0

    def remaining(self, now_s: float) -> int:
        """What all callers together may still use, as far as is known."""
        since_s = now_s - self.asked_s
        last = self.answer
        if last is None or since_s >= WINDOW_S:
            used = self.reserved + (0 if self.is_level else self.used_in_window(now_s))
        else:
            used = last.used + last.held_by_others + self.reserved + self.used_total - self.told_total
        return min(self.limit, max(0, self.limit - used))

    def reset_s(self, now_s: float) -> float:
        """Seconds until all of the limit is there again, if nothing more is used."""
        if self.is_level:
            return 0.0
        last_s = self.recent[-1][0] + WINDOW_S + BUCKET_S - now_s if self.recent else 0.0
        if self.answer is not None:
            last_s = max(last_s, self.answer.reset_s - (now_s - self.asked_s))
        return max(0.0, last_s)

    def _target(self, num_routers: int) -> int:
        """What should be there ahead of use."""
        most = int(self.limit * MAX_SHARE / max(1, num_routers))
        return min(math.ceil(self.rate_per_s * AHEAD_S), most)

    def _give(self, amount: int) -> None:
        self.spare -= amount
        self.reserved += amount
        self.given += amount

    def _rate(self, now_s: float) -> None:
        elapsed_s = now_s - self.rated_s
        if elapsed_s < 0.1:
            return
        fresh = self.given / elapsed_s if math.isfinite(elapsed_s) else 0.0
        self.rate_per_s = fresh if elapsed_s > AHEAD_S else 0.5 * (self.rate_per_s + fresh)
        self.rated_s, self.given = now_s, 0
