"""Builds a tokenizer from GGUF metadata: byte-level BPE ("gpt2") and SentencePiece BPE ("llama").

Used when a GGUF model is loaded. The metadata is untrusted: lists must fit one another before they are used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from naru_proto.errors import LoadError
from naru_worker.adapters.tokenizer.model_tokenizer import ModelTokenizer
from naru_worker.adapters.tokenizer.pre_tokenizers import PRE_TOKENIZATIONS
from naru_worker.adapters.tokenizer.spiece_merges import spiece_merges
from naru_worker.adapters.tokenizer.token_bytes import SPIECE_SPACE
from naru_worker.core.fields import MAX_VOCAB_SIZE, Fields

SUPPORTED_MODELS = ("gpt2", "llama")

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
"""Values of tokenizer.ggml.token_type; 1 is normal, 5 unused, 6 a byte."""


_PREFIX = "tokenizer.ggml."


def tokenizer_metadata(metadata: Mapping[str, object]) -> dict[str, object]:
    """The part of a file's metadata that `gguf_tokenizer` reads."""
    return {key: value for key, value in metadata.items() if key.startswith(_PREFIX)}


def gguf_tokenizer(fields: Fields, num_embeddings: int) -> ModelTokenizer:
    """The tokenizer of an opened GGUF file.

    Raises:
        LoadError: no vocabulary, an unknown kind, or lists that do not fit one another.
    """
    kind = fields.text("tokenizer.ggml.model", "")
    if kind not in SUPPORTED_MODELS:
        fields.fail("tokenizer.ggml.model", f"is {kind!r}; supported are {', '.join(SUPPORTED_MODELS)}")
    tokens = _strings(fields, "tokenizer.ggml.tokens")
    if not 1 <= len(tokens) <= MAX_VOCAB_SIZE:
        fields.fail("tokenizer.ggml.tokens", f"has {len(tokens)} entries; 1 to {MAX_VOCAB_SIZE} are allowed")
    types = _token_types(fields, len(tokens))
    if kind == "gpt2":
        backend, adds_bos = _byte_level(fields, tokens)
    else:
        backend, adds_bos = _sentencepiece(fields, tokens, types), True
    _add_special(backend, tokens, types)
    bos, eos = (_known_id(fields, f"tokenizer.ggml.{name}_token_id", len(tokens)) for name in ("bos", "eos"))
    adds_bos = fields.boolean("tokenizer.ggml.add_bos_token", adds_bos)
    adds_eos = fields.boolean("tokenizer.ggml.add_eos_token", False)
    return ModelTokenizer(
        backend,
        fields.file,
        len(tokens),
        prefix=[bos] if adds_bos and bos is not None else [],
        suffix=[eos] if adds_eos and eos is not None else [],
        bos_token_id=bos,
        eos_token_id=eos,
        max_token_id=num_embeddings - 1,
    )


def _byte_level(fields: Fields, tokens: list[str]) -> tuple[Tokenizer, bool]:
    pre = fields.text("tokenizer.ggml.pre", "default")
    rules = PRE_TOKENIZATIONS.get(pre)
    if rules is None:
        fields.fail("tokenizer.ggml.pre", f"is {pre!r}; supported are {', '.join(PRE_TOKENIZATIONS)}")
    merges = _strings(fields, "tokenizer.ggml.merges")
    # One join and one split at C speed: a loop over the merges costs a third of the whole start.
    parts = " ".join(merges).split(" ")
    if merges and len(parts) != 2 * len(merges):
        fields.fail("tokenizer.ggml.merges", "holds an entry that is not two tokens and a space")
    halves = iter(parts)
    pairs = list(zip(halves, halves, strict=True)) if merges else []
    backend = Tokenizer(_bpe(fields, tokens, pairs, ignore_merges=rules.ignore_merges))
    backend.pre_tokenizer = rules.make_pre_tokenizer()
    if rules.make_normalizer is not None:
        backend.normalizer = rules.make_normalizer()
    backend.decoder = decoders.ByteLevel()
    return backend, rules.adds_bos


def _sentencepiece(fields: Fields, tokens: list[str], types: Sequence[int]) -> Tokenizer:
    scores = fields.values.get("tokenizer.ggml.scores")
    if not _are_numbers(scores) or len(scores) != len(tokens):
        fields.fail("tokenizer.ggml.scores", f"must be a list of {len(tokens)} numbers")
    unknown = next((tokens[i] for i, kind in enumerate(types) if kind == UNKNOWN), None)
    mergeable = [kind not in (UNKNOWN, CONTROL) for kind in types]
    try:
        pairs = spiece_merges(tokens, scores, mergeable)
    except ValueError as e:
        raise LoadError(f"{fields.file}: tokenizer.ggml.tokens: {e}", param="tokenizer.ggml.tokens") from e
    backend = Tokenizer(_bpe(fields, tokens, pairs, byte_fallback=True, fuse_unk=True, unk_token=unknown))
    adds_space = fields.boolean("tokenizer.ggml.add_space_prefix", True)
    spaces = [normalizers.Replace(" ", SPIECE_SPACE)]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPIECE_SPACE), *spaces] if adds_space else spaces)
    steps = [decoders.Replace(SPIECE_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if adds_space else steps)
    return backend


def _bpe(fields: Fields, tokens: list[str], pairs: list[tuple[str, str]], **options: object) -> models.BPE:
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    try:
        return models.BPE(vocab=vocab, merges=pairs, **options)
    except Exception as e:  # The library raises no narrower class: a merge of tokens that are not there.
        raise LoadError(f"{fields.file}: tokenizer.ggml.merges do not fit the vocabulary ({e})") from e


def _add_special(backend: Tokenizer, tokens: list[str], types: Sequence[int]) -> None:
    """Control tokens are special; user-defined ones are found in text too, but stay in the output."""
    special, plain = [], []
    for token, kind in zip(tokens, types, strict=True):
        if kind in (UNKNOWN, CONTROL):
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == USER_DEFINED:
            plain.append(AddedToken(token, special=False, normalized=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _strings(fields: Fields, name: str) -> list[str]:
    value = fields.values.get(name)
    if not isinstance(value, list) or not set(map(type, value)) <= {str}:
        fields.fail(name, "is missing or not a list of strings; the file has no usable tokenizer")
    return value


def _token_types(fields: Fields, length: int) -> Sequence[int]:
    name = "tokenizer.ggml.token_type"
    value = fields.values.get(name)
    if value is None:
        return [1] * length
    if not _are_numbers(value) or len(value) != length:
        fields.fail(name, f"must be a list of {length} numbers")
    return [int(kind) for kind in value]


def _are_numbers(value: object) -> TypeGuard[list[float]]:
    return isinstance(value, list) and set(map(type, value)) <= {int, float}


def _known_id(fields: Fields, name: str, length: int) -> int | None:
    return fields.integer(name, 0, length - 1) if fields.has(name) else None
