"""Turns of an assistant for tests of writers: what it says, thinks and calls, cut into events anywhere."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from hypothesis import strategies as st

from naru_router.core.chat_parts import ChoiceEvent, Part, ReasoningPart, TextPart, ToolCallPart


@dataclass(frozen=True)
class Piece:
    """One block or item."""

    kind: str
    """text, reasoning or call."""
    text: str
    """Arguments of a call."""


def parts_of(piece: Piece, cuts: list[int], index: int) -> list[Part]:
    """The piece in parts, cut at these places."""
    places = [0, *sorted({cut % (len(piece.text) + 1) for cut in cuts}), len(piece.text)]
    texts = [piece.text[a:b] for a, b in itertools.pairwise(places) if a < b]
    if piece.kind == "text":
        return [TextPart(text) for text in texts]
    if piece.kind == "reasoning":
        return [ReasoningPart(text) for text in texts]
    return [ToolCallPart(index, f"call_{index}", "look"), *(ToolCallPart(index, arguments=text) for text in texts)]


def events_of(pieces: list[Piece], cuts: list[int], finish: str = "stop") -> list[ChoiceEvent]:
    """The events of a whole turn."""
    parts = [part for index, piece in enumerate(pieces) for part in parts_of(piece, cuts, index)]
    return [*(ChoiceEvent(0, part) for part in parts), ChoiceEvent(0, finish_reason=finish)]


TURNS = st.lists(
    st.one_of(
        st.builds(Piece, st.sampled_from(["text", "reasoning"]), st.text(min_size=1, max_size=12)),
        st.builds(Piece, st.just("call"), st.sampled_from(["", "{}", '{"a": "bé"}', '{"a": [1, 2'])),
    ),
    max_size=5,
)
CUTS = st.lists(st.integers(0, 12), max_size=6)
