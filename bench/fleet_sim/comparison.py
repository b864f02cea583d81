"""All routing policies on all traces and loads. Called by ``python -m bench.fleet_sim``; touches no file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.fleet_sim.fleet import Fleet, Setup
from bench.fleet_sim.machines import CPU, GPU, Machine
from bench.fleet_sim.policies.aibrix import AIBrix
from bench.fleet_sim.policies.dynamo import Dynamo
from bench.fleet_sim.policies.kubeai import KubeAI
from bench.fleet_sim.policies.llmd import LlmD
from bench.fleet_sim.policies.naru import Naru, NaruHashing
from bench.fleet_sim.policies.oracle import Oracle
from bench.fleet_sim.policies.policy import Kind
from bench.fleet_sim.policies.production_stack import ProductionStack
from bench.fleet_sim.policies.sglang import SGLang
from bench.fleet_sim.policies.simple import LeastLoad, RoundRobin
from bench.fleet_sim.requests import Request
from bench.fleet_sim.traces import TRACES, Trace, Traffic
from bench.stats import percentile

ORACLE = Kind("oracle", Oracle)
NARU = Kind("Naru", Naru)
KINDS = (
    ORACLE,
    NARU,
    Kind("Naru, hashing alone", NaruHashing),
    Kind("Dynamo", Dynamo),
    Kind("llm-d", LlmD),
    Kind("AIBrix", AIBrix),
    Kind("SGLang", SGLang),
    Kind("KubeAI", KubeAI),
    Kind("production-stack", ProductionStack),
    Kind("least load", LeastLoad),
    Kind("round robin", RoundRobin),
)
LOADS = (0.5, 0.8, 0.95)
WARM_UP = 0.4
"""Share of a run that counts in no figure, as caches are empty then."""
NUM_PILOTS = 6


@dataclass(frozen=True, slots=True)
class Scene:
    """A machine and how many workers of it there are."""

    machine: Machine
    num_workers: int
    loads: tuple[float, ...]
    num_routers: int = 2


SCENES = (Scene(GPU, 8, LOADS), Scene(CPU, 4, (0.8,)), Scene(GPU, 8, (0.8,), num_routers=1))


@dataclass(frozen=True, slots=True)
class Figures:
    """What one policy did on one trace at one load."""

    machine: str
    num_routers: int
    trace: str
    load: float
    policy: str
    ttft_mean_s: float
    ttft_p99_s: float
    hit_ratio: float
    """Prompt tokens that were found in a cache."""
    imbalance: float
    """Most requests in flight on one worker ÷ the mean over workers."""
    num_requests: int
    offered_load: float
    """Requests that came ÷ what is its capacity: near `load`, unless conversations wait long for their answers."""
    prediction_error: float
    """Mean of |expected − found| cached tokens ÷ prompt tokens; -1: the policy expects nothing."""


def compare(
    seed: int, scenes: Sequence[Scene] = SCENES, traces: Sequence[Trace] = TRACES, kinds: Sequence[Kind] = KINDS
) -> Iterator[Figures]:
    """Every policy on the same traffic."""
    for scene in scenes:
        for trace in traces:
            traffic = trace.traffic(seed, scene.num_workers)
            capacity = capacity_of(scene, traffic, seed)
            for load in scene.loads:
                for kind in kinds:
                    fleet = run(scene, traffic, kind, load * capacity, seed)
                    yield figures(scene, trace, load, kind, fleet, capacity * traffic.turns_per_session)


def run(scene: Scene, traffic: Traffic, kind: Kind, sessions_per_s: float, seed: int) -> Fleet:
    """One policy on one trace at one rate."""
    setup = Setup(scene.machine, scene.num_workers, traffic.places, traffic.key_of_block, scene.num_routers)
    fleet = Fleet(setup, kind, seed)
    fleet.run(traffic.sessions, sessions_per_s, traffic.lead_s, traffic.num_gaps)
    return fleet


def measured(fleet: Fleet) -> list[Request]:
    """Requests that came after the warm-up."""
    return [request for request in fleet.requests if request.arrived_s >= WARM_UP * fleet.end_s]


def _hit_ratio(requests: Sequence[Request]) -> float:
    num_cached = sum(request.num_cached_tokens for request in requests)
    return num_cached / sum(request.prompt.num_tokens for request in requests)


def capacity_of(scene: Scene, traffic: Traffic, seed: int) -> float:
    """Sessions per second that keep engines busy, in half-full batches and with the oracle's hit ratio at that rate.

    Found by halving: the more conversations there are at once, the less of each stays in the caches.
    """
    num_tokens = sum(turn.prompt.num_tokens for session in traffic.sessions for turn in session.turns)

    def possible(num_computed: float) -> float:
        return scene.num_workers * len(traffic.sessions) / _busy_s(scene.machine, traffic, num_computed)

    low, high = possible(num_tokens), possible(_ideal_tokens(traffic))
    for _ in range(NUM_PILOTS):
        middle = (low + high) / 2
        pilot = run(scene, traffic, ORACLE, middle, seed)
        is_possible = middle <= possible((1.0 - _hit_ratio(measured(pilot))) * num_tokens)
        low, high = (middle, high) if is_possible else (low, middle)
    return low


def _ideal_tokens(traffic: Traffic) -> int:
    """Prompt tokens to compute if each distinct block were computed once."""
    seen: set[int] = set()
    num_tokens = 0
    for session in traffic.sessions:
        for turn in session.turns:
            known = sum(block in seen for block in turn.prompt.blocks)
            num_tokens += turn.prompt.num_tokens - 16 * known
            seen.update(turn.answer_blocks)
    return num_tokens


def _busy_s(machine: Machine, traffic: Traffic, num_prompt_tokens: float) -> float:
    """Of one engine for all requests, in batches of half the most sequences."""
    num_answer_tokens = sum(turn.num_answer_tokens for session in traffic.sessions for turn in session.turns)
    batch = machine.max_sequences / 2
    token_s = machine.decode_step_s(int(batch)) / batch
    return num_prompt_tokens / machine.prefill_tokens_per_s + num_answer_tokens * token_s


def figures(scene: Scene, trace: Trace, load: float, kind: Kind, fleet: Fleet, requests_per_s: float) -> Figures:
    """Of the requests after the warm-up. `requests_per_s`: the fleet's capacity."""
    requests = measured(fleet)
    ttfts_s = [request.ttft_s + fleet.setup.network_s for request in requests]
    told = [request for request in requests if request.expected_cached_tokens >= 0]
    errors = sum(abs(request.expected_cached_tokens - request.num_cached_tokens) for request in told)
    return Figures(
        scene.machine.name,
        scene.num_routers,
        trace.name,
        load,
        kind.name,
        sum(ttfts_s) / len(ttfts_s),
        percentile(ttfts_s, 99),
        _hit_ratio(requests),
        sum(fleet.imbalances) / max(1, len(fleet.imbalances)),
        len(requests),
        len(requests) / ((1.0 - WARM_UP) * fleet.end_s) / requests_per_s,
        errors / sum(request.prompt.num_tokens for request in told) if told else -1.0,
    )
