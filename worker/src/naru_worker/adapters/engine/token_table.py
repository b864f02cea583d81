"""Bytes of token ids, remembered: the tokenizer is asked once for each id that comes up.

Used by the engine thread for output and by the asyncio thread for log probabilities; entries are only ever added.
"""

from __future__ import annotations

from typing import Protocol


class Vocabulary(Protocol):
    """What is asked of a tokenizer."""

    def piece(self, token_id: int) -> bytes | None:
        """The bytes a token adds to the text; None: no text."""

    def special_text(self, token_id: int) -> str | None:
        """How a special token is written; None for all others."""

    def token_bytes(self, token_id: int) -> bytes:
        """The token's own bytes, special tokens spelt out."""


class TokenTable:
    """The vocabulary as the detokenizer and the log probabilities want it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.special_text = vocabulary.special_text
        self._vocabulary = vocabulary
        self._pieces: dict[int, bytes | None] = {}
        self._raw: dict[int, bytes] = {}

    def piece(self, token_id: int) -> bytes | None:
        """The bytes a token adds to the text; None: no text."""
        try:
            return self._pieces[token_id]
        except KeyError:
            piece = self._pieces[token_id] = self._vocabulary.piece(token_id)
            return piece

    def token_bytes(self, token_id: int) -> bytes:
        """The token's own bytes, special tokens spelt out."""
        try:
            return self._raw[token_id]
        except KeyError:
            raw = self._raw[token_id] = self._vocabulary.token_bytes(token_id)
            return raw
