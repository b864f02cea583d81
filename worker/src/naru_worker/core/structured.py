"""What a client wants the text of every choice to be: checked for size, not yet compiled.

Part of the sampling parameters. What a schema or a grammar means is known to the compiler in the adapters alone.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from naru_proto.errors import InvalidRequest

MAX_SCHEMA_BYTES = 256 * 1024
"""Longest JSON Schema; half a second of compilation is not far behind."""
MAX_GRAMMAR_BYTES = 256 * 1024
"""Longest grammar; one that holds the schemas of an agent's forty tools has a hundred kilobytes."""
MAX_TEXT_BYTES = 64 * 1024
"""Longest regular expression, and all choices together."""
MAX_CHOICES = 2000
"""Most texts of a choice."""


class StructuredKind(enum.Enum):
    """In what language the wish is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


_MAX_BYTES = {
    StructuredKind.JSON_SCHEMA: MAX_SCHEMA_BYTES,
    StructuredKind.REGEX: MAX_TEXT_BYTES,
    StructuredKind.CHOICE: MAX_TEXT_BYTES,
    StructuredKind.GRAMMAR: MAX_GRAMMAR_BYTES,
}


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """One wish. Equal ones are compiled once."""

    kind: StructuredKind
    texts: tuple[str, ...]
    """The schema, the expression or the grammar; or all choices."""
    param: str = "response_format"
    """The request's field that asked for it: errors name it."""

    def __post_init__(self) -> None:
        """Checks sizes.

        Raises:
            InvalidRequest: it is empty or too long.
        """
        if self.kind is StructuredKind.CHOICE:
            if not 1 <= len(self.texts) <= MAX_CHOICES:
                raise InvalidRequest(
                    f"there are {len(self.texts)} choices; 1 to {MAX_CHOICES} are allowed", param=self.param
                )
        elif not self.texts[0].strip():
            raise InvalidRequest(f"the {self.kind.value} is empty; write one, or leave it out", param=self.param)
        most = _MAX_BYTES[self.kind]
        num_bytes = sum(len(text.encode(errors="replace")) for text in self.texts)
        if num_bytes > most:
            raise InvalidRequest(
                f"the {self.kind.value} has {num_bytes} bytes; at most {most} are allowed", param=self.param
            )
