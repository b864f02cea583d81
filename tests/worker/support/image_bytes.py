"""An image's bytes but for what was measured while it was packed."""

from __future__ import annotations

import json
from pathlib import Path

from naru_worker.adapters.images.header import PAGE_BYTES, ImageHeader


def unmeasured(path: Path) -> tuple[bytes, dict[str, object]]:
    """(weights, tokenizer and sums; the index without what a tokenizer takes in memory, which heaps differ about)."""
    data = path.read_bytes()
    header = ImageHeader.from_page(data[:PAGE_BYTES], len(data), path.name)
    index = json.loads(data[header.index_offset :])
    assert index.pop("tokenizer_resident_bytes") > 0
    return data[PAGE_BYTES : header.index_offset], index
