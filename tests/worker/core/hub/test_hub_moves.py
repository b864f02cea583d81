"""Moves of known models: nearer and farther by the orders there are, which stay; what is refused changes nothing."""

from __future__ import annotations

import random

import pytest

from naru_proto.errors import InvalidRequest, LoadError, ModelNotFound, NaruError, StaleCommand, Unavailable
from naru_worker.core.hub.actions import Changed, Load
from naru_worker.core.hub.config import HubConfig
from naru_worker.core.hub.events import Ask, Move, Release
from naru_worker.core.hub.model import Footprint, ModelEntry, Residency, Tier
from naru_worker.core.hub.testing import VirtualWorker
from naru_worker.core.hub.testing_memory import Luck
from naru_worker.core.residency import ModelState

CONFIG = HubConfig(budget_bytes=250, host_budget_bytes=1000, high_watermark=1.0, low_watermark=1.0)
UP = Move("a", Tier.ACTIVE)


def make_worker(luck: Luck | None = None) -> VirtualWorker:
    """Room for two models; it knows `a`."""
    made = VirtualWorker(
        CONFIG,
        lambda name: Footprint(name, 90, 5, 0, 5),
        chance=random.Random(0),
        luck=luck or Luck(fetch_s=0.2, load_s=0.2, unload_s=0.1, request_s=5.0),
    )
    made.ask(Ask("a", 3, "spec", Tier.COLD, 5, Residency(priority=7)))
    return made


def entry(worker: VirtualWorker, name: str = "a") -> ModelEntry:
    found = worker.hub.entry(name)
    assert found is not None
    return found


def refused(worker: VirtualWorker, move: Move, error: type[NaruError]) -> str:
    before = repr(list(worker.hub.entries())), worker.hub.memory
    with pytest.raises(error) as caught:
        worker.move(move)
    assert (repr(list(worker.hub.entries())), worker.hub.memory) == before
    return caught.value.message


@pytest.mark.parametrize(("tier", "state"), [(Tier.HOST, ModelState.HOST), (Tier.COLD, ModelState.COLD)])
def test_a_known_model_comes_up_and_goes_down_and_its_orders_stay(tier: Tier, state: ModelState) -> None:
    worker = make_worker()
    worker.move(UP)
    worker.run_until_quiet()
    assert entry(worker).state is ModelState.READY
    worker.move(Move("a", tier))
    worker.run_until_quiet()
    assert entry(worker).state is state
    found = entry(worker)
    assert (found.generation, found.spec, found.tier, found.residency.priority) == (3, "spec", Tier.COLD, 7)


def test_it_says_that_it_was_moved_and_not_that_requests_or_orders_did_it() -> None:
    worker = make_worker()
    worker.move(UP)
    worker.run_until_quiet()
    words = " ".join(worker.hub.explain("a", worker.now_s))
    assert "Generation 3 asks for tier COLD" in words and "It was moved to tier ACTIVE since" in words
    assert "requests came for it" not in words
    changes = [action.reason for _, action in worker.log if isinstance(action, Changed)]
    assert changes[0] == "it is moved to tier ACTIVE" and not any("asks for it" in reason for reason in changes)
    worker.ask(Ask("a", 4, "other", Tier.ACTIVE))
    worker.run_until_quiet()
    worker.move(Move("a", Tier.HOST))
    worker.run_until_quiet()
    words = " ".join(worker.hub.explain("a", worker.now_s))
    assert "It was moved to tier HOST since" in words and "by the worker's own decision" not in words
    worker.ask(Ask("a", 5, "other", Tier.ACTIVE))
    worker.run_until_quiet()
    assert "moved" not in " ".join(worker.hub.explain("a", worker.now_s))


def test_an_order_that_is_told_again_does_not_take_down_what_a_move_has_raised() -> None:
    worker = make_worker()
    worker.move(UP)
    worker.run_until_quiet()
    worker.ask(Ask("a", 3, "spec", Tier.COLD, 0, Residency(priority=8)))
    worker.run_until_quiet()
    assert entry(worker).state is ModelState.READY


