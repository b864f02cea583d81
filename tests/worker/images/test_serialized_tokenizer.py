"""A tokenizer written into an image is the very same when it is read again, and models share it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from gguf_builder import byte_level_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import byte_alphabet, tokenizer_json, write_json

from naru_proto.errors import LoadError
from naru_worker.adapters.models.opening import open_files
from naru_worker.adapters.tokenizer.cache import TokenizerCache
from naru_worker.adapters.tokenizer.folder_tokenizer import folder_tokenizer
from naru_worker.adapters.tokenizer.gguf_tokenizer import gguf_tokenizer
from naru_worker.adapters.tokenizer.model_tokenizer import ModelTokenizer
from naru_worker.adapters.tokenizer.serialized import tokenizer_from_bytes, tokenizer_to_bytes
from naru_worker.core.fields import Fields

TEXTS = (
    "",
    " ",
    "Hello, world! It's   12345 o'clock\r\n\r\n\tand   ",
    "Žluťoučký kůň úpěl ďábelské ódy",
    "日本語のテキスト — עברית العربية ไทย",
    "🤖👩‍👩‍👧‍👦🇨🇿 e\u0301 \u00e9 \ufb01 \u2126 \x00\x01\x7f\ufffd",
    "<|im_start|>user\n<|endoftext|><|im_end|> <|im_start|>",
    "▁the▁ <0x41> <s></s> <unk>",
    "def f(x):\n    return {'a': [1, 2.5e-3]}  # comment\n" * 3,
    "a" * 300,
)


def in_folder(folder: Path, parts: dict[str, Any], config: dict[str, Any]) -> ModelTokenizer:
    write_json(folder / "tokenizer.json", tokenizer_json(**parts))
    write_json(folder / "tokenizer_config.json", config)
    return folder_tokenizer(folder, 10_000)


def in_gguf(**changes: Any) -> ModelTokenizer:
    return gguf_tokenizer(Fields("model.gguf", byte_level_tokenizer() | changes), 10_000)


def merged_vocabulary() -> dict[str, Any]:
    """A byte-level model with merges, an unused id, and a token with a line break."""
    vocab = {char: i for i, char in enumerate(byte_alphabet())}
    merges = [["t", "h"], ["th", "e"], ["Ġ", "the"], ["i", "n"], ["a", "a"], ["aa", "aa"]]
    for left, right in merges:
        vocab[left + right] = len(vocab) + 3
    model: dict[str, Any] = tokenizer_json()["model"]
    return model | {"vocab": vocab, "merges": merges}


FLAGS = {"single_word": False, "lstrip": True, "rstrip": False, "normalized": True, "special": False}
ADDED = [
    {"id": 400, "content": "<tool>\n", **FLAGS},
    {"id": 401, "content": "<|im_end|>", **FLAGS | {"special": True, "normalized": False}},
    {"id": 402, "content": "two words", **FLAGS | {"single_word": True, "lstrip": False}},
]
ADDS_BOS = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [256], "tokens": ["<|endoftext|>"]}},
}
LLAMA_VOCAB = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "t", "h", "e", "th", "the", "▁the"]


def sentencepiece() -> ModelTokenizer:
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": LLAMA_VOCAB,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(LLAMA_VOCAB) - 259)],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(LLAMA_VOCAB) - 259),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_eos_token": True,
    }
    return gguf_tokenizer(Fields("model.gguf", metadata), 10_000)


def word_level(folder: Path) -> ModelTokenizer:
    """Not BPE: kept whole."""
    vocab = {"[UNK]": 0, "the": 1, "cat": 2}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"}
    decoder = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": True}
    return in_folder(folder, {"model": model, "added_tokens": [], "decoder": decoder}, {})


KINDS: dict[str, Callable[[Path], ModelTokenizer]] = {
    "folder": lambda path: in_folder(path, {}, {}),
    "folder, bos": lambda path: in_folder(path, {"post_processor": ADDS_BOS}, {"bos_token": "<|endoftext|>"}),
    "folder, merges": lambda path: in_folder(path, {"model": merged_vocabulary(), "added_tokens": ADDED}, {}),
    "word level": word_level,
    "gguf gpt-2": lambda path: in_gguf(),
    "gguf llama-bpe": lambda path: in_gguf(**{"tokenizer.ggml.pre": "llama-bpe"}),
    "gguf qwen2": lambda path: in_gguf(**{"tokenizer.ggml.pre": "qwen2"}),
    "gguf sentencepiece": lambda path: sentencepiece(),
}


def assert_same(again: ModelTokenizer, first: ModelTokenizer) -> None:
    assert again.backend.to_str() == first.backend.to_str()
    for name in ("bos_token_id", "eos_token_id", "max_token_id", "vocab_size", "prefix", "suffix", "bos_token"):
        assert getattr(again, name) == getattr(first, name), name
    assert again.strips_leading_space == first.strips_leading_space
    for text in TEXTS:
        for adds in (False, True):
            ids = first.encode(text, add_special_tokens=adds)
            assert again.encode(text, add_special_tokens=adds) == ids, text
            assert again.decode(ids, skip_special_tokens=adds) == first.decode(ids, skip_special_tokens=adds)
            assert [again.piece(i) for i in ids] == [first.piece(i) for i in ids]
            assert [again.special_text(i) for i in ids] == [first.special_text(i) for i in ids]


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_a_tokenizer_comes_back_the_same(tmp_path: Path, make: Callable[[Path], ModelTokenizer]) -> None:
    first = make(tmp_path)
    raw = tokenizer_to_bytes(first)
    assert_same(tokenizer_from_bytes(raw, "image"), first)
    assert tokenizer_to_bytes(tokenizer_from_bytes(raw, "image")) == raw
    form = b'"form":"json"' if make is word_level else b'"form":"bpe"'
    assert form in raw


@pytest.mark.smollm2
def test_the_real_tokenizer_comes_back_the_same(smollm2_path: Path) -> None:
    files = open_files(smollm2_path)
    first = files.build_tokenizer()
    raw = tokenizer_to_bytes(first)
    again = tokenizer_from_bytes(raw, "image")
    assert_same(again, first)
    assert [again.piece(i) for i in range(49152)] == [first.piece(i) for i in range(49152)]
    files.checkpoint.close()


@given(st.data())
def test_no_damaged_tokenizer_crashes(data: st.DataObject) -> None:
    """The section has a hash; this is what holds should somebody forge it."""
    raw = tokenizer_to_bytes(in_gguf())
    damaged = bytearray(raw)
    for _ in range(data.draw(st.integers(1, 8))):
        damaged[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from([len(raw), len(raw) // 2, 3, 0]))
    try:
        tokenizer_from_bytes(bytes(damaged[:cut]), "image").encode("the text", add_special_tokens=True)
    except LoadError as e:
        assert e.message.startswith("image")
    except Exception as e:
        assert type(e).__name__ == "InvalidRequest", e


class Builds:
    """Counts builds of a tokenizer."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> ModelTokenizer:
        self.count += 1
        return in_gguf()


