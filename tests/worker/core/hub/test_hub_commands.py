"""Which commands are refused, that a refusal changes nothing, and what is remembered of models that are gone."""

from __future__ import annotations

import random

import pytest

from naru_proto.errors import InvalidRequest, LoadError, NaruError, StaleCommand
from naru_worker.core.hub.actions import Fetch
from naru_worker.core.hub.config import HubConfig
from naru_worker.core.hub.events import Ask, Release, RequestArrived
from naru_worker.core.hub.hub import Hub
from naru_worker.core.hub.model import Footprint, Residency, Tier
from naru_worker.core.hub.testing import VirtualWorker
from naru_worker.core.residency import ModelState

CONFIG = HubConfig(budget_bytes=1000)


def snapshot(hub: Hub) -> object:
    return [repr(entry) for entry in hub.entries()], hub.memory, [hub.explain(entry.name, 0) for entry in hub.entries()]


def refused(hub: Hub, command: Ask | Release, error: type[NaruError]) -> NaruError:
    """The refusal; nothing has changed by it."""
    before = snapshot(hub)
    with pytest.raises(error) as caught:
        if isinstance(command, Ask):
            hub.ask(command, 0.0)
        else:
            hub.release(command, 0.0)
    assert snapshot(hub) == before
    return caught.value


def test_an_older_generation_is_refused_with_the_newest_one() -> None:
    hub = Hub(CONFIG)
    hub.ask(Ask("a", 7, "spec"), 0.0)
    for command in (Ask("a", 6, "spec"), Ask("a", 6, "other"), Release("a", 6)):
        error = refused(hub, command, StaleCommand)
        assert isinstance(error, StaleCommand) and error.newest_generation == 7
        assert "generation 6 of model 'a' is older than 7" in error.message


def test_an_older_fencing_token_is_refused_even_with_a_newer_generation() -> None:
    hub = Hub(CONFIG)
    hub.ask(Ask("a", 1, "spec", fencing_token=5), 0.0)
    error = refused(hub, Ask("a", 9, "spec", fencing_token=4), StaleCommand)
    assert "fencing token 4" in error.message
    refused(hub, Release("a", 9, fencing_token=4), StaleCommand)


def test_a_newer_fencing_token_does_not_excuse_an_older_generation() -> None:
    hub = Hub(CONFIG)
    hub.ask(Ask("a", 3, "spec", fencing_token=5), 0.0)
    refused(hub, Ask("a", 2, "spec", fencing_token=6), StaleCommand)
    hub.ask(Ask("a", 3, "spec", fencing_token=5), 0.0)  # the refused token was not taken over


def test_a_command_without_a_token_goes_by_its_generation_alone() -> None:
    hub = Hub(CONFIG)
    hub.ask(Ask("a", 3, "spec", fencing_token=5), 0.0)
    hub.ask(Ask("a", 4, "spec"), 0.0)
    refused(hub, Ask("a", 5, "spec", fencing_token=4), StaleCommand)


def test_a_generation_stands_for_one_spec() -> None:
    hub = Hub(CONFIG)
    hub.ask(Ask("a", 1, "spec"), 0.0)
    error = refused(hub, Ask("a", 1, "other"), InvalidRequest)
    assert error.param == "generation" and "raise the generation" in error.message
    hub.ask(Ask("a", 2, "other"), 0.0)


def test_after_a_release_the_generation_still_stands_for_its_spec() -> None:
    hub = Hub(CONFIG)
    hub.ask(Ask("a", 1, "spec"), 0.0)
    hub.release(Release("a", 1), 0.0)
    refused(hub, Ask("a", 1, "other"), InvalidRequest)
    hub.ask(Ask("a", 1, "spec"), 0.0)
    hub.release(Release("a", 2), 0.0)
    hub.ask(Ask("a", 2, "other"), 0.0)  # generation 2 stood for no spec


def test_the_same_ask_again_begins_nothing_but_may_change_tier_and_residency() -> None:
    hub = Hub(CONFIG)
    actions = hub.ask(Ask("a", 1, "spec"), 0.0)
    assert Fetch("a", 1) in actions
    assert hub.ask(Ask("a", 1, "spec"), 0.0) == ()
    assert hub.ask(Ask("a", 1, "spec", residency=Residency(pinned=True)), 0.0) == ()
    entry = hub.entry("a")
    assert entry is not None and entry.residency.pinned


