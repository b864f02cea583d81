"""A growth port for tests: grants as it is told, and counts what it was asked."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Grants:
    """Grants up to `plenty` chunks when asked politely, up to `most` when it is urgent; both go down as it grants."""

    chunk_blocks: int = 4
    floor_chunks: int = 1
    plenty: int = 0
    most: int = 0
    asked: list[tuple[int, bool]] = field(default_factory=list)

    def grow(self, num_chunks: int, *, is_urgent: bool) -> int:
        self.asked.append((num_chunks, is_urgent))
        granted = min(num_chunks, self.most if is_urgent else min(self.plenty, self.most))
        self.most -= granted
        self.plenty = max(0, self.plenty - granted)
        return granted
