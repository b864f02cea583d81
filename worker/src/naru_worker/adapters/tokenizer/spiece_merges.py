"""Merge rules for SentencePiece BPE vocabularies, which store scores and no merges.

Used by the GGUF tokenizer builder. A piece may be merged from any two pieces of the vocabulary that spell it; better
scores merge first.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_PIECE_CHARS = 256
"""Trainers stop at 16 or so; each character of a piece is a place to look for a pair."""


def spiece_merges(tokens: Sequence[str], scores: Sequence[float], mergeable: Sequence[bool]) -> list[tuple[str, str]]:
    """Pairs in the order in which they are to be merged.

    Source: Kudo and Richardson, SentencePiece (arXiv 1808.06226): BPE segmentation merges the adjacent pair whose joint
    piece scores best.

    Raises:
        ValueError: a piece is too long to be one.
    """
    ranks = {token: i for i, token in enumerate(tokens) if mergeable[i]}
    ranked: list[tuple[float, int, int, int, str, str]] = []
    for index, token in enumerate(tokens):
        if not mergeable[index]:
            continue
        if len(token) > MAX_PIECE_CHARS:
            raise ValueError(f"entry {index} has {len(token)} characters; at most {MAX_PIECE_CHARS} are allowed")
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            left_rank, right_rank = ranks.get(left), ranks.get(right)
            if left_rank is not None and right_rank is not None:
                ranked.append((-scores[index], index, left_rank, right_rank, left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]
