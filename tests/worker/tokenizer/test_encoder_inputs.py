"""Inputs of encoders: pairs, types and cuts are those of the reference implementation."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tiny_encoders import write_tokenizer
from tokenizers import Tokenizer

from naru_proto.errors import InvalidRequest
from naru_worker.adapters.tokenizer.folder_tokenizer import read_tokenizer_files, tokenizer_of_files
from naru_worker.adapters.tokenizer.model_tokenizer import ModelTokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


@pytest.fixture
def tokenizer(folder: Path) -> ModelTokenizer:
    return tokenizer_of_files(read_tokenizer_files(folder), 61, generates=False)


def test_inputs_equal_the_librarys_own_whatever_is_cut(folder: Path, tokenizer: ModelTokenizer) -> None:
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.no_padding()
    rng = random.Random(5)
    words = ["the", "cat", "sat", "mats", "on", "a", "b", "unknown", "."]
    for _ in range(300):
        first, second = (" ".join(rng.choices(words, k=rng.randint(0, 14))) for _ in range(2))
        limit = rng.choice([None, 4, 5, 8, 9, 16])
        library.no_truncation() if limit is None else library.enable_truncation(limit)
        for pair in (None, second):
            want = library.encode(first) if pair is None else library.encode(first, pair)
            got = tokenizer.encode_input(first, pair, add_special_tokens=True, max_tokens=limit)
            assert got.token_ids == tuple(want.ids), (first, pair, limit)
            assert (got.token_types or (0,) * len(got.token_ids)) == tuple(want.type_ids)


def test_a_cut_that_leaves_no_room_for_text_is_refused(tokenizer: ModelTokenizer) -> None:
    with pytest.raises(InvalidRequest, match="2 are special") as refused:
        tokenizer.encode_input("the cat", add_special_tokens=True, max_tokens=2)
    assert refused.value.param == "truncate_tokens"
    assert tokenizer.encode_input("the cat", add_special_tokens=False, max_tokens=1).num_truncated == 1


def test_tokens_of_a_model_that_writes_nothing_can_be_listed(tokenizer: ModelTokenizer) -> None:
    ids = tokenizer.encode("mats", add_special_tokens=True)
    assert [tokenizer.token_bytes(i) for i in ids] == [b"[CLS]", b"mat", b"##s", b"[SEP]"]
    assert tokenizer.decode(ids) == "mats"
