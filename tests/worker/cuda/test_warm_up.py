"""Steps that a new runner does before requests come: within its limits, and without a trace."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.torch
pytest.importorskip("torch")
pytest.importorskip("triton")

from batches import batch_of, lanes_for  # noqa: E402
from memory_models import checkpoint_of, config_of  # noqa: E402

from naru_proto.errors import Unavailable  # noqa: E402
from naru_worker.adapters.ops.cuda import backend  # noqa: E402
from naru_worker.adapters.ops.cuda.runner import CudaRunner  # noqa: E402
from naru_worker.adapters.ops.cuda.warm_up import STEPS, null_batch, warm_up  # noqa: E402
from naru_worker.adapters.ops.protocol import BatchInputs, RunnerOptions, SamplingBatch  # noqa: E402

MODEL = checkpoint_of(config_of(num_layers=1, num_heads=2, num_kv_heads=1, head_dim=32, vocab_size=61))
OPTIONS = RunnerOptions(16, 8, 64, 4, 64, kv_format="f32")


@given(
    st.sampled_from(STEPS),
    st.sampled_from([16, 32, 64]),
    st.integers(1, 300),
    st.integers(1, 40),
    st.integers(1, 400),
)
def test_steps_keep_to_the_limits_and_to_the_null_block(
    step: tuple[tuple[int, ...], tuple[int, ...]], block_size: int, num_tokens: int, num_seqs: int, longest: int
) -> None:
    batch = null_batch(*step, RunnerOptions(block_size, 2, num_tokens, num_seqs, longest))
    lengths = np.diff(batch.query_start)
    assert 1 <= len(lengths) <= num_seqs and lengths.min() >= 1
    assert len(batch.token_ids) == len(batch.positions) == len(batch.slots) == batch.query_start[-1] <= num_tokens
    assert batch.positions.max() < longest and batch.seq_lens.max() <= longest
    assert batch.block_table.shape[1] * block_size >= batch.seq_lens.max() and not batch.block_table.any()
    assert 0 <= batch.slots.min() and batch.slots.max() < block_size
    assert batch.num_generated_tokens <= sum(lengths == 1)
    np.testing.assert_array_equal(batch.positions[batch.logits_rows], batch.seq_lens - 1)


def test_a_runner_that_is_warm_computes_as_a_new_one_does() -> None:
    prompts = [[5, 6, 7], [8] * 20]

    def logits(runner: CudaRunner) -> object:
        lanes = lanes_for(prompts, 16, 2)
        return runner.logits(batch_of([(lane, len(lane.token_ids)) for lane in lanes], 16))

    new, warm = (backend.load_runner(MODEL, OPTIONS) for _ in range(2))
    warm_up(warm, OPTIONS, MODEL.config.vocab_size)
    np.testing.assert_array_equal(logits(warm), logits(new))


def test_a_model_is_loaded_when_it_is_warm_and_holds_nothing_when_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[CudaRunner] = []
    monkeypatch.setattr(backend, "is_interpreted", lambda: False)
    run = CudaRunner.run

    def note(runner: CudaRunner, batch: BatchInputs, sampling: SamplingBatch) -> object:
        seen.append(runner)
        if len(seen) > 2 * len(STEPS):
            raise Unavailable("no room")
        return run(runner, batch, sampling)

    monkeypatch.setattr(CudaRunner, "run", note)
    runner = backend.load_runner(MODEL, OPTIONS)
    assert seen == [runner] * 2 * len(STEPS)
    assert not runner.plain_steps
    closed: list[CudaRunner] = []

    def close(runner: CudaRunner) -> None:
        closed.append(runner)

    monkeypatch.setattr(CudaRunner, "close", close)
    with pytest.raises(Unavailable, match="no room"):
        backend.load_runner(MODEL, OPTIONS)
    assert closed == seen[-1:]
