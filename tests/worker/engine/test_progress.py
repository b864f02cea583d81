"""How much longer a fetch takes is told by the pace of what is being counted, once there is a pace."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from naru_worker.adapters.engine.progress import PACE_S, progress_of
from naru_worker.adapters.engine.resident import Progress, Resident
from naru_worker.core.residency import ModelState

MB = 10**6


class Fetch:
    """A model that is being fetched since second 0."""

    def __init__(self) -> None:
        entry = cast(Any, SimpleNamespace(state=ModelState.FETCHING))
        self.resident = Resident("m", entry, began_s=0.0)

    async def tell(self, now_s: float, done_mb: int, total_mb: int) -> float:
        """Seconds left, as told just then."""
        self.resident.tell(Progress(ModelState.FETCHING, done_mb * MB, total_mb * MB), now_s)
        return self.eta_s(now_s)

    def eta_s(self, now_s: float) -> float:
        return progress_of(cast(Any, None), self.resident, now_s).eta_s


async def test_the_first_bytes_alone_tell_nothing() -> None:
    fetch = Fetch()
    await fetch.tell(0.0, 0, 100)
    assert await fetch.tell(2.0, 1, 100) == 0.0, "not 198 s"
    assert await fetch.tell(2.5, 25, 100) == pytest.approx(7.5)


async def test_a_slow_fetch_is_known_after_a_while() -> None:
    fetch = Fetch()
    await fetch.tell(0.0, 0, 1000)
    assert await fetch.tell(PACE_S, 10, 1000) == pytest.approx(99 * PACE_S)
    assert fetch.eta_s(2 * PACE_S) == pytest.approx(198 * PACE_S), "nothing came since"


async def test_each_part_is_told_by_its_own_pace() -> None:
    fetch = Fetch()
    await fetch.tell(0.0, 0, 84)
    await fetch.tell(60.0, 84, 84)
    assert await fetch.tell(60.0, 0, 92) == 0.0
    assert await fetch.tell(61.0, 46, 92) == pytest.approx(1.0), "packing, not another 61 s"


async def test_what_an_earlier_try_has_left_is_not_this_ones_pace() -> None:
    fetch = Fetch()
    await fetch.tell(0.0, 500, 1000)
    assert await fetch.tell(10.0, 600, 1000) == pytest.approx(40.0)
