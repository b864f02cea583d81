"""An API server in memory behind the client's interface: uids, versions, preconditions, and faults when a test says so.

What a write or a test changes reaches the store as a watch would bring it, at once or when `catch_up` is called.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

from naru_operator.adapters.kube.client import KubeClient, Listing
from naru_operator.adapters.kube.errors import AlreadyExists, Conflict, NotFound, NotLeader
from naru_operator.adapters.kube.kinds import WATCHED
from naru_operator.adapters.kube.store import ObjectStore
from naru_operator.core.kube import Object, ObjectEvent, ObjectKey, key_of
from naru_proto import names
from naru_proto.errors import NaruError


def now() -> str:
    """This moment as the API server writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True)
class Write:
    """A write that was answered with success."""

    verb: str
    kind: str
    name: str


@dataclass
class _Fault:
    verb: str
    kind: str
    name: str
    error: NaruError | None
    gate: asyncio.Event | None


class FakeKube(KubeClient):
    """The client's methods over a dict."""

    def __init__(self, store: ObjectStore, may_write: Callable[[], bool] = lambda: True) -> None:
        self.objects: dict[tuple[str, ObjectKey], Object] = {}
        self.writes: list[Write] = []
        self.asked: list[Write] = []
        """Everything that was asked for, whatever came of it."""
        self.events: list[ObjectEvent] = []
        self.is_lagging = False
        """The watch shows nothing until `catch_up`."""
        self._store, self._may_write = store, may_write
        self._versions = itertools.count(100)
        self._unseen: list[tuple[Object, bool]] = []
        self._faults: list[_Fault] = []
        self._applied: dict[tuple[str, ObjectKey], Object] = {}
        for kind in WATCHED:
            for namespace in store.namespaces:
                store.replace(kind.name, namespace, Listing((), "1"))

    # --- what a test does ---

    def put(self, obj: Object) -> Object:
        """As somebody else's apply: keeps uid and status, counts generation and version."""
        kind, key = obj["kind"], key_of(obj)
        before = self.objects.get((kind, key))
        made = copy.deepcopy(obj)
        meta = made["metadata"]
        old = before["metadata"] if before else {}
        is_new_spec = before is None or before.get("spec") != made.get("spec")
        number = next(self._versions)
        meta.setdefault("uid", old.get("uid", f"uid-{number}"))
        meta["creationTimestamp"] = old.get("creationTimestamp", meta.get("creationTimestamp", now()))
        meta["generation"] = old.get("generation", 0) + is_new_spec
        meta["resourceVersion"] = str(number)
        if before is not None and "status" in before:
            made.setdefault("status", before["status"])
        self.objects[kind, key] = made
        self._show(made)
        return made

    def set_status(self, kind: str, key: ObjectKey, status: Object) -> None:
        """As the kubelet does."""
        self.put({**self.objects[kind, key], "status": status})

    def remove(self, kind: str, key: ObjectKey) -> None:
        """Gone, at once."""
        gone = copy.deepcopy(self.objects.pop((kind, key)))
        gone["metadata"]["resourceVersion"] = str(next(self._versions))
        self._show(gone, is_deleted=True)

    def catch_up(self) -> None:
        """The watch shows what it held back."""
        self.is_lagging = False
        unseen, self._unseen = self._unseen, []
        for obj, is_deleted in unseen:
            self._show(obj, is_deleted=is_deleted)

    @contextmanager
    def refusing(self, error: NaruError, verb: str, kind: str, name: str = "") -> Iterator[None]:
        """Such requests (of one name, or of all) fail while the context lasts."""
        with self._faulty(_Fault(verb, kind, name, error, None)):
            yield

    @contextmanager
    def holding(self, verb: str, kind: str, name: str = "") -> Iterator[asyncio.Event]:
        """Such requests wait until the event is set; then they reach the server."""
        gate = asyncio.Event()
        with self._faulty(_Fault(verb, kind, name, None, gate)):
            yield gate
            gate.set()

    def named(self, kind: str) -> dict[str, Object]:
        """Objects of a kind by name."""
        return {key.name: obj for (each, key), obj in sorted(self.objects.items()) if each == kind}

    def asked_for(self, verb: str, kind: str) -> list[str]:
        """Names in requests so far."""
        return [it.name for it in self.asked if (it.verb, it.kind) == (verb, kind)]

    # --- the client ---

    async def close(self) -> None:
        """Nothing is open."""

    async def get(self, kind: str, key: ObjectKey) -> Object:
        """As the client's."""
        await self._ask("get", kind, key)
        return self._found(kind, key)

    async def create(self, obj: Object, namespace: str | None = None) -> Object:
        """As the client's."""
        kind, key = obj["kind"], key_of(obj)
        await self._ask("create", kind, key)
        if (kind, key) in self.objects:
            raise AlreadyExists(f"{kind} {key} exists")
        made = self.put(obj)
        self.writes.append(Write("create", kind, key.name))
        return copy.deepcopy(made)

    async def apply(self, obj: Object, namespace: str | None = None, *, force: bool = True) -> Object:
        """As the client's; what is so already is no write."""
        kind, key = obj["kind"], key_of(obj)
        await self._ask("apply", kind, key)
        if self._applied.get((kind, key)) != obj or (kind, key) not in self.objects:
            self._applied[kind, key] = copy.deepcopy(obj)
            self.put(obj)
            self.writes.append(Write("apply", kind, key.name))
        return copy.deepcopy(self.objects[kind, key])

    async def apply_status(self, obj: Object) -> Object:
        """As the client's."""
        kind, key = obj["kind"], key_of(obj)
        await self._ask("status", kind, key)
        found = self._found(kind, key)
        if obj["metadata"].get("uid") not in (None, found["metadata"]["uid"]):
            raise Conflict(f"{kind} {key} is another one now")
        self.set_status(kind, key, copy.deepcopy(obj["status"]))
        self.writes.append(Write("status", kind, key.name))
        return copy.deepcopy(self.objects[kind, key])

    async def delete(self, kind: str, key: ObjectKey, uid: str | None = None, grace_s: int | None = None) -> bool:
        """As the client's. A pod lives on until its worker has ended: see `remove`."""
        await self._ask("delete", kind, key)
        found = self.objects.get((kind, key))
        if found is None or uid not in (None, found["metadata"]["uid"]):
            return False
        self.writes.append(Write("delete", kind, key.name))
        if kind != "Pod":
            self.remove(kind, key)
        elif "deletionTimestamp" not in found["metadata"]:
            self.put({**found, "metadata": {**found["metadata"], "deletionTimestamp": now()}})
        return True

    async def event(self, event: ObjectEvent, involved: Object) -> None:
        """As the client's."""
        self.events.append(event)

    # --- inside ---

    def _found(self, kind: str, key: ObjectKey) -> Object:
        if (kind, key) not in self.objects:
            raise NotFound(f"{kind} {key}: not found")
        return copy.deepcopy(self.objects[kind, key])

    async def _ask(self, verb: str, kind: str, key: ObjectKey) -> None:
        self.asked.append(Write(verb, kind, key.name))
        await asyncio.sleep(0)
        for fault in list(self._faults):
            if (fault.verb, fault.kind) == (verb, kind) and fault.name in ("", key.name):
                if fault.gate is not None:
                    await fault.gate.wait()
                if fault.error is not None:
                    raise fault.error
        if verb != "get" and not self._may_write():
            raise NotLeader(f"did not {verb} {kind} {key}: another replica acts")

    @contextmanager
    def _faulty(self, fault: _Fault) -> Iterator[None]:
        self._faults.append(fault)
        try:
            yield
        finally:
            self._faults.remove(fault)

    def _show(self, obj: Object, *, is_deleted: bool = False) -> None:
        if self.is_lagging:
            self._unseen.append((obj, is_deleted))
            return
        selector = next((it for kind, it in WATCHED.items() if kind.name == obj["kind"]), None)
        if selector is None:
            return
        labels = obj["metadata"].get("labels") or {}
        if not selector or labels.get(names.LABEL_MANAGED_BY) == names.MANAGED_BY:
            self._store.take(obj["kind"], copy.deepcopy(obj), is_deleted=is_deleted)
