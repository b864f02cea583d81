"""On runners that compute, answers with guessed tokens are equal token for token to those without, on every backend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from backends import BACKENDS, load
from real_engine import engine_over, request_of, run_all
from tiny_models import TinySpec
from toy_model import ToyTokenizer

from naru_worker.adapters.models.opening import open_model
from naru_worker.core.request import Request

TEXT = (
    "<|im_start|>user\nRepeat the following text word for word:\n\nThe tower is thirty-one metres high and made of "
    "grey granite that came by barge from the quarries of Dunmore. Until 1936 the lamp burned colza oil.<|im_end|>\n"
    "<|im_start|>assistant\nThe tower is"
)


def told(
    runner: Any, vocab_size: int, requests: Callable[[], list[Request]], max_draft_tokens: int, **limits: Any
) -> tuple[dict[tuple[str, int], Any], Any]:
    """Ids and logprobs of each choice, and the engine's numbers."""
    # A clock that stands still: what rows cost is what is expected, and the drafts are the same in every run.
    engine, scheduler = engine_over(
        runner, ToyTokenizer(), vocab_size, (2,), max_draft_tokens=max_draft_tokens, clock=lambda: 0.0, **limits
    )
    found: dict[tuple[str, int], Any] = {}
    for delta in run_all(engine, scheduler, requests()):
        assert delta.error is None
        ids, logprobs = found.get((delta.request_id, delta.index), ((), ()))
        found[delta.request_id, delta.index] = (ids + delta.token_ids, logprobs + delta.logprobs)
    return found, engine.stats


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tiny_model_says_the_same(tiny_model: Callable[[TinySpec], Path], backend: str) -> None:
    runner = load(backend, tiny_model(TinySpec(seed=3)), num_blocks=160)
    num_tokens = 60 if backend == "cpu" else 40

    def requests() -> list[Request]:
        prompt = [11, 12, 13, 14, 15] * 6
        few = tuple((token, 30.0) for token in (11, 12, 13))
        made = [
            request_of(prompt, "greedy", max_tokens=num_tokens, ignore_eos=True, temperature=0.0),
            request_of(prompt[:17], "few", max_tokens=num_tokens, temperature=0.7, n=2, logit_bias=few),
            request_of(prompt, "penalty", max_tokens=num_tokens, repetition_penalty=1.2, logit_bias=few),
        ]
        for each in made:
            each.seed = 5
        return made

    limits = {"num_blocks": 11 if backend == "cpu" else 9, "max_num_batched_tokens": 48}
    plain, _ = told(runner, 259, requests, 0, **limits)
    guessed, stats = told(runner, 259, requests, 7, **limits)
    runner.close()
    assert guessed == plain
    assert stats.num_preemptions > 0
    assert 0 < stats.accepted_tokens < stats.drafted_tokens


@pytest.mark.smollm2
def test_the_real_model_copies_the_same(smollm2_path: Path) -> None:
    model = open_model(smollm2_path)
    prompt = model.tokenizer.encode(TEXT, add_special_tokens=False)
    model.close()
    runner = load("cpu", smollm2_path, num_blocks=64, kv_format="f16")

    def requests() -> list[Request]:
        made = [
            request_of(prompt, "greedy", max_tokens=40, temperature=0.0, logprobs=2),
            request_of(prompt[3:], "sampled", max_tokens=24, temperature=0.5, frequency_penalty=0.1),
        ]
        for each in made:
            each.seed = 9
        return made

    plain, _ = told(runner, 49152, requests, 0)
    guessed, stats = told(runner, 49152, requests, 12)
    runner.close()
    assert guessed == plain, "log probabilities, too: to the last bit"
    assert stats.accepted_tokens > 10
