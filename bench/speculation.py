"""What speculation gives and costs, in one process: ``python -m bench.speculation``.

Two engines over the same model file, one that guesses tokens and one that does not, get the same requests in turns.
Each workload repeats itself more or less; the first ones hardly do, and show what looking for guesses costs. Answers
must be equal, token for token; the time is that of steps that only decode.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.machine import describe
from bench.peers import PeerError
from bench.stats import median
from bench.steps import load

from naru_proto.errors import NaruError
from naru_worker.adapters.engine.deltas import Outbox
from naru_worker.adapters.engine.engine import ModelEngine
from naru_worker.adapters.engine.loaded import LoadedModel
from naru_worker.core.request import Request, RequestId
from naru_worker.core.sampling import SamplingParams

RESULTS_PATH = Path(__file__).resolve().parent / "results" / "speculation.json"
PASSAGE = (
    "The lighthouse at Skerry Point was built in 1874 by the engineer Agnes Marlow. Its tower is thirty-one metres "
    "high and made of grey granite that came by barge from the quarries of Dunmore. Until 1936 the lamp burned "
    "colza oil, which a keeper carried up two hundred and twelve steps every evening. Today the light is electric, "
    "turns once in ten seconds, and can be seen from eighteen nautical miles away."
)
CODE = """def read_table(path, separator=","):
    rows = []
    with open(path, encoding="utf-8") as file:
        header = file.readline().rstrip("\\n").split(separator)
        for line in file:
            values = line.rstrip("\\n").split(separator)
            if len(values) != len(header):
                raise ValueError(f"a row of {path} has {len(values)} values, the header has {len(header)}")
            rows.append(dict(zip(header, values)))
    return rows
