"""Tokenizers from folders and GGUF files give the right ids, never a doubled BOS, and exact bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf_builder import byte_level_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import END_OF_TEXT, IM_END, NUM_TOKENS, tokenizer_json, write_json
from tokenizers import Tokenizer

from naru_proto.errors import InvalidRequest
from naru_worker.adapters.models.opening import open_model
from naru_worker.adapters.tokenizer.folder_tokenizer import folder_tokenizer
from naru_worker.adapters.tokenizer.gguf_tokenizer import gguf_tokenizer
from naru_worker.adapters.tokenizer.model_tokenizer import ModelTokenizer
from naru_worker.adapters.tokenizer.pre_tokenizers import PRE_TOKENIZATIONS
from naru_worker.core.detokenizer import Detokenizer
from naru_worker.core.fields import Fields

TEXT = "čaj žluť 🧑‍🚀 漢字 ﷽"
BOS = "<|endoftext|>"


def in_folder(folder: Path, config: dict[str, Any] | None = None, **parts: Any) -> ModelTokenizer:
    write_json(folder / "tokenizer.json", tokenizer_json(**parts))
    write_json(folder / "tokenizer_config.json", {"bos_token": BOS} if config is None else config)
    return folder_tokenizer(folder, 4096)


def in_gguf(**changes: Any) -> ModelTokenizer:
    keys = {name.replace("__", "."): item for name, item in changes.items()}
    return gguf_tokenizer(Fields("m.gguf", byte_level_tokenizer() | keys), 4096)


def joined(tokenizer: ModelTokenizer, ids: list[int]) -> str:
    return b"".join(tokenizer.piece(i) or b"" for i in ids).decode(errors="replace")


ADDS_BOS = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": BOS, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {BOS: {"id": BOS, "ids": [END_OF_TEXT], "tokens": [BOS]}},
}


def test_folder_and_gguf_of_one_vocabulary_agree(tmp_path: Path) -> None:
    folder, gguf = in_folder(tmp_path), in_gguf()
    for text in ("", "a", TEXT, "x<|im_end|>y", "it's 1234  \n\n"):
        assert folder.encode(text, add_special_tokens=False) == gguf.encode(text, add_special_tokens=False)
    assert folder.encode("x<|im_end|>", add_special_tokens=False)[-1] == IM_END
    assert folder.vocab_size == gguf.vocab_size == NUM_TOKENS
    assert (folder.bos_token_id, folder.bos_token) == (gguf.bos_token_id, gguf.bos_token) == (END_OF_TEXT, BOS)


@pytest.mark.parametrize(
    ("post_processor", "config", "count"),
    [
        (None, {"bos_token": BOS}, 0),
        (ADDS_BOS, {"bos_token": BOS}, 1),
        (ADDS_BOS, {"bos_token": BOS, "add_bos_token": True}, 1),
        (ADDS_BOS, {"bos_token": BOS, "add_bos_token": False}, 0),
        (None, {"bos_token": BOS, "add_bos_token": True}, 1),
        (None, {"bos_token": {"content": BOS}, "add_bos_token": True}, 1),
        (None, {"add_bos_token": True}, 0),
        (ADDS_BOS, {}, 1),
    ],
)
def test_plain_text_gets_the_bos_the_tokenizer_wants(
    tmp_path: Path, post_processor: Any, config: dict[str, Any], count: int
) -> None:
    tokenizer = in_folder(tmp_path, config, post_processor=post_processor)
    assert tokenizer.encode("hi", add_special_tokens=True).count(END_OF_TEXT) == count
    assert tokenizer.encode("", add_special_tokens=True).count(END_OF_TEXT) == count
    assert tokenizer.encode("hi", add_special_tokens=False).count(END_OF_TEXT) == 0


def test_bos_is_never_doubled(tmp_path: Path) -> None:
    for tokenizer in (in_folder(tmp_path, post_processor=ADDS_BOS), in_gguf(tokenizer__ggml__add_bos_token=True)):
        once = tokenizer.encode("hi", add_special_tokens=True)
        assert once[0] == END_OF_TEXT and once.count(END_OF_TEXT) == 1
        assert tokenizer.encode(BOS + "hi", add_special_tokens=True) == once
        assert tokenizer.encode(BOS + "hi", add_special_tokens=False) == once


def test_gguf_kinds_that_begin_with_bos_by_themselves() -> None:
    assert in_gguf().encode("hi", add_special_tokens=True)[0] != END_OF_TEXT
    assert in_gguf(tokenizer__ggml__pre="llama-bpe").encode("hi", add_special_tokens=True)[0] == END_OF_TEXT
    off = in_gguf(tokenizer__ggml__pre="llama-bpe", tokenizer__ggml__add_bos_token=False)
    assert off.encode("hi", add_special_tokens=True)[0] != END_OF_TEXT


def test_truncation_and_padding_of_the_file_are_not_obeyed(tmp_path: Path) -> None:
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": BOS,
    }
    tokenizer = in_folder(tmp_path, truncation=truncation, padding=padding)
    assert len(tokenizer.encode("abcd", add_special_tokens=False)) == 4


def test_a_lone_surrogate_is_the_callers_fault(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        in_folder(tmp_path).encode("a\ud800", add_special_tokens=True)


def with_added(folder: Path) -> ModelTokenizer:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    added = tokenizer_json()["added_tokens"]
    added += [{"id": 259 + i, "content": text, **flags} for i, text in enumerate(("<tool>", "two words", "žluť"))]
    return in_folder(folder, added_tokens=added)


def test_added_tokens_stay_and_special_ones_go(tmp_path: Path) -> None:
    tokenizer = with_added(tmp_path)
    ids = [*tokenizer.encode("a<tool>two wordsžluť", add_special_tokens=False), IM_END]
    assert ids[-4:] == [259, 260, 261, IM_END]
    assert joined(tokenizer, ids) == tokenizer.decode(ids) == "a<tool>two wordsžluť"
    assert tokenizer.piece(IM_END) is None and tokenizer.special_text(IM_END) == "<|im_end|>"
    assert tokenizer.special_text(259) is None
    assert tokenizer.token_bytes(IM_END) == b"<|im_end|>" and tokenizer.token_bytes(259) == b"<tool>"
    assert tokenizer.vocab_size == 262


@pytest.mark.parametrize("token_id", [-1, 262, 2**31, 2**40])
def test_an_unknown_id_has_no_text(tmp_path: Path, token_id: int) -> None:
    tokenizer = with_added(tmp_path)
    assert tokenizer.piece(token_id) is None
    assert tokenizer.token_bytes(token_id) == b""


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return with_added(tmp_path_factory.mktemp("tokenizer"))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 261), max_size=40))
def test_joined_bytes_are_the_decoded_text(byte_level: ModelTokenizer, ids: list[int]) -> None:
    assert joined(byte_level, ids) == byte_level.decode(ids)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40))
def test_text_comes_back_token_by_token(byte_level: ModelTokenizer, text: str) -> None:
    if any("\ud800" <= char <= "\udfff" for char in text):
        return
    ids = byte_level.encode(text, add_special_tokens=False)
    stream = Detokenizer(byte_level)
    assert "".join(map(stream.feed, ids)) + stream.finish() == text


def test_a_vocabulary_without_a_character_is_the_callers_fault(tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}
    tokenizer = in_folder(tmp_path, {}, model=model, added_tokens=[])
    with pytest.raises(InvalidRequest, match="cannot be tokenized"):
        tokenizer.encode("b", add_special_tokens=True)


# --- how text is cut, by the kinds of byte-level vocabularies -------------------------------------------------------

CUTS = {
    "gpt-2": ["it", "'s", " 1234", " words", "  ", " x", "!?", "\n\n", " end"],
    "smollm": ["it", "'s", " ", "1", "2", "3", "4", " words", "  ", " x", "!?", "\n\n", " end"],
    "llama-bpe": ["it", "'s", " ", "123", "4", " words", "  ", " x", "!?\n\n", " end"],
    "qwen2": ["it", "'s", " ", "1", "2", "3", "4", " words", "  ", " x", "!?\n\n", " end"],
    "llama3": ["it", "'s", " ", "123", "4", " words", "  ", " x", "!?\n\n", " end"],
    "llama-v3": ["it", "'s", " ", "123", "4", " words", "  ", " x", "!?\n\n", " end"],
    "deepseek-r1-qwen": ["it", "'s", " ", "1", "2", "3", "4", " words", "  ", " x", "!?\n\n", " end"],
    "default": ["it", "'", "s", " ", "123", "4", " words", "  ", " x", "!?", "\n\n", " end"],
}


@pytest.mark.parametrize("kind", CUTS)
def test_text_is_cut_as_the_vocabulary_was_trained(kind: str) -> None:
    text = "it's 1234 words   x!?\n\n end"
    backend = Tokenizer.from_str(json.dumps(tokenizer_json()))
    backend.pre_tokenizer = PRE_TOKENIZATIONS[kind].make_pre_tokenizer()
    spans = [span for _, span in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert [text[start:stop] for start, stop in spans] == CUTS[kind]


def test_every_kind_in_the_table_is_checked() -> None:
    assert set(CUTS) == set(PRE_TOKENIZATIONS)


def test_qwen2_composes_characters() -> None:
    tokenizer = in_gguf(tokenizer__ggml__pre="qwen2")
    assert tokenizer.encode("e\u0301", add_special_tokens=False) == tokenizer.encode("\u00e9", add_special_tokens=False)


def test_llama_bpe_takes_whole_words_without_merging() -> None:
    tokens = [*byte_level_tokenizer()["tokenizer.ggml.tokens"], "whole"]
    parts = {"tokenizer__ggml__tokens": tokens, "tokenizer__ggml__token_type": [1] * 256 + [3] * 3 + [1]}
    whole = in_gguf(tokenizer__ggml__pre="llama-bpe", **parts)
    assert whole.encode("whole", add_special_tokens=False) == [259]
    assert len(in_gguf(**parts).encode("whole", add_special_tokens=False)) == 5


def test_merges_apply_in_their_order() -> None:
    tokens = [*byte_level_tokenizer()["tokenizer.ggml.tokens"], "bc", "ab"]
    parts = {"tokenizer__ggml__tokens": tokens, "tokenizer__ggml__token_type": [1] * 256 + [3] * 3 + [1] * 2}
    first = in_gguf(**parts, tokenizer__ggml__merges=["b c", "a b"]).encode("abc", add_special_tokens=False)
    second = in_gguf(**parts, tokenizer__ggml__merges=["a b", "b c"]).encode("abc", add_special_tokens=False)
    assert (first[-1], second[0]) == (259, 260)


# --- the real vocabulary --------------------------------------------------------------------------------------------


@pytest.mark.smollm2
def test_the_real_vocabulary_round_trips_and_splits_digits(smollm2_path: Path) -> None:
    tokenizer = open_model(smollm2_path).tokenizer
    ids = tokenizer.encode(TEXT, add_special_tokens=True)
    assert joined(tokenizer, ids) == tokenizer.decode(ids) == TEXT
    assert tokenizer.encode("The capital of France is", add_special_tokens=True) == [504, 3575, 282, 4649, 314]
    assert len(tokenizer.encode("2024", add_special_tokens=False)) == 4
    assert tokenizer.encode("<|im_start|>", add_special_tokens=False) == [1]
    every = range(tokenizer.vocab_size)
    assert sum(tokenizer.piece(i) is None for i in every) == 17
    assert all(joined(tokenizer, [i]) == tokenizer.decode([i]) for i in every)
