"""A text, or a pair of texts, as an encoder takes it: tokens with their types, cut to what the model takes.

Used by `ModelTokenizer.encode_input`. What goes around the texts is read off the tokenizer once, by probes.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer

from naru_proto.errors import InvalidRequest

PROBE = "a"
"""Any text: only what is put around it is looked at."""


@dataclass(frozen=True, slots=True)
class TypedTokens:
    """Tokens of one input."""

    token_ids: tuple[int, ...]
    token_types: tuple[int, ...] = ()
    """Empty: all 0. Else as long as token_ids."""
    num_truncated: int = 0
    """Tokens of the texts that were cut off."""


@dataclass(frozen=True, slots=True)
class InputForm:
    """What stands before, between and behind the texts, and the types of all: (ids, type) of each piece."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    behind: tuple[int, ...]
    types: tuple[int, int, int, int, int]
    """Of before, first text, between, second text, behind."""

    @property
    def num_tokens(self) -> int:
        """That are added."""
        return len(self.before) + len(self.between) + len(self.behind)


PLAIN = InputForm((), (), (), (0, 0, 0, 0, 0))
PLAIN_PAIR = InputForm((), (), (), (0, 0, 0, 1, 0))


def pair_form(backend: Tokenizer) -> InputForm:
    """How the tokenizer joins two texts."""
    plain: list[int] = backend.encode(PROBE, add_special_tokens=False).ids
    both = backend.encode(PROBE, PROBE, add_special_tokens=True)
    ids: list[int] = both.ids
    types: list[int] = both.type_ids
    size = len(plain)
    extra = len(ids) - 2 * size
    for start in range(extra + 1):
        if not size or ids[start : start + size] != plain:
            continue
        for gap in range(extra - start + 1):
            second = start + size + gap
            if ids[second : second + size] == plain:
                kinds = (
                    types[0] if start else 0,
                    types[start],
                    types[start + size] if gap else 0,
                    types[second],
                    types[-1],
                )
                before, between, behind = ids[:start], ids[start + size : second], ids[second + size :]
                return InputForm(tuple(before), tuple(between), tuple(behind), kinds)
    return PLAIN_PAIR


def join(first: list[int], second: list[int] | None, form: InputForm, max_tokens: int | None) -> TypedTokens:
    """One input of one or two texts; with `max_tokens`, the longer text is cut first, from its end.

    Raises:
        InvalidRequest: so few tokens leave no room for any text.
    """
    num_before = len(first) + len(second or ())
    if max_tokens is not None:
        room = max_tokens - form.num_tokens
        if room < 1:
            raise InvalidRequest(
                f"inputs are to be cut to {max_tokens} tokens, of which {form.num_tokens} are special; allow more",
                param="truncate_tokens",
            )
        if second is None:
            first = first[:room]
        else:
            lengths = _longest_first(len(first), len(second), room)
            first, second = first[: lengths[0]], second[: lengths[1]]
    pieces = (form.before, first, form.between, second or (), form.behind)
    token_ids = tuple(token for piece in pieces for token in piece)
    types: tuple[int, ...] = ()
    if any(form.types):
        types = tuple(kind for piece, kind in zip(pieces, form.types, strict=True) for _ in piece)
    return TypedTokens(token_ids, types if any(types) else (), num_before - len(first) - len(second or ()))


def _longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """What is left of two lengths. Source: `longest_first` of Hugging Face's tokenizers."""
    if first + second <= room:
        return first, second
    short, long = sorted((first, second))
    if short + max(short, room - short) > room or short > room:
        short, long = room // 2, room - room // 2
    else:
        long = room - short
    return (short, long) if first <= second else (long, short)
