"""Why a decision is as it is, put into words only where somebody reads them: most requests' reasons nobody does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload


class Reasons(Sequence[str]):
    """Sentences, equal to any sequence of the same ones."""

    __slots__ = ("_parts", "_said", "_say")

    def __init__(self, say: Callable[..., Sequence[str]], *parts: object) -> None:
        """`say` makes the sentences of the parts, always the same ones; the parts should be small, as they are kept."""
        self._say = say
        self._parts = parts
        self._said: tuple[str, ...] | None = None

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        return self._all()[index]

    def __len__(self) -> int:
        return len(self._all())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._all() == tuple(other)

    def __hash__(self) -> int:
        return hash(self._all())

    def __repr__(self) -> str:
        return repr(self._all())

    def _all(self) -> tuple[str, ...]:
        if self._said is None:
            self._said = tuple(self._say(*self._parts))
        return self._said
