"""The exact bytes each vocabulary entry stands for.

Used by `ModelTokenizer`, on whose `piece` incremental detokenization rests: text grows by bytes, so that a character
split over tokens is never guessed. Reads the tokenizer's decoder settings; refuses decoders that are
not a map of single tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from naru_proto.errors import LoadError
from naru_worker.core.fields import shown

SPIECE_SPACE = "\u2581"
"""SentencePiece's mark for a space."""


@dataclass(frozen=True, slots=True)
class TokenDecoder:
    """How token text becomes bytes. Joined bytes are the decoded text, but for `strips_leading_space`."""

    decode: Callable[[str], bytes]
    strips_leading_space: bool
    """A whole text's first space is the tokenizer's own and is dropped when a text is decoded from its start."""


def token_decoder(settings_json: str | None, where: str) -> TokenDecoder:
    """Reads the decoder part of a tokenizer.json.

    Raises:
        LoadError: no decoder, or one whose output for a token depends on its neighbours.
    """
    settings: dict[str, Any] = json.loads(settings_json) if settings_json else {}
    steps: list[dict[str, Any]] = settings["decoders"] if settings.get("type") == "Sequence" else [settings]
    kinds = tuple(str(step.get("type")) for step in steps)
    if kinds == ("ByteLevel",):
        return TokenDecoder(_byte_level, strips_leading_space=False)
    if kinds == ("Metaspace",):
        mark = str(steps[0].get("replacement", SPIECE_SPACE))
        strips = steps[0].get("prepend_scheme", "always") != "never"
        return TokenDecoder(lambda token: token.replace(mark, " ").encode(), strips)
    if set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"} and kinds[:1] == ("Replace",):
        return TokenDecoder(_spiece(steps, where), strips_leading_space=_strips(steps, where))
    raise LoadError(
        f"{where}: decoder is {shown(settings)}; supported are ByteLevel, Metaspace, and sequences of Replace, "
        "ByteFallback, Fuse and Strip",
        param="decoder",
    )


def token_text_decoder() -> TokenDecoder:
    """Each token as it is written in the vocabulary: for models whose tokens are listed, and never become a text."""
    return TokenDecoder(str.encode, strips_leading_space=False)


def _spiece(steps: list[dict[str, Any]], where: str) -> Callable[[str], bytes]:
    pattern, content = steps[0].get("pattern"), steps[0].get("content")
    mark = pattern.get("String") if isinstance(pattern, dict) else None
    if not isinstance(mark, str) or not isinstance(content, str):
        raise LoadError(f"{where}: decoder replaces {shown(pattern)}; a plain string is needed", param="decoder")
    has_bytes = any(step.get("type") == "ByteFallback" for step in steps)

    def decode(token: str) -> bytes:
        replaced = token.replace(mark, content)
        if has_bytes and len(replaced) == 6 and replaced.startswith("<0x") and replaced.endswith(">"):
            try:
                return bytes([int(replaced[3:5], 16)])
            except ValueError:
                pass
        return replaced.encode()

    return decode


def _strips(steps: list[dict[str, Any]], where: str) -> bool:
    for step in steps:
        if step.get("type") == "Strip":
            if (step.get("content"), step.get("start"), step.get("stop")) != (" ", 1, 0):
                raise LoadError(f"{where}: decoder has {shown(step)}; only one leading space may go", param="decoder")
            return True
    return False


def _byte_alphabet() -> dict[str, int]:
    """The printable characters that byte-level vocabularies spell bytes with.

    Printable Latin-1 bytes stand for themselves; the others count up from U+0100.
    """
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    """Characters to bytes; a token with a character outside the alphabet is literal text."""
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:
        return token.encode()
