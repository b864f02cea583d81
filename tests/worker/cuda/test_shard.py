"""Two ranks of the GPU backend under Triton's interpreter, in threads, against the reference backend as a whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from batches import batch_of, lanes_for  # noqa: E402
from memory_models import checkpoint_of, config_of  # noqa: E402
from sampling_batches import greedy_batch  # noqa: E402
from thread_ranks import ThreadRanks  # noqa: E402

from naru_worker.adapters.ops import ref  # noqa: E402
from naru_worker.adapters.ops.cuda.shard import load_shard  # noqa: E402
from naru_worker.adapters.ops.protocol import Runner, RunnerOptions  # noqa: E402
from naru_worker.adapters.ops.tensor_parallel import collectives  # noqa: E402
from naru_worker.adapters.ops.tensor_parallel.collectives import TorchCollectives  # noqa: E402
from naru_worker.adapters.ops.tensor_parallel.parallel_ops import ParallelOps  # noqa: E402
from naru_worker.adapters.ops.tensor_parallel.sharded_checkpoint import ShardedCheckpoint  # noqa: E402

OPTIONS = RunnerOptions(16, 8, 64, 4, 128, kv_format="f32")


def test_two_ranks_give_the_logits_and_tokens_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = checkpoint_of(
        config_of(num_layers=1, tie_word_embeddings=True, qkv_bias=True, o_bias=True), {"embed": "q8_0"}, "q4_0"
    )
    ranks = ThreadRanks(2)
    monkeypatch.setattr(collectives, "dist", ranks)

    def logits_of(runner: Runner, *, is_follower: bool = False) -> Any:
        found: list[Any] = []
        [lane] = lanes_for([[5, 6, 7, 8, 9]], 16, 2)
        for count in (5, 1):
            batch = batch_of([(lane, count)], 16)
            if is_follower:
                runner.follow(batch)  # type: ignore[attr-defined]
                runner.follow(batch)  # type: ignore[attr-defined]
            else:
                found.append(runner.logits(batch).copy())
                found.append(runner.run(batch, greedy_batch(1, 97)).token_ids.copy())
            lane.num_computed += count
            lane.token_ids.append(11)
        return found

    def work(rank: int) -> Any:
        mine = TorchCollectives(rank, 2)
        runner = load_shard(ShardedCheckpoint(whole, rank, 2), OPTIONS, lambda ops: ParallelOps(ops, mine, 97))
        [lane] = lanes_for([[1]], 16, 0)
        runner.prepare(batch_of([(lane, 1)], 16))
        return logits_of(runner, is_follower=rank > 0)

    [ours, _] = ranks.run(work)
    expected = logits_of(ref.load_runner(whole, OPTIONS))
    for i in (0, 2):
        assert np.abs(ours[i] - expected[i]).max() < 2e-3 * np.abs(expected[i]).max()
        assert ours[i + 1].tolist() == expected[i + 1].tolist()