def test_equal_tokenizers_are_one_object_while_used_or_kept() -> None:
    cache, build = TokenizerCache(100), Builds()
    first = cache.get("a", 60, build)
    assert cache.get("a", 60, build) is first and build.count == 1 and cache.kept_bytes == 60
    cache.get("b", 60, build)
    assert cache.kept_bytes == 60 and cache.has("a"), "let go here, alive in the model that uses it"
    assert cache.get("a", 60, build) is first and build.count == 2
    del first
    gc.collect()
    assert cache.has("a") and not cache.has("b")
    cache.clear()
    gc.collect()
    assert not cache.has("a") and cache.kept_bytes == 0


def test_a_tokenizer_above_the_limit_lives_as_long_as_its_model() -> None:
    cache, build = TokenizerCache(100), Builds()
    first = cache.get("a", 101, build)
    assert cache.kept_bytes == 0 and cache.get("a", 101, build) is first and build.count == 1
    del first
    gc.collect()
    assert not cache.has("a")


def test_two_threads_build_a_tokenizer_once() -> None:
    cache, build = TokenizerCache(1000), Builds()
    started, may_go = threading.Event(), threading.Event()

    def slow() -> ModelTokenizer:
        started.set()
        assert may_go.wait(20)
        return build()

    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(cache.get, "a", 1, slow)
        assert started.wait(20)
        two = pool.submit(cache.get, "a", 1, build)
        may_go.set()
        assert one.result() is two.result()
    assert build.count == 1


def test_a_failed_build_is_told_to_all_and_tried_again() -> None:
    cache = TokenizerCache(1000)

    def fail() -> ModelTokenizer:
        raise LoadError("broken")

    for _ in range(2):
        with pytest.raises(LoadError, match="broken"):
            cache.get("a", 1, fail)
    assert cache.get("a", 1, Builds()).vocab_size == 259


def test_the_settings_of_a_section_are_checked() -> None:
    raw = tokenizer_to_bytes(in_gguf())
    for old, new in ((b'"vocab_size":259', b'"vocab_size":-10'), (b'"prefix":[]', b'"prefix":{}')):
        assert old in raw
        with pytest.raises(LoadError, match="image: "):
            tokenizer_from_bytes(raw.replace(old, new.ljust(len(old))), "image")
