"""Which part of a model each rank has, and that the parts are the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from memory_models import MemoryCheckpoint, checkpoint_of, config_of

from naru_proto.errors import LoadError
from naru_worker.adapters.ops.ref_dequant import dequantize
from naru_worker.adapters.ops.tensor_parallel.sharded_checkpoint import ShardedCheckpoint
from naru_worker.adapters.ops.tensor_parallel.sharding import InnerBlocks, shard_of
from naru_worker.core.model_config import ExpertsConfig
from naru_worker.core.weight_layout import expected_shapes


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size", "heads", "kv_heads"),
    [
        (8, 4, 2, [range(0, 4), range(4, 8)], [range(0, 2), range(2, 4)]),
        (8, 2, 4, [range(0, 2), range(2, 4), range(4, 6), range(6, 8)], [range(0, 1)] * 2 + [range(1, 2)] * 2),
        (4, 1, 2, [range(0, 2), range(2, 4)], [range(0, 1)] * 2),
        (14, 2, 2, [range(0, 7), range(7, 14)], [range(0, 1), range(1, 2)]),
        (6, 6, 1, [range(0, 6)], [range(0, 6)]),
    ],
)
def test_each_rank_has_the_kv_heads_of_its_query_heads(
    num_heads: int, num_kv_heads: int, size: int, heads: list[range], kv_heads: list[range]
) -> None:
    config = config_of(num_heads=num_heads, num_kv_heads=num_kv_heads)
    shards = [shard_of(config, rank, size) for rank in range(size)]
    assert [shard.heads for shard in shards] == heads
    assert [shard.kv_heads for shard in shards] == kv_heads
    group = num_heads // num_kv_heads
    for shard in shards:
        assert {head // group for head in shard.heads} == set(shard.kv_heads)
        assert (shard.config.num_heads, shard.config.num_kv_heads) == (len(shard.heads), len(shard.kv_heads))


def test_columns_that_share_a_scale_stay_together_and_the_parts_may_be_unequal() -> None:
    config = config_of(intermediate_size=43 * 256, vocab_size=259)
    shards = [shard_of(config, rank, 2, InnerBlocks(256)) for rank in range(2)]
    assert [shard.inner for shard in shards] == [range(0, 22 * 256), range(22 * 256, 43 * 256)]
    assert [shard.config.intermediate_size for shard in shards] == [22 * 256, 21 * 256]
    assert [shard.vocab for shard in shards] == [range(0, 130), range(130, 259)]


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({"num_heads": 9, "num_kv_heads": 3}, 2, "num_heads is 9: .* 2 ranks; .* a divisor of num_heads"),
        ({"num_heads": 12, "num_kv_heads": 3}, 2, "num_kv_heads is 3: .* a divisor or a multiple of num_kv_heads"),
        ({"intermediate_size": 64}, 4, "intermediate_size is 64, in blocks of 32 .* use at most 2"),
        ({"experts": ExpertsConfig(2, 1, 64, True, (0, 1))}, 4, "the size of an expert is 64, .* use at most 2"),
        ({"vocab_size": 1}, 2, "vocab_size is 1: .* at most vocab_size"),
    ],
)
def test_a_model_that_cannot_be_split_says_why_and_what_would_do(
    changes: dict[str, Any], size: int, message: str
) -> None:
    with pytest.raises(LoadError, match=message) as caught:
        shard_of(config_of(**changes), 0, size, InnerBlocks(32, 32))
    assert caught.value.param == "tensor_parallel_size"
    with pytest.raises(ValueError, match="rank is 2 of 2"):
        shard_of(config_of(), 2, 2)


def values(checkpoint: Any, name: str) -> Any:
    tensor = checkpoint.get(name)
    assert tensor.data.readonly or isinstance(checkpoint, MemoryCheckpoint)
    decoded = dequantize(tensor)
    assert decoded.shape == tensor.shape
    return decoded


EXPERTS = ExpertsConfig(num_experts=3, num_chosen=2, inner_size=96, renormalizes=True, layers=(1,), shared_size=160)

MODELS: dict[str, tuple[MemoryCheckpoint, int]] = {
    "experts": (
        checkpoint_of(config_of(architecture="qwen2moe", qk_norm=True, experts=EXPERTS), {"down": "q4_0"}, "f16"),
        2,
    ),
    "grouped heads, all biases": (
        checkpoint_of(config_of(num_heads=8, qkv_bias=True, o_bias=True, mlp_bias=True), default="f16"),
        4,
    ),
    "tied head, quantized": (
        checkpoint_of(config_of(tie_word_embeddings=True), {"o": "q4_0", "down": "q8_0", "embed": "q4_1"}, "q4_0"),
        2,
    ),
    "blocks of 256": (
        checkpoint_of(
            config_of(num_heads=8, num_kv_heads=4, head_dim=64, intermediate_size=768, hidden_size=256, num_layers=1),
            {"down": "q6_k"},
            "q4_k",
        ),
        2,
    ),
    "learned positions, plain mlp": (
        checkpoint_of(
            config_of(
                norm="layer", rope=None, activation="gelu", num_kv_heads=4, max_position_embeddings=32, mlp_bias=True
            )
        ),
        2,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_rows_and_columns_of_all_ranks_are_the_whole_tensor(name: str) -> None:
    whole, size = MODELS[name]
    config = whole.config
    ranks = [ShardedCheckpoint(whole, rank, size) for rank in range(size)]
    assert all(rank.revision == "memory" for rank in ranks)
    assert not ranks[0].config.tie_word_embeddings
    for full in expected_shapes(config):
        part, expected = full.rpartition(".")[2], values(whole, full)
        if part in ("q", "q_bias", "gate", "gate_bias", "up", "up_bias"):
            assert np.array_equal(np.concatenate([values(rank, full) for rank in ranks]), expected), full
        elif part in ("k", "k_bias", "v", "v_bias"):
            every = max(1, size // config.num_kv_heads)
            assert np.array_equal(np.concatenate([values(rank, full) for rank in ranks[::every]]), expected), full
            for i, rank in enumerate(ranks):
                assert np.array_equal(values(rank, full), values(ranks[i // every * every], full))
        elif part in ("o", "down"):
            assert np.array_equal(np.concatenate([values(rank, full) for rank in ranks], axis=1), expected), full
        elif part in ("o_bias", "down_bias"):
            assert [rank.has(full) for rank in ranks] == [True] + [False] * (size - 1)
            assert np.array_equal(values(ranks[0], full), expected)
            with pytest.raises(LoadError, match="rank 1 has no tensor"):
                ranks[1].get(full)
        elif full != "lm_head":
            assert all(np.array_equal(values(rank, full), expected) for rank in ranks), full
    head = values(whole, "embed" if config.tie_word_embeddings else "lm_head")
    assert np.array_equal(np.concatenate([values(rank, "lm_head") for rank in ranks]), head)
    shapes = expected_shapes(ranks[0].config) | {"lm_head": (len(ranks[0].shard.vocab), config.hidden_size)}
    for full, shape in shapes.items():
        assert ranks[0].get(full).shape == shape, full


def test_rows_are_views_of_the_file_and_columns_copies_of_themselves_alone() -> None:
    whole, _ = MODELS["tied head, quantized"]
    rank = ShardedCheckpoint(whole, 1, 2)
    for name in ("layers.0.q", "layers.1.gate", "lm_head"):
        source = whole.get("embed" if name == "lm_head" else name)
        ours = np.frombuffer(rank.get(name).data, np.uint8)
        assert np.shares_memory(ours, np.frombuffer(source.data, np.uint8)), name
    down = rank.get("layers.0.down").data
    assert down.nbytes == len(down.obj) == 64 * 34, "one block of 34 bytes a row"  # type: ignore[arg-type]


def test_a_tensor_whose_blocks_would_be_parted_is_named() -> None:
    whole = checkpoint_of(config_of(), {"o": "q4_0"})
    rank = ShardedCheckpoint(whole, 0, 4)
    with pytest.raises(LoadError, match=r"'layers.0.o' is q4_0, where 32 columns share a scale: .* columns 0 and 16"):
        rank.get("layers.0.o")


@pytest.mark.parametrize("name", MODELS)
def test_sizes_are_known_without_reading_columns(name: str) -> None:
    whole, size = MODELS[name]
    rank = ShardedCheckpoint(whole, size - 1, size)
    blank = rank.sizes()
    for full in expected_shapes(rank.config):
        if not rank.has(full):
            continue
        ours, theirs = blank.get(full), rank.get(full)
        assert (ours.name, ours.format, ours.shape) == (theirs.name, theirs.format, theirs.shape)
        assert ours.data.nbytes == theirs.data.nbytes
        if full.endswith((".o", ".down")):
            assert ours.data.strides == (0,), "one byte of memory"
