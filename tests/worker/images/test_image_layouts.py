"""Images of another layout lie in the same folder after an upgrade, and while workers of both share it."""

from __future__ import annotations

import threading
from pathlib import Path

from naru_worker.adapters.images.store import ImageStore


def still(done: int, total: int) -> None:
    """Hears of progress."""


def test_an_image_of_the_first_layout_is_left_alone_and_its_source_packed_anew(
    store: ImageStore, source: Path, go_on: threading.Event
) -> None:
    path = store.ensure(source, still, go_on)
    whole = path.read_bytes()
    (record,) = (path.parent / "sources").iterdir()
    old = path.rename(path.with_name(f"{'0' * len(path.stem)}.naru"))
    old.write_bytes(whole[:8] + (1).to_bytes(4, "little") + whole[12:])
    first = record.with_name(f"{record.stem.partition('-')[0]}.json")
    first.write_text(record.read_text().replace(path.stem, old.stem))
    record.unlink()
    assert store.find(source) is None
    assert store.ensure(source, still, go_on) == path == store.find(source)
    assert path.read_bytes() == whole and old.exists() and first.exists()
