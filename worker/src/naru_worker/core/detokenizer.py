"""Turns tokens into text as they come, byte by byte, so that a character split over tokens is never shown broken.

Used by the output stream. It knows a vocabulary only as a map from id to bytes; what a tokenizer does to get there
(byte-level alphabets, SentencePiece marks, byte fallback) is the adapter's affair.
"""

from __future__ import annotations

import codecs
from typing import Protocol


class TokenBytes(Protocol):
    """A vocabulary as bytes."""

    def piece(self, token_id: int) -> bytes | None:
        """The bytes a token adds to the text; None for special tokens and ids outside the vocabulary: no text."""

    def special_text(self, token_id: int) -> str | None:
        """How a special token is written, e.g. ``<|eot_id|>``; None for all others."""


class Detokenizer:
    """One sequence's bytes, decoded as far as they are certain.

    The joined results equal ``b"".join(pieces).decode(errors="replace")``, less one leading space where
    `strip_leading_space`: SentencePiece tokenizers put a space before the first word of a text. Set it only when the
    output starts the text; after a prompt that space is real. With `show_special_tokens` a special token's piece is the
    way it is written.
    """

    __slots__ = ("_decoder", "_shows_special", "_strips_space", "_tokens")

    def __init__(
        self, tokens: TokenBytes, *, strip_leading_space: bool = False, show_special_tokens: bool = False
    ) -> None:
        self._tokens = tokens
        self._strips_space = strip_leading_space
        self._shows_special = show_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        """The text that this token makes certain; empty while a character is open."""
        piece = self._tokens.piece(token_id)
        if piece is None and self._shows_special:
            piece = (self._tokens.special_text(token_id) or "").encode()
        if not piece:
            return ""
        if self._strips_space:
            self._strips_space = False
            piece = piece.removeprefix(b" ")
        return self._decoder.decode(piece)

    def fork(self) -> Detokenizer:
        """One that stands where this one does, and goes on by itself."""
        other = Detokenizer(
            self._tokens, strip_leading_space=self._strips_space, show_special_tokens=self._shows_special
        )
        other._decoder.setstate(self._decoder.getstate())
        return other

    def finish(self) -> str:
        """What an open character leaves at the end: one U+FFFD, or nothing."""
        return self._decoder.decode(b"", final=True)
