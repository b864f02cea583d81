"""How byte-level BPE vocabularies of GGUF files cut text before merging, by the file's `tokenizer.ggml.pre`.

Used by the GGUF tokenizer builder. An unknown name is an error there: a wrong cut gives wrong ids without a sign.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers


@dataclass(frozen=True, slots=True)
class PreTokenization:
    """Normalizer and cutting rules of one kind of vocabulary."""

    make_pre_tokenizer: Callable[[], pre_tokenizers.PreTokenizer]
    make_normalizer: Callable[[], normalizers.Normalizer] | None = None
    ignore_merges: bool = False
    """Whole words that are in the vocabulary are taken without merging."""
    adds_bos: bool = False
    """What holds where the file does not say."""


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"


def _tiktoken_pattern(digits: str) -> str:
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_DEFAULT_PATTERNS = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)


def _bytes(use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _split(*patterns: str) -> pre_tokenizers.PreTokenizer:
    """Cuts by each pattern in turn, then maps bytes."""
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*cuts, _bytes(use_regex=False)])


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _bytes(use_regex=True)])


_LLAMA3 = PreTokenization(lambda: _split(_tiktoken_pattern("{1,3}")), ignore_merges=True, adds_bos=True)
_QWEN2 = PreTokenization(lambda: _split(_tiktoken_pattern("")), make_normalizer=normalizers.NFC)

PRE_TOKENIZATIONS: dict[str, PreTokenization] = {
    "default": PreTokenization(lambda: _split(*_DEFAULT_PATTERNS)),
    "gpt-2": PreTokenization(lambda: _bytes(use_regex=True)),
    "smollm": PreTokenization(_smollm),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}
"""By `tokenizer.ggml.pre`."""
