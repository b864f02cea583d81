"""What can be wrong with images, beside what `LoadError` says."""

from __future__ import annotations

from naru_proto.errors import LoadError


class ImageDamaged(LoadError):
    """The image is not what was packed: remove it from the store, which then packs the source anew."""


class StoreFull(LoadError):
    """No room for an image now: the disk is full, or the images in use take the budget. Later there may be."""


class LoadStopped(Exception):
    """Somebody told the load to stop; nothing of it is left behind."""