"""
CHATS = {
    "story": "Write a story about a fisherman who finds a letter in a bottle.",
    "answer with sources": f"{PASSAGE}\n\nUsing only the text above, say who built the lighthouse, when, of what, and "
    "how far its light can be seen. Quote the sentences you use.",
    "edit code": f"Rename the variable `rows` to `records` in this code and print the whole code:\n\n{CODE}",
    "repeat text": f"Repeat the following text word for word:\n\n{PASSAGE}",
}


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that run at once."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    temperature: float = 0.0


@dataclass
class Figures:
    """One workload, both ways. Rates are of output tokens, all streams together."""

    workload: str
    num_streams: int
    temperature: float
    off_tokens_per_s: float
    auto_tokens_per_s: float
    drafted_ratio: float
    """Guesses computed, per token drawn."""
    accepted_ratio: float
    """Of the guesses that were computed, the right ones."""
    is_equal: bool
    """Whether all answers are the same."""

    @property
    def gain(self) -> float:
        """How many times the tokens a second."""
        return self.auto_tokens_per_s / self.off_tokens_per_s


@dataclass
class Round:
    """One workload run once on one engine."""

    seconds: float
    num_tokens: int
    answers: dict[str, tuple[int, ...]]
    drafted: int
    accepted: int

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.num_tokens / self.seconds


def run_round(engine: ModelEngine, workload: Workload, num_tokens: int) -> Round:
    """Runs all requests; counts time and tokens of steps after all first tokens are out, while all streams run.

    Raises:
        PeerError: there was no such step.
    """
    outbox: Outbox = []
    params = SamplingParams(temperature=workload.temperature, max_tokens=num_tokens, ignore_eos=True)
    for index, prompt in enumerate(workload.prompts):
        request = Request(RequestId(str(index)), prompt, params, 11, index, skip_prefix_cache=True)
        engine.submit(request, time.monotonic(), outbox)
    before = (engine.stats.drafted_tokens, engine.stats.accepted_tokens)
    begun: set[str] = set()
    told = 0
    seconds, counted = 0.0, 0
    while engine.has_work:
        is_counted = len(begun) == len(workload.prompts) == engine.stats.num_running
        started_s = time.perf_counter()
        engine.step(outbox)
        took_s = time.perf_counter() - started_s
        new = outbox[told:]
        told = len(outbox)
        begun.update(delta.request_id for delta in new)
        if is_counted:
            seconds += took_s
            counted += sum(len(delta.token_ids) for delta in new)
    engine.rest()
    failed = next((delta.error for delta in outbox if delta.error is not None), None)
    if failed is not None:
        raise failed
    if not counted:
        raise PeerError(
            f"{workload.name}: streams ended before the last one began; give more than {num_tokens} --tokens"
        )
    answers: dict[str, tuple[int, ...]] = {}
    for delta in outbox:
        answers[delta.request_id] = answers.get(delta.request_id, ()) + delta.token_ids
    stats = engine.stats
    return Round(seconds, counted, answers, stats.drafted_tokens - before[0], stats.accepted_tokens - before[1])


def workloads(model: LoadedModel, num_streams: int) -> list[Workload]:
    """From texts that never repeat themselves to such that do nothing else."""
    rng = random.Random(num_streams)
    words = tuple(tuple(rng.randrange(1000, 20000) for _ in range(128)) for _ in range(num_streams))
    found = [Workload("random words", words), Workload("random words, sampled", words, 1.0)]
    for name, text in CHATS.items():
        # Streams differ by a greeting, so that each has an answer of its own.
        prompts = tuple(_chat(model, f"Hello, I am number {index}. {text}") for index in range(num_streams))
        found.append(Workload(name, prompts))
    found.append(Workload("repeat text, sampled", found[-1].prompts, 0.7))
    return found


def _chat(model: LoadedModel, text: str) -> tuple[int, ...]:
    assert model.tokenizer is not None
    turn = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    return tuple(model.tokenizer.encode(turn, add_special_tokens=False))


def compare(off: LoadedModel, auto: LoadedModel, num_streams: int, num_tokens: int, repeats: int) -> list[Figures]:
    """All workloads, both engines in turns."""
    assert isinstance(off.engine, ModelEngine)
    assert isinstance(auto.engine, ModelEngine)
    both: dict[str, tuple[list[Round], list[Round]]] = {}
    works = workloads(off, num_streams)
    for _ in range(repeats):
        for work in works:
            rounds = both.setdefault(work.name, ([], []))
            for engine, kept in zip((off.engine, auto.engine), rounds, strict=True):
                kept.append(run_round(engine, work, num_tokens))
    figures = []
    for work in works:
        plain, guessed = both[work.name]
        drawn = sum(each.num_tokens for each in guessed)
        drafted = sum(each.drafted for each in guessed)
        figures.append(
            Figures(
                work.name,
                num_streams,
                work.temperature,
                median([each.rate for each in plain]),
                median([each.rate for each in guessed]),
                drafted / drawn,
                sum(each.accepted for each in guessed) / drafted if drafted else 0.0,
                all(one.answers == other.answers for one, other in zip(plain, guessed, strict=True)),
            )
        )
    return figures


def print_figures(figures: Sequence[Figures]) -> None:
    """The table."""
    print(
        f"{'workload':<24}{'streams':>8}{'off tok/s':>11}{'auto tok/s':>11}{'gain':>7}{'drafted':>9}{'right':>7}  equal"
    )
    for each in figures:
        print(
            f"{each.workload:<24}{each.num_streams:>8}{each.off_tokens_per_s:>11.0f}{each.auto_tokens_per_s:>11.0f}"
            f"{each.gain:>7.2f}{each.drafted_ratio:>9.2f}{each.accepted_ratio:>7.0%}"
            f"  {'yes' if each.is_equal else 'NO'}"
        )


def main(argv: Sequence[str]) -> int:
    """The command. Fails when an answer differs."""
    parser = argparse.ArgumentParser(prog="python -m bench.speculation", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--streams", default="1,4,16", help="requests at once, comma-separated (1,4,16)")
    parser.add_argument("--tokens", type=int, default=192, help="output tokens of each (192)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of each workload (5)")
    parser.add_argument("--threads", type=int, default=0, help="threads that compute, 0: all cores (0)")
    parser.add_argument("--model", default=None, help="a GGUF file")
    parser.add_argument("--output", type=Path, default=RESULTS_PATH, help="where the figures go, as JSON")
    arguments = parser.parse_args(argv)
    here = describe()
    num_threads = arguments.threads or here.num_cores
    try:
        off = load(arguments.model, num_threads, speculation="off")
        auto = load(arguments.model, num_threads, speculation="auto")
    except (PeerError, NaruError) as exc:
        print(f"speculation: {exc}", file=sys.stderr)
        return 1
    title = f"{here.cpu_model}, {here.isa}, {num_threads} threads"
    print(f"{title}, load average {os.getloadavg()[0]:.2f}")
    figures: list[Figures] = []
    for num_streams in (int(part) for part in arguments.streams.split(",")):
        new = compare(off, auto, num_streams, arguments.tokens, arguments.repeats)
        print_figures(new)
        figures += new
    off.release()
    auto.release()
    rows = [{**asdict(each), "gain": each.gain} for each in figures]
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps({"machine": title, "figures": rows}, indent=1) + "\n", encoding="utf-8")
    return 0 if all(each.is_equal for each in figures) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
