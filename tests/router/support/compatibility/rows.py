"""All rows, in the order of the page."""

from __future__ import annotations

from compatibility import (
    rows_anthropic,
    rows_batches,
    rows_chat,
    rows_completions,
    rows_embeddings,
    rows_oip,
    rows_responses,
)
from compatibility.row import Row

_MODULES = (
    rows_chat,
    rows_completions,
    rows_responses,
    rows_embeddings,
    rows_batches,
    rows_anthropic,
    rows_oip,
)
ROWS: list[Row] = [row for module in _MODULES for row in module.ROWS]
