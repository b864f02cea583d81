"""A model's vocabulary as the grammar library wants it: exact bytes of each token, special ones apart, and the ends.

Built once for a tokenizer, by the grammar compiler, in a thread of its own: it takes a fifth of a second for 50 000
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from llguidance import LLTokenizer, TokenizerWrapper


class GrammarTokenizer(Protocol):
    """What is asked of a model's tokenizer."""

    def piece(self, token_id: int) -> bytes | None:
        """The bytes a token adds to the text; None: no text."""

    def special_text(self, token_id: int) -> str | None:
        """How a special token is written; None for all others."""


class GrammarVocabulary:
    """Tokens below `vocab_limit`. Those that end a sequence are special, whatever the tokenizer says of them."""

    def __init__(self, tokenizer: GrammarTokenizer, vocab_limit: int, eos_token_ids: Sequence[int]) -> None:
        """A model without an end gets one above all that can be drawn: its grammars end where nothing may follow."""
        ends = [token_id for token_id in eos_token_ids if token_id < vocab_limit]
        self.eos_token_ids = ends or [vocab_limit]
        self._tokenizer = tokenizer
        self._limit = vocab_limit
        self._special: set[int] = set(ends)
        tokens = [self._bytes(token_id) for token_id in range(vocab_limit)]
        if not ends:
            tokens.append(b"<end of text>")
            self._special.add(vocab_limit)
        self._native: LLTokenizer | None = None
        self._native = LLTokenizer(
            TokenizerWrapper(_Facade(self, tokens)), n_vocab=len(tokens), eos_token=self.eos_token_ids
        )
        self.mask_words = (len(tokens) + 31) // 32
        """32 bit words of one mask."""

    @property
    def native(self) -> LLTokenizer:
        """The library's own form of it."""
        assert self._native is not None, "nothing is asked of it before it is built"
        return self._native

    @property
    def is_built(self) -> bool:
        """Whether `native` is there."""
        return self._native is not None

    @property
    def special_token_ids(self) -> list[int]:
        """Ids that no ordinary text holds."""
        return sorted(self._special)

    def _bytes(self, token_id: int) -> bytes:
        special = self._tokenizer.special_text(token_id)
        if special is None and token_id not in self._special:
            return self._tokenizer.piece(token_id) or b""
        self._special.add(token_id)
        return special.encode() if special is not None else self._tokenizer.piece(token_id) or b"<end>"


class _Facade:
    """The form in which the library takes a tokenizer."""

    bos_token_id = None

    def __init__(self, vocabulary: GrammarVocabulary, tokens: list[bytes]) -> None:
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.special_token_ids = vocabulary.special_token_ids
        self.tokens = tokens
        self._vocabulary = vocabulary

    def __call__(self, text: bytes) -> list[int]:
        # Asked for a text that a grammar forces, where one wants that. (And once before all is built, in vain.)
        return self._vocabulary.native.greedy_tokenize(text.decode()) if self._vocabulary.is_built else []
