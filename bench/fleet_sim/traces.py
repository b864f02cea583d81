"""The traces that routing policies are compared on. Pure functions of a seed; called by the comparison.

Sessions come by chance (Poisson) whatever the fleet does: an open loop. Sizes are drawn around typical values, cut off
so that every request fits the smaller machine.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.fleet_sim.prompts import Message, PromptPress, RouteKey, words
from bench.fleet_sim.requests import Session, Turn
from bench.sim.workload import zipf_weights

MODEL = "chat"


@dataclass(frozen=True, slots=True)
class Traffic:
    """What comes: the same for every policy and load."""

    sessions: tuple[Session, ...]
    key_of_block: dict[int, RouteKey]
    places: dict[str, tuple[int, ...]]
    lead_s: float
    """Of sessions that have begun before: see Fleet.run."""
    num_gaps: float
    """Mean gaps between sessions that a run lasts."""

    @property
    def turns_per_session(self) -> float:
        """The mean."""
        return sum(len(session.turns) for session in self.sessions) / len(self.sessions)


@dataclass(frozen=True, slots=True)
class Trace:
    """One kind of traffic."""

    name: str
    title: str
    make: Callable[[random.Random, PromptPress, int], list[Session]]
    """Sessions from a generator, for about so many requests."""
    num_requests: int = 1500
    """About so many in a run."""
    lead_s: float = 0.0
    """As long as the longest conversations take; 0: a session is one request."""
    num_lead_requests: int = 0
    """Further ones that are made for the lead at the highest load."""
    place: Callable[[int], dict[str, tuple[int, ...]]] = lambda num_workers: {MODEL: tuple(range(num_workers))}
    """Who has which model, by the number of workers."""

    def traffic(self, seed: int, num_workers: int) -> Traffic:
        """All of it, by a seed."""
        press = PromptPress()
        num_made = int(1.05 * (self.num_requests + self.num_lead_requests)) + 20
        sessions = self.make(random.Random(seed), press, num_made)
        num_turns = sum(len(session.turns) for session in sessions)
        num_gaps = self.num_requests * sessions[-1].start / num_turns
        return Traffic(tuple(sessions), press.key_of_block, self.place(num_workers), self.lead_s, num_gaps)


def _tokens(rng: random.Random, mean: float, most: int) -> int:
    """Of a size with a long tail."""
    return max(4, min(most, int(rng.lognormvariate(0.0, 0.6) * mean / 1.2)))


def _starts(rng: random.Random) -> itertools.accumulate[float]:
    return itertools.accumulate(iter(lambda: rng.expovariate(1.0), None))


def _single(
    press: PromptPress, start: float, messages: Sequence[Message], num_answer_tokens: int, model: str = MODEL
) -> Session:
    prompt = press.make(model, messages)
    answer_blocks = press.blocks_with_answer(prompt, "x" * 4 * num_answer_tokens)
    return Session(start, (Turn(prompt, num_answer_tokens, answer_blocks),))


def chats(rng: random.Random, press: PromptPress, num_requests: int) -> list[Session]:
    """Conversations of about five turns on one of eight short system prompts; people read and type for some seconds."""
    systems = [Message("system", words(rng, 150)) for _ in range(8)]
    sessions: list[Session] = []
    starts, count = _starts(rng), 0
    while count < num_requests:
        sessions.append(_conversation(rng, press, next(starts), rng.choice(systems)))
        count += len(sessions[-1].turns)
    return sessions


def _conversation(rng: random.Random, press: PromptPress, start: float, system: Message) -> Session:
    history, turns = [system], list[Turn]()
    for index in range(min(10, 2 + int(rng.expovariate(1 / 3.0)))):
        history.append(Message("user", words(rng, _tokens(rng, 120.0, 400))))
        prompt = press.make(MODEL, history)
        answer = words(rng, _tokens(rng, 160.0, 500))
        think_s = 1.0 + rng.expovariate(1 / 3.0) if index else 0.0
        turns.append(Turn(prompt, len(answer) // 4, press.blocks_with_answer(prompt, answer), think_s))
        history.append(Message("assistant", answer))
    return Session(start, tuple(turns))


def shared_systems(rng: random.Random, press: PromptPress, num_requests: int) -> list[Session]:
    """Single questions on long system prompts, a few of them hot; all together more than one worker caches."""
    systems = [Message("system", words(rng, rng.randint(1000, 3000))) for _ in range(48)]
    weights, starts = zipf_weights(len(systems), 1.0), _starts(rng)
    return [
        _single(
            press,
            next(starts),
            (rng.choices(systems, weights)[0], Message("user", words(rng, _tokens(rng, 100.0, 400)))),
            _tokens(rng, 160.0, 600),
        )
        for _ in range(num_requests)
    ]


def hot_prefix(rng: random.Random, press: PromptPress, num_requests: int) -> list[Session]:
    """Seven of ten prompts begin with the same 1500 tokens and end differently; the rest share nothing."""
    hot, starts = words(rng, 1500), _starts(rng)
    sessions = []
    for _ in range(num_requests):
        begin = hot if rng.random() < 0.7 else words(rng, _tokens(rng, 500.0, 1500))
        text = begin + words(rng, _tokens(rng, 150.0, 500))
        sessions.append(_single(press, next(starts), (Message("user", text),), _tokens(rng, 160.0, 600)))
    return sessions


def documents(rng: random.Random, press: PromptPress, num_requests: int) -> list[Session]:
    """Short questions on long documents of Zipf popularity: more of them than one worker caches."""
    system = Message("system", words(rng, 60))
    texts = [words(rng, rng.randint(1500, 3000)) for _ in range(150)]
    weights, starts = zipf_weights(len(texts), 0.8), _starts(rng)
    sessions = []
    for _ in range(num_requests):
        text = rng.choices(texts, weights)[0] + "\n" + words(rng, _tokens(rng, 40.0, 120))
        sessions.append(_single(press, next(starts), (system, Message("user", text)), _tokens(rng, 160.0, 600)))
    return sessions


NUM_MODELS = 12


def models(rng: random.Random, press: PromptPress, num_requests: int) -> list[Session]:
    """Zipf over models, each with three long system prompts of its own."""
    names = [f"model-{index:02}" for index in range(NUM_MODELS)]
    systems = {name: [Message("system", words(rng, rng.randint(500, 1500))) for _ in range(3)] for name in names}
    weights, starts = zipf_weights(NUM_MODELS, 0.9), _starts(rng)
    sessions = []
    for _ in range(num_requests):
        name = rng.choices(names, weights)[0]
        messages = (rng.choice(systems[name]), Message("user", words(rng, _tokens(rng, 100.0, 400))))
        sessions.append(_single(press, next(starts), messages, _tokens(rng, 160.0, 600), name))
    return sessions


def place_models(num_workers: int) -> dict[str, tuple[int, ...]]:
    """Popular models have half of the workers, the others two each: loads of workers differ by what they have."""
    places = {}
    for index in range(NUM_MODELS):
        num_copies = max(2, num_workers // 2) if index < 3 else 2
        places[f"model-{index:02}"] = tuple(sorted((index * 3 + copy) % num_workers for copy in range(num_copies)))
    return places


TRACES = (
    Trace("chats", "chats of several turns", chats, num_requests=3000, lead_s=45.0, num_lead_requests=8000),
    Trace("shared", "shared system prompts, a few of them hot", shared_systems, num_requests=1800),
    Trace("hot", "one hot prefix with different tails", hot_prefix),
    Trace("documents", "questions on long documents", documents, num_requests=1800),
    Trace("models", "Zipf over twelve models", models, place=place_models),
)
