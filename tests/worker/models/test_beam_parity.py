"""Beam search equals transformers' on tiny random models, on both backends, alone and in a crowd."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from backends import BACKENDS, load
from real_engine import choices_of, engine_over, request_of, run_all
from tiny_models import TinySpec
from toy_model import ToyTokenizer

from naru_worker.core.request import Request

transformers = pytest.importorskip("transformers", reason="parity is measured against transformers")
torch = pytest.importorskip("torch", reason="transformers needs torch")

pytestmark = pytest.mark.torch

NUM_TOKENS = 259
EOS = (7, 60, 111, 200, 201, 202, 240)
"""So many that texts end early now and then."""
SPECS = {"llama": TinySpec(seed=3), "gpt2": TinySpec("gpt2", num_kv_heads=4, tied=True, seed=4)}


class Case(NamedTuple):
    """One search."""

    beams: int
    n: int
    max_tokens: int
    length_penalty: float
    min_tokens: int
    prompt_length: int

    @property
    def prompt(self) -> list[int]:
        return prompt_of(self.prompt_length)

    def request(self, name: str = "a") -> Request:
        return request_of(
            self.prompt,
            name,
            beam_width=self.beams,
            n=self.n,
            max_tokens=self.max_tokens,
            length_penalty=self.length_penalty,
            min_tokens=self.min_tokens,
        )


CASES = [
    Case(1, 1, 12, 1.0, 0, 5),
    Case(2, 1, 20, 1.0, 0, 16),
    Case(3, 3, 24, 0.0, 0, 17),
    Case(4, 2, 40, 1.0, 0, 33),
    Case(4, 4, 30, 2.0, 0, 7),
    Case(5, 5, 30, -1.0, 3, 40),
    Case(8, 8, 25, 0.6, 5, 31),
    Case(16, 4, 12, 1.0, 0, 64),
    Case(6, 6, 1, 1.0, 0, 9),
]


@pytest.fixture(scope="module", params=SPECS)
def model(request: pytest.FixtureRequest, tiny_model: Callable[[TinySpec], Path]) -> Path:
    return tiny_model(SPECS[request.param])


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    torch.set_num_threads(1)
    return transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.fixture(scope="module", params=BACKENDS)
def runner(request: pytest.FixtureRequest, model: Path) -> Iterator[Any]:
    loaded = load(request.param, model, num_blocks=160)
    yield loaded
    loaded.close()


def prompt_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, 256, length).tolist()  # type: ignore[no-any-return]


def expected_beams(reference: Any, case: Case) -> list[tuple[int, ...]]:
    ids = torch.tensor([case.prompt])
    with torch.inference_mode():
        found = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=case.beams,
            num_return_sequences=case.n,
            do_sample=False,
            max_new_tokens=case.max_tokens,
            min_new_tokens=case.min_tokens or None,
            length_penalty=case.length_penalty,
            early_stopping=False,
            eos_token_id=list(EOS),
            pad_token_id=EOS[0],
        )
    outputs = []
    for row in found[:, case.prompt_length :].tolist():
        end = next((place + 1 for place, token in enumerate(row) if token in EOS), len(row))
        outputs.append(tuple(row[:end]))
    return outputs


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_best_beams_equal_the_reference(runner: Any, reference: Any, case: Case) -> None:
    engine, scheduler = engine_over(runner, ToyTokenizer(), NUM_TOKENS, EOS)
    assert choices_of(run_all(engine, scheduler, [case.request()])) == expected_beams(reference, case)


def test_beams_in_a_crowd_that_has_too_few_blocks_equal_the_reference(runner: Any, reference: Any) -> None:
    cases = [case for case in CASES if case.beams > 1]
    engine, scheduler = engine_over(
        runner, ToyTokenizer(), NUM_TOKENS, EOS, num_blocks=37, max_num_seqs=32, max_num_batched_tokens=48
    )
    requests = [case.request(f"beams {number}") for number, case in enumerate(cases)]
    others = [
        request_of(prompt_of(17 + i), f"plain {i}", temperature=0.9, max_tokens=90, ignore_eos=True) for i in range(6)
    ]
    mixed = [each for pair in zip(requests, others, strict=False) for each in pair]
    deltas = run_all(engine, scheduler, list(dict.fromkeys([*mixed, *requests])))
    assert engine.stats.num_preemptions > 0
    for number, case in enumerate(cases):
        assert choices_of(deltas, f"beams {number}") == expected_beams(reference, case), case