def test_the_release_of_an_unknown_name_refuses_older_asks_for_it() -> None:
    hub = Hub(CONFIG)
    assert hub.release(Release("ghost", 5), 0.0) == ()
    assert list(hub.entries()) == []
    assert refused(hub, Ask("ghost", 4, "spec"), StaleCommand)
    assert hub.ask(Ask("ghost", 5, "spec"), 0.0)


def test_the_oldest_forgotten_names_go_first_and_known_ones_never() -> None:
    hub = Hub(HubConfig(budget_bytes=1000, max_known_models=3))
    hub.ask(Ask("known", 9, "spec", Tier.COLD), 0.0)
    for name in ("ghost1", "ghost2", "ghost3"):
        hub.release(Release(name, 5), 0.0)
    assert hub.entry("ghost1") is None and hub.entry("ghost2") is not None
    refused(hub, Ask("ghost3", 4, "spec"), StaleCommand)
    hub.ask(Ask("ghost3", 5, "spec", Tier.COLD), 0.0)
    hub.ask(Ask("new", 1, "spec", Tier.COLD), 0.0)
    error = refused(hub, Ask("one more", 1, "spec", Tier.COLD), InvalidRequest)
    assert "3 models are known" in error.message
    assert hub.release(Release("one more", 1), 0.0) == ()
    assert [entry.name for entry in hub.entries()] == ["known", "ghost3", "new"]


@pytest.mark.parametrize(
    "command",
    [
        Ask("a", 1, None),
        Ask("a", -1, "spec"),
        Ask("a", 1, "spec", fencing_token=-1),
        Ask("a", 1, "spec", residency=Residency(priority=0)),
        Ask("a", 1, "spec", residency=Residency(priority=1001)),
        Ask("a", 1, "spec", residency=Residency(min_residency_s=-1.0)),
        Ask("a", 1, "spec", residency=Residency(min_residency_s=float("inf"))),
        Ask("a", 1, "spec", residency=Residency(idle_ttl_s=float("nan"))),
        Release("a", 1, drain_timeout_s=-0.1),
        Release("a", 1, drain_timeout_s=float("nan")),
        Release("a", 1, tier=Tier.ACTIVE),
    ],
)
def test_values_out_of_range_are_refused_and_the_name_stays_unknown(command: Ask | Release) -> None:
    hub = Hub(CONFIG)
    refused(hub, command, InvalidRequest)
    assert hub.entry("a") is None


def test_a_model_known_to_be_too_large_is_refused_at_once_with_the_numbers() -> None:
    worker = VirtualWorker(HubConfig(budget_bytes=100), {"a": Footprint("ka", 90, 20, 7, 3)}, chance=random.Random(0))
    worker.ask(Ask("a", 1, "spec", Tier.COLD))
    worker.request("a")
    worker.run_until_quiet()
    error = refused(worker.hub, Ask("a", 2, "spec"), LoadError)
    for part in ("120 bytes", "90 of weights", "20 of KV floor", "7 of workspace", "budget is 100 bytes"):
        assert part in error.message
    worker.ask(Ask("a", 2, "spec", Tier.COLD))
    worker.ask(Ask("a", 3, "smaller spec"))  # other files may be smaller


def test_a_request_for_an_unknown_model_is_rejected() -> None:
    hub = Hub(CONFIG)
    (action,) = hub.handle(RequestArrived("ghost"), 0.0)
    assert "not known" in action.reason  # type: ignore[union-attr]
    assert hub.entry("ghost") is None


def test_a_forgotten_model_is_no_resident_and_explains_itself() -> None:
    worker = VirtualWorker(CONFIG, {"a": Footprint("ka", 90, 20, 7, 3)}, chance=random.Random(0))
    worker.ask(Ask("a", 1, "spec"))
    worker.run_until_quiet()
    assert [entry.state for entry in worker.hub.residents()] == [ModelState.READY]
    worker.release(Release("a", 2))
    worker.run_until_quiet()
    assert list(worker.hub.residents()) == list(worker.hub.entries()) == []
    assert any("generation 2 released it" in sentence for sentence in worker.hub.explain("a", 0.0))
    assert worker.hub.explain("never heard of", 0.0) == ()
