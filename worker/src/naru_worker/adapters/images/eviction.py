"""Which images go when another one needs room. Pure: the store carries it out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoredImage:
    """One image of the folder."""

    digest: str
    num_bytes: int
    last_used_ns: int
    """Unix time."""


def choose_victims(
    images: Sequence[StoredImage], needed_bytes: int, in_use: Collection[str]
) -> tuple[StoredImage, ...] | None:
    """The least recently used ones that give so many bytes back, none in use; None: there are not enough."""
    victims: list[StoredImage] = []
    freed_bytes = 0
    for image in sorted(images, key=lambda image: (image.last_used_ns, image.digest)):
        if freed_bytes >= needed_bytes:
            break
        if image.digest not in in_use:
            victims.append(image)
            freed_bytes += image.num_bytes
    return tuple(victims) if freed_bytes >= needed_bytes else None
