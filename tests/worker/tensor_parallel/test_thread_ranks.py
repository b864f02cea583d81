"""The arithmetic of ranks, in threads: the same logits as one rank, and the same bits however they are exchanged."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from batches import all_logits  # noqa: E402
from memory_models import MemoryCheckpoint, checkpoint_of, config_of  # noqa: E402
from thread_ranks import ThreadRanks  # noqa: E402

from naru_worker.adapters.ops.protocol import RunnerOptions  # noqa: E402
from naru_worker.adapters.ops.ref import load_runner, weight_bytes  # noqa: E402
from naru_worker.adapters.ops.tensor_parallel import collectives  # noqa: E402
from naru_worker.adapters.ops.tensor_parallel.collectives import TorchCollectives  # noqa: E402
from naru_worker.adapters.ops.tensor_parallel.errors import CollectiveFailed  # noqa: E402
from naru_worker.adapters.ops.tensor_parallel.parallel_ops import ParallelOps  # noqa: E402
from naru_worker.adapters.ops.tensor_parallel.ref_shard import load_shard  # noqa: E402
from naru_worker.adapters.ops.tensor_parallel.sharded_checkpoint import ShardedCheckpoint  # noqa: E402
from naru_worker.adapters.ops.tensor_parallel.shards import shard_sizes  # noqa: E402
from naru_worker.core.model_config import ExpertsConfig  # noqa: E402

OPTIONS = RunnerOptions(
    block_size=16, num_blocks=8, max_num_tokens=64, max_num_seqs=4, max_model_len=128, kv_format="f32"
)

MODELS: dict[str, tuple[MemoryCheckpoint, int]] = {
    "more ranks than kv heads, all biases": (
        checkpoint_of(config_of(num_heads=8, qkv_bias=True, o_bias=True, mlp_bias=True)),
        4,
    ),
    "quantized, tied head, unequal parts": (
        checkpoint_of(config_of(tie_word_embeddings=True), {"embed": "q8_0"}, "q4_0"),
        2,
    ),
    "experts, one shared, norms of heads": (
        checkpoint_of(
            config_of(
                architecture="qwen2moe",
                qk_norm=True,
                experts=ExpertsConfig(
                    num_experts=4, num_chosen=2, inner_size=24, renormalizes=False, layers=(1,), shared_size=40
                ),
            )
        ),
        2,
    ),
    "learned positions, windows": (
        checkpoint_of(
            config_of(
                norm="layer",
                rope=None,
                activation="gelu_tanh",
                num_heads=6,
                num_kv_heads=3,
                max_position_embeddings=64,
                sliding_windows=(7, None),
            )
        ),
        3,
    ),
}


@pytest.mark.parametrize("small_bytes", [0, 1 << 30])
@pytest.mark.parametrize("name", MODELS)
def test_ranks_give_the_logits_of_one(name: str, small_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, size = MODELS[name]
    ranks = ThreadRanks(size)
    monkeypatch.setattr(collectives, "dist", ranks)
    monkeypatch.setattr(collectives, "SMALL_BYTES", small_bytes)
    token_ids = list(range(3, 40))

    def work(rank: int) -> Any:
        mine = TorchCollectives(rank, size)
        runner = load_shard(
            ShardedCheckpoint(whole, rank, size), OPTIONS, lambda ops: ParallelOps(ops, mine, whole.config.vocab_size)
        )
        return all_logits(runner, token_ids, chunk=20), mine.num_begun

    results = ranks.run(work)
    expected = all_logits(load_runner(whole, OPTIONS), token_ids, chunk=20)
    # The sums over o's and down's columns are rounded in another order: some float32 roundings (6e-8) of the largest.
    np.testing.assert_allclose(results[0][0], expected, rtol=0, atol=4e-6 * float(np.abs(expected).max()))
    experts = whole.config.experts
    # Attention and MLP of each layer, and where one is a shared expert; the logits. In two steps.
    num_exchanges = 2 * (2 * whole.config.num_layers + len(experts.layers if experts else ()) + 1)
    assert [num_begun for _, num_begun in results] == [num_exchanges] * size
    assert ("all_to_all" in ranks.num_exchanges) == (small_bytes == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_ranks_get_the_same_bits_whatever_the_way_and_whoever_is_in_the_batch(
    dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, rows, width = 3, 5, 7
    generator = torch.Generator().manual_seed(0)
    partial = (torch.randn(size, rows, width, generator=generator) * 100).to(dtype)
    residual = torch.randn(rows, width, generator=generator).to(dtype)
    ranks = ThreadRanks(size)
    monkeypatch.setattr(collectives, "dist", ranks)

    def sums(small_bytes: int, some: slice) -> list[Any]:
        monkeypatch.setattr(collectives, "SMALL_BYTES", small_bytes)

        def add(rank: int) -> Any:
            return TorchCollectives(rank, size).add(partial[rank, some], residual[some])

        return ranks.run(add)

    expected = (((partial[0].float() + partial[1]) + partial[2]) + residual).to(dtype)
    for small_bytes in (0, 1 << 30):
        for got in sums(small_bytes, slice(None)):
            assert got.dtype == dtype
            assert torch.equal(got, expected)
        for got in sums(small_bytes, slice(2, 3)):
            assert torch.equal(got, expected[2:3])


def test_columns_are_gathered_on_rank_0_in_order_though_ranks_have_unequally_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = torch.arange(22.0).view(2, 11)
    for size, cuts in ((2, [6]), (3, [4, 8]), (4, [3, 6, 9])):
        ranks = ThreadRanks(size)
        monkeypatch.setattr(collectives, "dist", ranks)

        def gather(rank: int, size: int = size, cuts: list[int] = cuts) -> Any:
            return TorchCollectives(rank, size).gather_columns(torch.tensor_split(whole, cuts, dim=1)[rank], 11)

        results = ranks.run(gather)
        assert torch.equal(results[0], whole)
        assert results[1:] == [None] * (size - 1)


def test_where_no_row_has_logits_nothing_is_exchanged() -> None:
    alone = TorchCollectives(0, 2), TorchCollectives(1, 2)
    assert [
        None if got is None else tuple(got.shape)
        for got in (each.gather_columns(torch.zeros(0, 3), 5) for each in alone)
    ] == [(0, 5), None]
    assert [each.num_begun for each in alone] == [0, 0]


def test_an_exchange_that_fails_is_told_from_other_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    ranks = ThreadRanks(1)
    for name in ("all_gather_into_tensor", "gather"):
        monkeypatch.setattr(ranks, name, fail)
    monkeypatch.setattr(collectives, "dist", ranks)
    x = torch.zeros(1, 2)
    with pytest.raises(CollectiveFailed, match="Connection closed by peer"):
        TorchCollectives(0, 2).add(x, x)
    with pytest.raises(CollectiveFailed, match="Connection closed by peer"):
        TorchCollectives(0, 2).gather_columns(x, 4)


@pytest.mark.parametrize("name", MODELS)
def test_no_rank_has_more_weights_than_the_first_whose_bytes_are_booked(name: str) -> None:
    whole, size = MODELS[name]
    taken = []
    for rank in range(size):
        part = ShardedCheckpoint(whole, rank, size)
        mine = TorchCollectives(rank, size)
        runner = load_shard(part, OPTIONS, functools.partial(ParallelOps, collectives=mine, vocab_size=97))
        assert runner.weight_bytes == weight_bytes(part.sizes())
        taken.append(runner.weight_bytes)
    assert weight_bytes(shard_sizes(whole, size)) == taken[0] == max(taken)
    assert taken[0] < weight_bytes(whole)
