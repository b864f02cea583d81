"""Weights and tokenizer are opened together: templates, EOS, vocabulary limits, missing parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf_builder import model_file
from tiny_models import CHAT_TEMPLATE, TinySpec, tokenizer_json, write_json, write_model

from naru_proto.errors import InvalidRequest, LoadError
from naru_worker.adapters.models.opening import open_model

LLAMA = TinySpec()


def edit(path: Path, **changes: Any) -> None:
    """Lays changes over a JSON file; None removes a key."""
    values = json.loads(path.read_text()) | changes
    write_json(path, {k: v for k, v in values.items() if v is not None})


def test_the_real_model_opens_whole(smollm2_path: Path) -> None:
    model = open_model(smollm2_path)
    config = model.checkpoint.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert config.tie_word_embeddings and model.vocab_limit == 49152
    assert 2 in config.eos_token_ids
    assert "<|im_start|>" in model.checkpoint.chat_template
    assert model.checkpoint.get("embed").format == "q8_0" and model.checkpoint.get("layers.0.q").format == "q4_1"


def test_a_padded_vocabulary_is_limited_to_the_tokenizer(tmp_path: Path) -> None:
    write_model(tmp_path, TinySpec(vocab_size=320))
    model = open_model(tmp_path)
    assert (model.checkpoint.config.vocab_size, model.vocab_limit) == (320, 259)
    assert model.tokenizer.piece(300) is None and model.tokenizer.decode([300]) == ""


def test_a_prompt_token_beyond_the_embedding_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, TinySpec(vocab_size=256, extra={"eos_token_id": None, "bos_token_id": None}))
    model = open_model(tmp_path)
    assert model.vocab_limit == 256
    with pytest.raises(InvalidRequest, match="token 257"):
        model.tokenizer.encode("<|im_start|>", add_special_tokens=False)


def test_the_chat_template_is_found_wherever_it_is(tmp_path: Path) -> None:
    write_model(tmp_path, LLAMA)
    settings = tmp_path / "tokenizer_config.json"
    assert open_model(tmp_path).checkpoint.chat_template == CHAT_TEMPLATE
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    edit(settings, chat_template=named)
    assert open_model(tmp_path).checkpoint.chat_template == "d"
    edit(settings, chat_template=named[:1])
    assert open_model(tmp_path).checkpoint.chat_template == ""
    edit(settings, chat_template=None)
    assert open_model(tmp_path).checkpoint.chat_template == ""
    (tmp_path / "chat_template.jinja").write_text("j")
    assert open_model(tmp_path).checkpoint.chat_template == "j"
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(model_file(LLAMA))
    assert open_model(gguf).checkpoint.chat_template == CHAT_TEMPLATE


@pytest.mark.parametrize("template", [3, {"a": "b"}, [{"name": "default", "template": 3}]])
def test_a_template_of_the_wrong_type_is_refused(tmp_path: Path, template: Any) -> None:
    write_model(tmp_path, LLAMA)
    edit(tmp_path / "tokenizer_config.json", chat_template=template)
    with pytest.raises(LoadError, match="chat_template"):
        open_model(tmp_path)


def test_a_giant_template_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, LLAMA)
    (tmp_path / "chat_template.jinja").write_text("x" * (2**20 + 1))
    with pytest.raises(LoadError, match=r"chat_template.jinja: has 1048577 bytes"):
        open_model(tmp_path)


def test_a_missing_or_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, LLAMA)
    path = tmp_path / "tokenizer.json"
    for content in ("", "{}", "[1]", '{"model": {"type": "BPE"}}', "\x00\xff"):
        path.write_text(content)
        with pytest.raises(LoadError, match=r"tokenizer.json"):
            open_model(tmp_path)
    path.unlink()
    with pytest.raises(LoadError, match=r"tokenizer.json: is missing"):
        open_model(tmp_path)


def test_a_decoder_that_needs_neighbours_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, LLAMA)
    for decoder in (None, {"type": "WordPiece", "prefix": "##", "cleanup": True}):
        write_json(tmp_path / "tokenizer.json", tokenizer_json(decoder=decoder))
        with pytest.raises(LoadError, match="decoder"):
            open_model(tmp_path)


@pytest.mark.parametrize(
    ("key", "item", "field"),
    [
        ("tokenizer.ggml.model", "wordpiece", "tokenizer.ggml.model"),
        ("tokenizer.ggml.pre", "mystery", "tokenizer.ggml.pre"),
        ("tokenizer.ggml.tokens", [1, 2], "tokenizer.ggml.tokens"),
        ("tokenizer.ggml.token_type", [1], "tokenizer.ggml.token_type"),
        ("tokenizer.ggml.merges", ["a b", "c"], "tokenizer.ggml.merges"),
        ("tokenizer.ggml.merges", ["a zz"], "tokenizer.ggml.merges"),
        ("tokenizer.ggml.merges", 5, "tokenizer.ggml.merges"),
        ("tokenizer.ggml.bos_token_id", 4000, "tokenizer.ggml.bos_token_id"),
        ("tokenizer.chat_template", 5, "tokenizer.chat_template"),
    ],
)
def test_a_wrong_gguf_tokenizer_names_its_field(tmp_path: Path, key: str, item: Any, field: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(model_file(LLAMA, {key: item}))
    with pytest.raises(LoadError, match=field):
        open_model(path)


def test_a_gguf_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(model_file(LLAMA, {"tokenizer.ggml.model": ""}))
    with pytest.raises(LoadError, match=r"tokenizer.ggml.model"):
        open_model(path)
