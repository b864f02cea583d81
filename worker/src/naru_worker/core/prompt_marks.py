"""Where a prompt's route keys and its shared part end, in KV blocks: byte offsets of the text, mapped to its tokens.

Called by the server once a prompt is tokenized; the KV manager reads the result. Offsets are mapped by the bytes that
tokens stand for, as far as these are the text itself: where a tokenizer has changed the text, what follows gets no
keys and is not shared. Nothing is guessed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from naru_proto.route_keys import BOUNDARIES, ID_BYTES


@dataclass(frozen=True, slots=True)
class PromptMarks:
    """What the blocks of one prompt mean to routers and to other tenants."""

    keys: Mapping[int, tuple[bytes, ...]] = field(default_factory=dict)
    """Route keys by the index of the prompt's block that completes them: the last block wholly inside a key's boundary,
    and the first block where none is. What a key promises is so cached up to less than one block."""
    num_shared_blocks: int = 0
    """Leading blocks that are cached alike for all tenants."""


NO_MARKS = PromptMarks()


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a token stands for."""

    token_bytes: Callable[[int], bytes]
    """Its own bytes, special tokens spelt out."""
    special_text: Callable[[int], str | None]
    """None: it is no special token."""


def marks_of_text(
    text: bytes,
    token_ids: Sequence[int],
    vocabulary: Vocabulary,
    keys: Sequence[bytes],
    shared_prefix_bytes: int,
    block_size: int,
) -> PromptMarks:
    """The marks of a tokenized text. `keys`: of its whole chunks, in order; too many are ignored."""
    ends = token_ends(text, token_ids, vocabulary)
    known_bytes = ends[-1] if ends else 0
    limits = [limit for limit in BOUNDARIES[: len(keys)] if limit <= known_bytes]
    key_tokens = [bisect_right(ends, limit) for limit in limits]
    num_shared = _num_shared_tokens(ends, token_ids, vocabulary, shared_prefix_bytes)
    return PromptMarks(_by_block(keys, key_tokens, len(token_ids), block_size), num_shared // block_size)


def marks_of_ids(num_tokens: int, keys: Sequence[bytes], block_size: int) -> PromptMarks:
    """The marks of a prompt that came as token ids; nothing of it is shared."""
    key_tokens = [limit // ID_BYTES for limit in BOUNDARIES[: len(keys)] if limit <= num_tokens * ID_BYTES]
    return PromptMarks(_by_block(keys, key_tokens, num_tokens, block_size))


def token_ends(text: bytes, token_ids: Sequence[int], vocabulary: Vocabulary) -> list[int]:
    """Byte offset in the text at which each token ends, up to the first token that is not the text's own bytes.

    Special tokens put before a text have no bytes of it; nor has the space that some tokenizers put before a word at
    the beginning of a text, or behind a special token.
    """
    pieces = list(map(vocabulary.token_bytes, token_ids))
    if b"".join(pieces) == text:
        return list(accumulate(map(len, pieces)))  # as almost always; a third of the time
    ends: list[int] = []
    end = 0
    for token_id, piece in zip(token_ids, pieces, strict=True):
        if text.startswith(piece, end):
            end += len(piece)
        elif piece.startswith(b" ") and _begins(ends, end, token_ids, vocabulary) and text.startswith(piece[1:], end):
            end += len(piece) - 1
        elif end or vocabulary.special_text(token_id) is None:
            break
        ends.append(end)
    return ends


def _begins(ends: Sequence[int], end: int, token_ids: Sequence[int], vocabulary: Vocabulary) -> bool:
    """Whether the next token stands at the beginning of the text, or behind a special token."""
    return not end or vocabulary.special_text(token_ids[len(ends) - 1]) is not None


def _num_shared_tokens(ends: Sequence[int], token_ids: Sequence[int], vocabulary: Vocabulary, num_bytes: int) -> int:
    """Tokens that all tenants may share: up to the last special token inside the shared part.

    How a text is cut into tokens may depend on what follows it, and what follows is another tenant's secret. Special
    tokens are taken out of a text before the rest is cut: nothing before one depends on what comes behind it.
    """
    if num_bytes <= 0:
        return 0
    for count in range(bisect_right(ends, num_bytes), 0, -1):
        if vocabulary.special_text(token_ids[count - 1]) is not None:
            return count
    return 0


def _by_block(
    keys: Sequence[bytes], key_tokens: Sequence[int], num_tokens: int, block_size: int
) -> dict[int, tuple[bytes, ...]]:
    if num_tokens < block_size:
        return {}
    found: dict[int, list[bytes]] = {}
    for key, num_inside in zip(keys, key_tokens, strict=False):
        found.setdefault(max(0, num_inside // block_size - 1), []).append(key)
    return {index: tuple(each) for index, each in found.items()}
