"""A tokenizer as bytes, and back: the tokenizer section of a packed image.

Written by the packing process, read when a model is loaded. The library parses its own JSON in one call that holds the
interpreter's lock from end to end, as long as a model's whole load may take. So a BPE vocabulary, which is nearly all
of it, is kept as arrays beside a small JSON: most of the work is then done in steps that let other threads in, and the
one call that remains takes a third of the time. Where the parts would not give the very same tokenizer, the JSON is
kept whole.

    4 bytes     length of the settings
    settings    JSON: special ids, limits, `form`, and the tokenizer's JSON (without vocabulary for form "bpe")
    "bpe":      number of tokens, of merges, of bytes of text (3 x u32); ids (u32 each); lengths in characters (u32
                each); merges as two positions in the list of tokens (2 x u32 each); all tokens' text, UTF-8
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, models

from naru_proto.errors import LoadError
from naru_worker.adapters.tokenizer.model_tokenizer import ModelTokenizer
from naru_worker.core.fields import MAX_VOCAB_SIZE, Fields

_COUNTS = struct.Struct("<III")
_BPE_OPTIONS = (
    "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback",
    "ignore_merges",
)  # fmt: skip
_STEP = 4096
"""Entries handled in one go: about a millisecond, after which other threads may run."""

_Words = npt.NDArray[np.uint32]


def tokenizer_to_bytes(
    tokenizer: ModelTokenizer, rebuild: Callable[[bytes, str], ModelTokenizer] | None = None
) -> bytes:
    """The section's bytes: equal tokenizers give equal bytes.

    `rebuild` stands in for `tokenizer_from_bytes` where parts are compared with the whole: somebody may look on.
    """
    rebuild = rebuild or tokenizer_from_bytes
    text: str = tokenizer.backend.to_str()
    settings: dict[str, object] = {
        "prefix": tokenizer.prefix,
        "suffix": tokenizer.suffix,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "max_token_id": tokenizer.max_token_id,
        "vocab_size": tokenizer.vocab_size,
    }
    raw = _in_parts(settings, json.loads(text))
    if raw is not None:
        try:
            if rebuild(raw, "").backend.to_str() == text:
                return raw
        except LoadError:
            pass  # The library takes the file but not its parts: a merge without its token, say.
    return _with_settings(settings | {"form": "json", "tokenizer": text})


def tokenizer_from_bytes(raw: bytes | memoryview, where: str) -> ModelTokenizer:
    """The tokenizer again; `where` names the file in errors.

    Raises:
        LoadError: the bytes are not what `tokenizer_to_bytes` writes.
    """
    try:
        length = int.from_bytes(raw[:4], "little")
        fields = Fields(where, json.loads(bytes(raw[4 : 4 + length])))
        if fields.text("form", "") == "bpe":
            backend = _from_parts(fields, raw[4 + length :])
        else:
            backend = Tokenizer.from_str(fields.text("tokenizer", ""))
    except LoadError:
        raise
    except Exception as e:  # The library raises no narrower class for any defect.
        raise LoadError(f"{where}: the tokenizer is damaged ({e})", param="tokenizer") from e
    return ModelTokenizer(
        backend,
        where,
        fields.integer("vocab_size", 0, 2**32),
        prefix=_ids(fields, "prefix"),
        suffix=_ids(fields, "suffix"),
        bos_token_id=_id(fields, "bos_token_id"),
        eos_token_id=_id(fields, "eos_token_id"),
        max_token_id=_id(fields, "max_token_id"),
    )


def _with_settings(settings: dict[str, object], *sections: bytes) -> bytes:
    raw = json.dumps(settings, separators=(",", ":")).encode()
    return b"".join((len(raw).to_bytes(4, "little"), raw, *sections))


def _in_parts(settings: dict[str, object], parsed: dict[str, Any]) -> bytes | None:
    """Form "bpe", or None where the tokenizer is of another kind."""
    model = parsed["model"]
    if model.get("type") != "BPE":
        return None
    vocab: dict[str, int] = model["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    places = {token: place for place, token in enumerate(tokens)}
    try:
        merges = [(places[left], places[right]) for left, right in model["merges"]]
    except (KeyError, ValueError):
        return None
    small = parsed | {"model": model | {"vocab": {}, "merges": []}, "added_tokens": []}
    blob = "".join(tokens).encode()
    return _with_settings(
        settings | {"form": "bpe", "tokenizer": json.dumps(small), "added_tokens": parsed["added_tokens"]},
        _COUNTS.pack(len(tokens), len(merges), len(blob)),
        np.array([vocab[token] for token in tokens], np.uint32).tobytes(),
        np.array([len(token) for token in tokens], np.uint32).tobytes(),
        np.array(merges, np.uint32).reshape(-1).tobytes(),
        blob,
    )


def _from_parts(fields: Fields, raw: bytes | memoryview) -> Tokenizer:
    num_tokens, num_merges, num_bytes = _COUNTS.unpack_from(raw)
    if len(raw) != _COUNTS.size + 4 * (2 * num_tokens + 2 * num_merges) + num_bytes:
        fields.fail("tokenizer", f"has {len(raw)} bytes, which do not hold what they say")
    words = np.frombuffer(raw, np.uint32, 2 * (num_tokens + num_merges), _COUNTS.size)
    ids, lengths = words[:num_tokens], words[num_tokens : 2 * num_tokens]
    tokens = _cut(str(raw[len(raw) - num_bytes :], "utf-8"), lengths)
    vocab: dict[str, int] = {}
    for step in _steps(num_tokens):
        vocab.update(zip(tokens[step], ids[step].tolist(), strict=True))
    merges = _pairs(tokens, words[2 * num_tokens :])
    backend = Tokenizer.from_str(fields.text("tokenizer", ""))
    settings = json.loads(backend.model.__getstate__())
    options = {name: settings[name] for name in _BPE_OPTIONS if settings.get(name) is not None}
    backend.model = models.BPE(vocab=vocab, merges=merges, **options)
    _add_tokens(backend, fields.values.get("added_tokens"))
    return backend


def _cut(text: str, lengths: _Words) -> list[str]:
    tokens: list[str] = []
    start = 0
    for length in lengths.tolist():
        end = start + length
        tokens.append(text[start:end])
        start = end
    return tokens


def _pairs(tokens: Sequence[str], merges: _Words) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    token = tokens.__getitem__
    for step in _steps(len(merges) // 2):
        places = merges[2 * step.start : 2 * step.stop]
        pairs.extend(zip(map(token, places[0::2].tolist()), map(token, places[1::2].tolist()), strict=True))
    return pairs


def _steps(count: int) -> Iterator[slice]:
    return (slice(start, min(start + _STEP, count)) for start in range(0, count, _STEP))


def _add_tokens(backend: Tokenizer, added: object) -> None:
    """In the order of the list, as the library does when it reads a file."""
    for entry in added if isinstance(added, list) else []:
        settings = dict(entry)
        del settings["id"]
        token = AddedToken(settings.pop("content"), **settings)
        if token.special:
            backend.add_special_tokens([token])
        else:
            backend.add_tokens([token])


def _id(fields: Fields, name: str) -> int | None:
    return fields.integer(name, 0, 2**32) if fields.has(name) else None


def _ids(fields: Fields, name: str) -> list[int]:
    value = fields.values.get(name)
    if not isinstance(value, list) or not all(type(i) is int and 0 <= i < MAX_VOCAB_SIZE for i in value):
        fields.fail(name, "must be a list of token ids")
    return value
