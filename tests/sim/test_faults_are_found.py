"""The simulator finds hubs that are wrong: each of these breaks one thing, and a scenario that touches it fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from bench.sim.clock import InvariantViolation
from bench.sim.scenario import Scenario, run_scenario, scenario_of
from bench.sim.worker import WorkerSetup

from naru_worker.core.hub import actions, events
from naru_worker.core.hub.config import HubConfig
from naru_worker.core.hub.eviction import VictimChooser
from naru_worker.core.hub.hub import Hub
from naru_worker.core.hub.model import Residency


class Overbooking(Hub):
    """Takes the budget for twice as large."""

    def __init__(self, config: HubConfig, choose: VictimChooser) -> None:
        super().__init__(dataclasses.replace(config, budget_bytes=2 * config.budget_bytes), choose)


class ForgetfulOfUnloads(Hub):
    """Takes all bytes for returned."""

    def handle(self, event: events.Result, now_s: float) -> tuple[actions.Action, ...]:
        if isinstance(event, events.Unloaded | events.Failed):
            event = dataclasses.replace(event, unreturned_bytes=0)
        return super().handle(event, now_s)


class Impatient(Hub):
    """Unloads without a drain."""

    def handle(self, event: events.Result, now_s: float) -> tuple[actions.Action, ...]:
        return tuple(
            actions.Unload(action.model, action.attempt, keep_host=False)
            if isinstance(action, actions.Drain)
            else action
            for action in super().handle(event, now_s)
        )


class Rude(Hub):
    """Ends running requests of victims at once."""

    def handle(self, event: events.Result, now_s: float) -> tuple[actions.Action, ...]:
        return tuple(
            dataclasses.replace(action, timeout_s=0.0) if isinstance(action, actions.Drain) else action
            for action in super().handle(event, now_s)
        )


class Hanging(Hub):
    """Never tells those who wait that their model will not come."""

    def handle(self, event: events.Result, now_s: float) -> tuple[actions.Action, ...]:
        return tuple(a for a in super().handle(event, now_s) if not isinstance(a, actions.RejectHeld))


class BlindToPins(Hub):
    """Does not know of pins."""

    def ask(self, ask: events.Ask, now_s: float) -> tuple[actions.Action, ...]:
        return super().ask(dataclasses.replace(ask, residency=Residency()), now_s)


class Credulous(Hub):
    """Takes stale commands for new ones."""

    def ask(self, ask: events.Ask, now_s: float) -> tuple[actions.Action, ...]:
        entry = self.entry(ask.model)
        generation = max(ask.generation, entry.generation + 1 if entry else 0)
        return super().ask(dataclasses.replace(ask, generation=generation, fencing_token=0), now_s)


class Deaf(Hub):
    """Does not hear that requests end."""

    def handle(self, event: events.Result, now_s: float) -> tuple[actions.Action, ...]:
        return () if isinstance(event, events.RequestEnded) else super().handle(event, now_s)


FAULTY: list[Callable[[HubConfig, VictimChooser], Hub]] = [
    Overbooking,
    ForgetfulOfUnloads,
    Impatient,
    Rude,
    Hanging,
    BlindToPins,
    Credulous,
    Deaf,
]


def with_hub(scenario: Scenario, make_hub: Callable[[HubConfig, VictimChooser], Hub]) -> Scenario:
    def replaced(setup: WorkerSetup) -> WorkerSetup:
        return dataclasses.replace(setup, make_hub=make_hub)

    return dataclasses.replace(scenario, setups=tuple(map(replaced, scenario.setups)))


@pytest.mark.parametrize("make_hub", FAULTY)
def test_a_hub_that_is_wrong_is_found_by_random_scenarios(make_hub: Callable[[HubConfig, VictimChooser], Hub]) -> None:
    for seed in range(300):
        try:
            run_scenario(with_hub(scenario_of(seed), make_hub))
        except InvariantViolation:
            return
    pytest.fail("300 scenarios did not notice")
