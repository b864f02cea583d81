"""Finds where a sequence's newest tokens stood before in it: what followed there may follow again.

Used by the draft source of a sequence that generates. Every token costs O(1) time and eight to sixteen bytes.

Source: prompt lookup decoding (Saxena, 2023), with the hash chains by which LZ77 compressors find their matches
(Deutsch, RFC 1951, section 4).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items

MIN_MATCH = 2
"""Tokens that must be equal: all that is looked up."""
MAX_MATCH = 16
"""Tokens that are compared."""
MAX_CANDIDATES = 8
"""Earlier places that one search looks at, the newest first."""
_MIN_SLOTS = 256


class NgramIndex:
    """Pairs of neighbouring tokens by hash, each with the place of the pair before it in the same slot."""

    __slots__ = ("_heads", "_links")

    def __init__(self) -> None:
        self._heads = array("i")
        """By slot: place of the newest pair's second token; 0: none."""
        self._links = array("i")
        """By place: the next older place of the same slot. Pairs in one slot need not be equal."""

    def extend(self, token_ids: Items[int]) -> None:
        """Takes up what was appended since the last call. `token_ids`: all tokens, of which none has changed."""
        num_tokens = len(token_ids)
        heads, links = self._heads, self._links
        start = len(links)
        if num_tokens > len(heads):
            # Twice the room: every token is entered anew at most once or twice in all.
            heads = self._heads = array("i", [0]) * max(_MIN_SLOTS, 2 << num_tokens.bit_length())
            links = self._links = array("i")
            start = 0
        if start >= num_tokens:
            return
        mask = len(heads) - 1
        if start == 0:
            links.append(0)
            start = 1
        before = token_ids[start - 1]
        for place in range(start, num_tokens):
            token_id = token_ids[place]
            slot = hash((before, token_id)) & mask
            links.append(heads[slot])
            heads[slot] = place
            before = token_id

    def find(self, token_ids: Items[int]) -> tuple[int, int]:
        """(place, length): the last `length` tokens stand before `place`, too. The longest of the newest; (0, 0): none.

        `token_ids`: as `extend` last saw them. `length` is at most `MAX_MATCH`.
        """
        end = len(token_ids)
        if end < MIN_MATCH + 1 or end != len(self._links):
            return 0, 0
        links = self._links
        best_place = best_length = 0
        place = links[end - 1]
        for _ in range(MAX_CANDIDATES):
            if not place:
                break
            length = 0
            # `place` is the last token of a pair: it, and what stands before it, is compared with the end.
            while length < MAX_MATCH and length <= place and token_ids[place - length] == token_ids[end - 1 - length]:
                length += 1
            if length > best_length:
                best_place, best_length = place + 1, length
                if length == MAX_MATCH:
                    break
            place = links[place]
        return (best_place, best_length) if best_length >= MIN_MATCH else (0, 0)
