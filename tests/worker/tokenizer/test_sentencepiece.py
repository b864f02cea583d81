"""SentencePiece vocabularies: ids equal the reference's, text comes back, a prompt's last space is kept."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tokenizer_json, write_json

from naru_proto.errors import LoadError
from naru_worker.adapters.tokenizer.folder_tokenizer import folder_tokenizer
from naru_worker.adapters.tokenizer.gguf_tokenizer import gguf_tokenizer
from naru_worker.adapters.tokenizer.model_tokenizer import ModelTokenizer
from naru_worker.core.detokenizer import Detokenizer
from naru_worker.core.fields import Fields

BOS = "<|endoftext|>"


def joined(tokenizer: ModelTokenizer, ids: list[int]) -> str:
    return b"".join(tokenizer.piece(i) or b"" for i in ids).decode(errors="replace")


CORPUS = [
    "the cat sat on the mat and the dog sat on the log",
    "a quick brown fox jumps over a lazy dog while the cat sleeps",
    "numbers 1 2 3 and words with   spaces, commas. and 's endings",
    "čaj žluť and other letters; don't stop",
]


@pytest.fixture(scope="module")
def spiece() -> tuple[Any, Callable[..., ModelTokenizer], dict[str, Any]]:
    """A trained SentencePiece model, our tokenizer built from what a GGUF file keeps of it, and that metadata."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="the reference of this kind of vocabulary")
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 20),
        model_writer=trained,
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    reference = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
    size = reference.get_piece_size()

    def kind(i: int) -> int:
        return 2 if reference.is_unknown(i) else 3 if reference.is_control(i) else 6 if reference.is_byte(i) else 1

    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [reference.id_to_piece(i) for i in range(size)],
        "tokenizer.ggml.scores": [reference.get_score(i) for i in range(size)],
        "tokenizer.ggml.token_type": [kind(i) for i in range(size)],
        "tokenizer.ggml.bos_token_id": reference.bos_id(),
        "tokenizer.ggml.eos_token_id": reference.eos_id(),
    }

    def make(**more: Any) -> ModelTokenizer:
        return gguf_tokenizer(Fields("m.gguf", metadata | more), size)

    return reference, make, metadata


SPIECE_TEXTS = [*CORPUS, "unseen: 漢字 🧑 zebra", "cat", " leading", "trailing ", "two  spaces", "the\nline"]


@pytest.mark.parametrize("text", SPIECE_TEXTS)
def test_sentencepiece_ids_equal_the_reference(spiece: Any, text: str) -> None:
    reference, make, _ = spiece
    tokenizer: ModelTokenizer = make()
    assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text)
    assert tokenizer.encode(text, add_special_tokens=True) == [reference.bos_id(), *reference.encode(text)]


@pytest.mark.parametrize("text", SPIECE_TEXTS)
def test_sentencepiece_text_comes_back_token_by_token(spiece: Any, text: str) -> None:
    reference, make, _ = spiece
    tokenizer: ModelTokenizer = make()
    ids = reference.encode(text)
    stream = Detokenizer(tokenizer, strip_leading_space=tokenizer.strips_leading_space)
    assert "".join(map(stream.feed, ids)) + stream.finish() == tokenizer.decode(ids) == text


def test_sentencepiece_keeps_the_space_between_prompt_and_output(spiece: Any) -> None:
    reference, make, _ = spiece
    tokenizer: ModelTokenizer = make()
    ids = reference.encode("the cat")
    assert joined(tokenizer, ids).endswith(" cat")


def test_a_piece_as_long_as_a_book_is_refused(spiece: Any) -> None:
    tokens = ["a" * 257, *spiece[2]["tokenizer.ggml.tokens"][1:]]
    types = [1, *spiece[2]["tokenizer.ggml.token_type"][1:]]
    with pytest.raises(LoadError, match="entry 0 has 257 characters"):
        spiece[1](**{"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types})


def test_sentencepiece_needs_scores(spiece: Any) -> None:
    with pytest.raises(LoadError, match=r"tokenizer.ggml.scores"):
        spiece[1](**{"tokenizer.ggml.scores": [1.0]})


def test_metaspace_and_byte_fallback_folders_decode_token_by_token(tmp_path: Path) -> None:
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    vocab = {"▁a": 0, "▁b": 1, ".": 2, "▁'s": 3, "<0xC5>": 4, "<0xBE>": 5, BOS: 256}
    model = tokenizer_json()["model"] | {"vocab": vocab}
    steps = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    special = tokenizer_json()["added_tokens"][:1]
    for decoder, ids, text in (
        (metaspace, [0, 1, 2, 3], "a b. 's"),
        ({"type": "Sequence", "decoders": steps}, [0, 256, 1, 4, 5, 2, 3], "a bž. 's"),
    ):
        write_json(tmp_path / "tokenizer.json", tokenizer_json(model=model, decoder=decoder, added_tokens=special))
        tokenizer = folder_tokenizer(tmp_path, 4096)
        assert tokenizer.strips_leading_space
        assert joined(tokenizer, ids).removeprefix(" ") == tokenizer.decode(ids) == text
