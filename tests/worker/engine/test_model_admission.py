"""Pure decisions around models and requests: memory, generations, limits; and what the machine allows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from naru_proto.errors import ContextLengthExceeded, InvalidRequest, LoadError
from naru_worker.adapters import machine
from naru_worker.core.memory_plan import MemoryNeed, MemoryWish, plan_memory
from naru_worker.core.request_limits import RequestLimits, check_prompt_text, resolve_params
from naru_worker.core.residency import LoadOptions
from naru_worker.core.sampling import SamplingParams

NEED = MemoryNeed(weight_bytes=1000, kv_block_bytes=10, block_size=16, max_position_embeddings=2048)
WISH = MemoryWish(max_num_seqs=4, max_model_len=None, kv_cache_bytes=None, default_kv_cache_bytes=10**9)


def wish(**given_: int | None) -> MemoryWish:
    values = {
        "max_num_seqs": 4,
        "max_model_len": None,
        "kv_cache_bytes": None,
        "default_kv_cache_bytes": 10**9,
        **given_,
    }
    return MemoryWish(**values)  # type: ignore[arg-type]


def test_no_more_blocks_than_all_sequences_could_fill() -> None:
    plan = plan_memory("m", NEED, WISH, 10**9)
    assert plan.num_blocks == 4 * 128 + 1
    assert plan.max_model_len == 2048
    assert plan.kv_bytes == plan.num_blocks * 10
    assert plan.reason == ""


def test_a_default_cache_shrinks_to_what_the_budget_allows_and_the_context_with_it() -> None:
    plan = plan_memory("m", NEED, WISH, 1000 + 41 * 10)
    assert (plan.num_blocks, plan.max_model_len) == (41, 640)
    assert "640" in plan.reason
    assert "2048" in plan.reason


@pytest.mark.parametrize(
    ("asked", "free", "words"),
    [
        (wish(), 999, ("1,000", "whole budget")),
        (wish(), 1000 + 10, ("whole budget",)),
        (wish(kv_cache_bytes=5000), 5999, ("whole budget",)),
        (wish(kv_cache_bytes=100), 10**6, ("kv_cache_bytes is 100", "512 tokens")),
        (wish(kv_cache_bytes=1000, max_model_len=2048), 10**6, ("kv_cache_bytes is 1000", "2048")),
        (wish(max_model_len=2048), 1000 + 100 * 10, ("whole budget",)),
        (wish(max_model_len=4096), 10**9, ("max_model_len is 4096", "2048")),
    ],
)
def test_what_does_not_fit_is_refused_with_need_and_budget(
    asked: MemoryWish, free: int, words: tuple[str, ...]
) -> None:
    with pytest.raises(LoadError) as caught:
        plan_memory("m", MemoryNeed(10**9, 10, 16, 2048) if words[0] == "1,000" else NEED, asked, free)
    for word in words:
        assert word in caught.value.message


@given(
    st.integers(0, 10**6),
    st.integers(1, 10**4),
    st.sampled_from([16, 32, 128]),
    st.integers(1, 10**5),
    st.integers(0, 10**9),
    st.one_of(st.none(), st.integers(1, 10**8)),
    st.one_of(st.none(), st.integers(1, 10**5)),
)
def test_a_plan_never_takes_more_than_the_budget_and_holds_one_whole_sequence(
    weights: int, block: int, size: int, context: int, free: int, kv: int | None, length: int | None
) -> None:
    need = MemoryNeed(weights, block, size, context)
    try:
        plan = plan_memory("m", need, wish(kv_cache_bytes=kv, max_model_len=length), free)
    except LoadError:
        return
    assert weights + plan.kv_bytes <= free
    assert (plan.num_blocks - 1) * size >= plan.max_model_len > 0
    assert length is None or plan.max_model_len == length
    assert kv is None or plan.kv_bytes <= kv


def test_options_must_be_positive() -> None:
    with pytest.raises(InvalidRequest) as caught:
        LoadOptions(max_model_len=0)
    assert caught.value.param == "max_model_len"


def test_an_unknown_element_type_of_the_cache_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidRequest, match="kv_cache_dtype is 'fp8'; use one of auto, float16, int8") as caught:
        LoadOptions(kv_cache_dtype="fp8")  # type: ignore[arg-type]
    assert caught.value.param == "kv_cache_dtype"


LIMITS = RequestLimits(max_model_len=100, vocab_limit=50, max_token_bytes=8)


def test_max_tokens_is_what_is_left() -> None:
    assert resolve_params((1,) * 60, SamplingParams(), LIMITS).max_tokens == 40
    assert resolve_params((1,) * 60, SamplingParams(max_tokens=40), LIMITS).max_tokens == 40
    assert resolve_params((1,) * 100, SamplingParams(max_tokens=0), LIMITS).max_tokens == 0
    late = resolve_params((1,) * 60, SamplingParams(min_tokens=90), LIMITS)
    assert (late.max_tokens, late.min_tokens) == (40, 40)


@pytest.mark.parametrize(
    ("length", "max_tokens", "numbers"), [(100, None, "100"), (101, 0, "101"), (5000, None, "5000"), (60, 41, "101")]
)
def test_what_does_not_fit_names_both_numbers(length: int, max_tokens: int | None, numbers: str) -> None:
    with pytest.raises(ContextLengthExceeded) as caught:
        resolve_params((1,) * length, SamplingParams(max_tokens=max_tokens), LIMITS)
    assert numbers in caught.value.message
    assert "100" in caught.value.message


def test_text_that_is_too_long_whatever_its_tokens_is_refused_unread() -> None:
    check_prompt_text(800, LIMITS)
    with pytest.raises(ContextLengthExceeded):
        check_prompt_text(801, LIMITS)


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"memory.max": "1000000"}, 1_000_000),
        ({"memory.max": "max"}, None),
        ({"memory/memory.limit_in_bytes": "9223372036854771712"}, None),
        ({"memory/memory.limit_in_bytes": "2000000"}, 2_000_000),
        ({}, None),
    ],
)
def test_the_cgroup_of_either_version_decides(tmp_path: Path, files: dict[str, str], limit: int | None) -> None:
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content + "\n")
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert machine.memory_limit_bytes(tmp_path) == (limit or host)
    assert 0 < machine.memory_available_bytes(tmp_path) <= (limit or host)


def test_file_pages_do_not_count_as_used(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000")
    (tmp_path / "memory.current").write_text("900000")
    (tmp_path / "memory.stat").write_text("anon 100000\ninactive_file 700000\n")
    assert machine.memory_available_bytes(tmp_path) == 800_000
