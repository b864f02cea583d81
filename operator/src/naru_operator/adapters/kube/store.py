"""The watched objects in memory, fed by lists and by watch events, which may come in any order. asyncio thread only.

Of two sights of an object the one with the higher resourceVersion counts. Called by the informer; read by the control
loop. Asks no API server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from naru_operator.adapters.kube.client import Listing
from naru_operator.adapters.kube.kinds import WATCHED, Kind
from naru_operator.core.kube import Object, ObjectKey, key_of


class _Shelf:
    """The objects of one kind."""

    def __init__(self, now_s: float) -> None:
        self.objects: dict[ObjectKey, Object] = {}
        self.deleted: dict[ObjectKey, int] = {}
        """Version of the deletion of objects that a list begun before it may still show."""
        self.heard_s = now_s
        self.listed: dict[str | None, int] = {}
        """Namespaces listed so far (None: all at once), with the newest version of a list."""

    def listed_at(self, namespace: str) -> int:
        """The newest version at which all objects of a namespace were seen."""
        return max(self.listed.get(None, -1), self.listed.get(namespace, -1))

    def is_news(self, key: ObjectKey, version: int, is_deleted: bool) -> bool:
        """Whether a sight is newer than all that is known."""
        known = self.objects.get(key)
        if known is None:
            # What a newer list did not have is gone, as is what was seen to be deleted.
            return version > self.deleted.get(key, -1) and version > self.listed_at(key.namespace)
        return version >= _version(known) if is_deleted else version > _version(known)


class ObjectStore:
    """What is known of the cluster. Objects are never changed: a newer one takes an older one's place."""

    def __init__(
        self,
        namespaces: Iterable[str] | None,
        kinds: Iterable[Kind] = tuple(WATCHED),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``namespaces``: those that are watched; None: all."""
        self.namespaces: tuple[str | None, ...] = tuple(namespaces) if namespaces is not None else (None,)
        """To list, one by one."""
        self.changed = asyncio.Event()
        """Set at each change; whoever waits clears it first, then looks."""
        self._clock = clock
        self._shelves = {kind.name: _Shelf(clock()) for kind in kinds}

    @property
    def is_synced(self) -> bool:
        """Whether every kind has been listed in every namespace at least once: what is absent here is not there."""
        return all(shelf.listed.keys() >= set(self.namespaces) for shelf in self._shelves.values())

    def objects(self, kind: str) -> Mapping[ObjectKey, Object]:
        """All objects of a kind now; a view that changes with the store."""
        return MappingProxyType(self._shelves[kind].objects)

    def silent_s(self, kind: str) -> float:
        """Seconds since the kind was last heard of, by an event or a list."""
        return self._clock() - self._shelves[kind].heard_s

    def take(self, kind: str, obj: Object, *, is_deleted: bool = False) -> bool:
        """Takes in one object, from a watch or from the answer to a write; whether it was news."""
        shelf = self._shelves[kind]
        shelf.heard_s = self._clock()
        if not _is_whole(obj) or not shelf.is_news(key_of(obj), _version(obj), is_deleted):
            return False
        key = key_of(obj)
        if is_deleted:
            shelf.deleted[key] = _version(obj)
            if shelf.objects.pop(key, None) is None:
                return False
        else:
            shelf.deleted.pop(key, None)
            shelf.objects[key] = _slim(obj)
        self.changed.set()
        return True

    def replace(self, kind: str, namespace: str | None, listing: Listing) -> int:
        """Takes in a whole list of a namespace (None: of all); returns how much was news, which a watch had missed."""
        shelf = self._shelves[kind]
        shelf.heard_s = self._clock()
        at = _number(listing.version)
        news = 0
        listed = set()
        for obj in listing.items:
            if _is_whole(obj):
                listed.add(key_of(obj))
                news += self.take(kind, obj)
        for key, obj in list(shelf.objects.items()):
            is_covered = namespace is None or key.namespace == namespace
            if is_covered and key not in listed and _version(obj) <= at:
                del shelf.objects[key]
                news += 1
        is_first = namespace not in shelf.listed
        shelf.listed[namespace] = max(at, shelf.listed.get(namespace, -1))
        # What is older than a list of its namespace cannot come back without it.
        shelf.deleted = {key: gone for key, gone in shelf.deleted.items() if gone > shelf.listed_at(key.namespace)}
        if news or is_first:
            self.changed.set()
        return news


def _is_whole(obj: Object) -> bool:
    metadata = obj.get("metadata")
    return isinstance(metadata, dict) and isinstance(metadata.get("name"), str)


def _version(obj: Object) -> int:
    return _number(obj["metadata"].get("resourceVersion"))


def _number(version: object) -> int:
    """A resourceVersion as the number it is on every API server; one that is none counts as oldest.

    Source: Kubernetes' KEP-5504, comparable resource versions.
    """
    return int(version) if isinstance(version, str) and version.isascii() and version.isdecimal() else 0


def _slim(obj: Object) -> Object:
    """Without what nobody reads and what is half of every object; the given one stays as it is."""
    metadata = obj["metadata"]
    if "managedFields" not in metadata:
        return obj
    kept = {name: value for name, value in metadata.items() if name != "managedFields"}
    return {**obj, "metadata": kept}
