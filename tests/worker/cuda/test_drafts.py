"""Guessed tokens on the GPU's backend: rows of a sequence that are computed together, over graphs."""

from __future__ import annotations

import pytest
from real_engine import choices_of, engine_over, request_of, run_all
from toy_model import ToyTokenizer

from naru_worker.adapters.ops.protocol import RunnerOptions
from naru_worker.core.ahead import NotAhead

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from fake_cuda_streams import FakeStreams  # noqa: E402
from memory_models import checkpoint_of, config_of  # noqa: E402

from naru_worker.adapters.ops.cuda.backend import weight_bytes  # noqa: E402
from naru_worker.adapters.ops.cuda.device import open_gpu  # noqa: E402
from naru_worker.adapters.ops.cuda.runner import CudaRunner  # noqa: E402

MODEL = checkpoint_of(config_of(num_layers=1, num_heads=16, num_kv_heads=1, head_dim=32, vocab_size=61))
VOCAB_SIZE = MODEL.config.vocab_size
FEW = tuple((token, 30.0) for token in (11, 12))


@pytest.mark.gpu_offline
@pytest.mark.timeout(600)
def test_text_with_guesses_is_the_text_without() -> None:
    def texts(max_draft_tokens: int) -> list[list[tuple[int, ...]]]:
        options = RunnerOptions(16, 12, 64, 4, 128, kv_format="f32")
        runner = CudaRunner(open_gpu(), MODEL, options, weight_bytes(MODEL), FakeStreams(max_draft_tokens))
        # A clock that stands still: rows cost what is expected, and the drafts are the same in every run.
        engine, scheduler = engine_over(
            runner, ToyTokenizer(), VOCAB_SIZE, (7,), max_num_batched_tokens=64, max_num_seqs=4, max_model_len=128,
            max_draft_tokens=max_draft_tokens, clock=lambda: 0.0,
        )  # fmt: skip
        requests = [
            request_of([11, 12] * 6, "greedy", max_tokens=16, temperature=0.0, ignore_eos=True, logit_bias=FEW),
            request_of([11, 12, 12] * 5, "drawn", max_tokens=12, temperature=0.8, ignore_eos=True, logit_bias=FEW),
        ]
        for each in requests:
            each.seed = 5
        deltas = run_all(engine, scheduler, requests)
        assert engine.steps_ahead is not None
        if max_draft_tokens:
            assert engine.stats.accepted_tokens > 2
            assert engine.steps_ahead.num_ahead == 0
            assert set(engine.steps_ahead.not_ahead) == {NotAhead.PROMPTS, NotAhead.DRAFTS}
            # The least tile has places for one token's sixteen heads.
            assert max(key.most_run_rows for key in runner.graphs._inputs) > 1, "guesses go beside their token"
        else:
            assert engine.steps_ahead.num_ahead > 5
        runner.close()
        return [choices_of(deltas, "greedy"), choices_of(deltas, "drawn")]

    assert texts(6) == texts(0)