def test_a_move_that_repeats_itself_loads_once() -> None:
    worker = make_worker()
    worker.move(UP)
    worker.run(0.1)
    worker.move(UP)
    worker.run_until_quiet()
    worker.move(UP)
    assert sum(isinstance(action, Load) for _, action in worker.log) == 1


def test_a_model_that_is_not_known_or_was_forgotten_is_not_found() -> None:
    worker = make_worker()
    assert "'b' is not known" in refused(worker, Move("b", Tier.ACTIVE), ModelNotFound)
    worker.release(Release("a", 4))
    assert "'a' is not known" in refused(worker, UP, ModelNotFound)


def test_tokens_order_the_moves_of_one_model_and_those_of_others_do_not_count() -> None:
    worker = make_worker()
    worker.ask(Ask("b", 1, "spec", Tier.COLD))
    worker.move(Move("a", Tier.ACTIVE, 9))
    assert "fencing token 8" in refused(worker, Move("a", Tier.COLD, 8), StaleCommand)
    worker.move(Move("b", Tier.ACTIVE, 8))
    worker.move(Move("a", Tier.COLD, 9))
    worker.move(Move("a", Tier.ACTIVE))  # who holds no lease is not ordered by one
    refused(worker, Move("a", Tier.COLD, 8), StaleCommand)


def test_a_model_with_requests_goes_down_only_where_that_was_meant() -> None:
    worker = make_worker()
    worker.move(UP)
    worker.run_until_quiet()
    number = worker.request("a")
    message = refused(worker, Move("a", Tier.HOST, only_if_idle=True), Unavailable)
    assert "1 requests in flight" in message
    worker.move(Move("a", Tier.ACTIVE, only_if_idle=True))  # where it is: nothing to refuse
    worker.move(Move("a", Tier.HOST, drain_timeout_s=60.0))
    worker.run_until_quiet()
    assert worker.outcomes[number] == "served" and entry(worker).state is ModelState.HOST


def test_requests_that_wait_for_it_count_too() -> None:
    worker = make_worker()
    worker.request("a")
    worker.run(0.05)
    assert "1 requests" in refused(worker, Move("a", Tier.COLD, only_if_idle=True), Unavailable)


def test_a_pinned_model_stays_where_its_order_put_it() -> None:
    worker = make_worker()
    worker.ask(Ask("b", 1, "spec", Tier.ACTIVE, 0, Residency(pinned=True)))
    worker.run_until_quiet()
    assert "pinned" in refused(worker, Move("b", Tier.COLD), Unavailable)


def test_a_model_that_fails_is_not_tried_before_its_time_and_falls_back_to_its_order() -> None:
    worker = make_worker()
    worker.failing.add("a")
    worker.move(UP)
    worker.run(0.3)
    assert entry(worker).state is ModelState.FAILED
    assert "failed here" in refused(worker, UP, Unavailable)
    worker.failing.clear()
    worker.run(CONFIG.backoff_expires_s + 1.0)
    assert entry(worker).state is ModelState.COLD  # nobody but the mover wanted it up
    worker.move(UP)
    worker.run_until_quiet()
    assert entry(worker).state is ModelState.READY


def test_what_never_fits_is_refused_with_the_numbers() -> None:
    worker = VirtualWorker(CONFIG, lambda name: Footprint(name, 900, 5, 0, 5), chance=random.Random(0))
    worker.ask(Ask("a", 1, "spec", Tier.HOST))
    worker.run_until_quiet()
    assert "910 bytes" in refused(worker, UP, LoadError)


@pytest.mark.parametrize("move", [Move("a", Tier.ACTIVE, -1), Move("a", Tier.COLD, drain_timeout_s=float("nan"))])
def test_numbers_that_make_no_sense_are_refused(move: Move) -> None:
    refused(make_worker(), move, InvalidRequest)


def test_moving_down_a_model_that_is_coming_up_stops_the_load() -> None:
    worker = make_worker()
    worker.move(UP)
    worker.run(0.3)
    assert entry(worker).state is ModelState.LOADING
    worker.move(Move("a", Tier.COLD))
    worker.run_until_quiet()
    assert entry(worker).state is ModelState.COLD and worker.used_bytes == 0
