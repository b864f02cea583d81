"""What a client wants the text of every choice to be: checked for size, not yet compiled.

Part of the sampling parameters. What a schema or a grammar means is known to the compiler in the adapters alone.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from naru_proto.errors import InvalidRequest

MAX_SCHEMA_BYTES = 256 * 1024
"""Longest JSON Schema; half a second of compilation is not far behind."""
MAX_GRAMMAR_BYTES = 64 * 1024
"""Longest regular expression or grammar, and all choices together."""
MAX_CHOICES = 2000
"""Most texts of a choice."""


class StructuredKind(enum.Enum):
    """In what language the wish is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


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
        most = MAX_SCHEMA_BYTES if self.kind is StructuredKind.JSON_SCHEMA else MAX_GRAMMAR_BYTES
        num_bytes = sum(len(text.encode(errors="replace")) for text in self.texts)
        if num_bytes > most:
            raise InvalidRequest(
                f"the {self.kind.value} has {num_bytes} bytes; at most {most} are allowed", param=self.param
            )
