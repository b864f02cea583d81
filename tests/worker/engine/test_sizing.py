"""What a model gets on a worker, from its files' sizes, its load's options and the budget."""

from __future__ import annotations

from typing import Any

import pytest

from naru_proto.errors import InvalidRequest, LoadError
from naru_worker.adapters.engine.sizing import FileFacts, ModelSize, merge_options, runner_options, size_model
from naru_worker.core.model_config import ModelConfig
from naru_worker.core.residency import KVCacheDtype, LoadOptions
from naru_worker.settings import BackendName, EngineSettings, MemorySettings

MB = 2**20
ENGINE = EngineSettings(max_num_seqs=4)
CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=100,
    hidden_size=64,
    intermediate_size=64,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=64,
    max_position_embeddings=2048,
    norm="rms",
    norm_eps=1e-5,
    activation="swiglu",
    rope=None,
    tie_word_embeddings=True,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    sliding_windows=(),
    bos_token_id=None,
    eos_token_ids=(),
)
BLOCK_BYTES = MB // 2
FACTS = FileFacts(CONFIG, "w", 100 * MB, BLOCK_BYTES, 20 * MB, 9 * MB)


def size(budget_bytes: int = 1000 * MB, **options: Any) -> ModelSize:
    load = LoadOptions(**options)
    base = runner_options(ENGINE, merge_options(ENGINE, load), 2048, 2)
    return size_model("m", FACTS, base, ENGINE, MemorySettings(), load, budget_bytes)


def test_a_cache_starts_with_a_sequence_of_512_tokens_and_may_grow_to_all_that_can_be_used() -> None:
    found = size()
    assert found.runner_options.num_blocks == 4 * 128 + 1
    # 32 blocks and the null block, in whole chunks of 2 MiB.
    assert found.footprint.kv_floor_bytes == 18 * MB
    assert found.footprint.weight_bytes == 100 * MB
    assert found.footprint.private_bytes > 9 * MB


def test_a_load_says_what_the_cache_is_made_of_before_the_worker_does() -> None:
    def chosen(of_worker: KVCacheDtype, of_load: KVCacheDtype | None, backend: BackendName = "cpu") -> str:
        settings = EngineSettings(backend=backend, kv_cache_dtype=of_worker)
        return runner_options(settings, merge_options(settings, LoadOptions(kv_cache_dtype=of_load)), 64, 1).kv_format

    assert (chosen("auto", None), chosen("auto", None, "ref")) == ("f16", "f32")
    assert (chosen("int8", None), chosen("int8", "float16"), chosen("int8", "auto")) == ("int8", "f16", "f16")
    assert (chosen("auto", "int8"), chosen("auto", "int8", "ref")) == ("int8", "int8")


def test_a_least_size_is_what_it_starts_with_and_a_largest_what_it_grows_to() -> None:
    found = size(kv_cache_min_bytes=100 * MB, kv_cache_bytes=200 * MB, max_model_len=1024)
    assert found.footprint.kv_floor_bytes == 100 * MB
    assert found.runner_options.num_blocks * BLOCK_BYTES == 200 * MB


def test_a_least_size_above_the_workers_default_raises_the_largest() -> None:
    assert size(10**4 * MB, kv_cache_min_bytes=200 * MB).footprint.kv_floor_bytes == 200 * MB


def test_a_least_size_that_the_budget_never_holds_is_refused_with_the_numbers() -> None:
    with pytest.raises(LoadError, match=str(900 * MB)) as caught:
        size(kv_cache_min_bytes=900 * MB)
    assert caught.value.param == "kv_cache_min_bytes"


def test_a_context_is_cut_to_what_the_budget_holds_and_says_so() -> None:
    found = size(100 * MB + 20 * MB + 13 * MB + 41 * BLOCK_BYTES)
    assert found.runner_options.max_model_len == 640
    assert "640" in found.reason


def test_a_load_s_word_on_speculation_wins_over_the_worker_s() -> None:
    assert size().max_draft_tokens == ENGINE.max_draft_tokens
    assert size(speculation="off").max_draft_tokens == 0
    assert size(max_draft_tokens=3).max_draft_tokens == 3
    off = EngineSettings(max_num_seqs=4, speculation="off", max_draft_tokens=6)
    assert merge_options(off, LoadOptions()).max_draft_tokens == 0
    assert merge_options(off, LoadOptions(speculation="auto")).max_draft_tokens == 6
    with pytest.raises(InvalidRequest, match="auto or off"):
        LoadOptions(speculation="maybe")
    with pytest.raises(InvalidRequest, match="max_draft_tokens"):
        LoadOptions(max_draft_tokens=0)


def test_a_model_is_cut_over_as_many_accelerators_as_its_load_or_the_worker_says() -> None:
    settings = EngineSettings(backend="ref", num_accelerators=6, tensor_parallel_size=2)
    assert merge_options(settings, LoadOptions()).tensor_parallel_size == 2
    found = merge_options(settings, LoadOptions(tensor_parallel_size=4))
    assert found.tensor_parallel_size == 4
    assert runner_options(settings, found, 64, 6).num_threads == 1, "ranks share the cores"
    with pytest.raises(LoadError, match=r"tensor_parallel_size is 3, .* num_accelerators is 6: write 1 or 2 or 4 or 6"):
        merge_options(settings, LoadOptions(tensor_parallel_size=3))
    with pytest.raises(InvalidRequest, match="tensor_parallel_size is 0; it must be at least 1"):
        LoadOptions(tensor_parallel_size=0)
