"""The Kubernetes API for the operator: read, list, create, apply, delete, events. asyncio on the outside.

Used by the control loop, the informer and the election, each with a client of its own where it must not wait for the
others. Objects are plain JSON values, without `managedFields`. Decides nothing and watches nothing.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from kubernetes.client.configuration import Configuration

from naru_operator.adapters.kube.caller import APPLY, Caller, ClientSettings, Request
from naru_operator.adapters.kube.errors import AlreadyExists, ApiAway, Conflict, Gone, NotFound
from naru_operator.adapters.kube.events import EventMemory, event_object
from naru_operator.adapters.kube.kinds import EVENT, KINDS, Kind
from naru_operator.core.kube import Object, ObjectEvent, ObjectKey
from naru_proto import names
from naru_proto.errors import InvalidRequest, NaruError

__all__ = ["ClientSettings", "KubeClient", "Listing"]

logger = logging.getLogger(__name__)

_PAGE = 500
"""Objects in one answer to a list, as kubectl asks for."""
_MAX_LISTINGS = 3
"""A list is begun anew this often when its pages expire under way."""


@dataclass(frozen=True, slots=True)
class Listing:
    """All objects of a kind at one moment."""

    items: tuple[Object, ...]
    version: str
    """resourceVersion of that moment."""


class KubeClient:
    """One way to the API server, with threads of its own. asyncio thread only."""

    def __init__(
        self,
        configuration: Configuration,
        settings: ClientSettings | None = None,
        *,
        may_write: Callable[[], bool] = lambda: True,
        on_answer: Callable[[str, str, int], None] = lambda verb, kind, status: None,
        instance: str = "",
    ) -> None:
        """``may_write`` is asked in a thread right before each write leaves: it must be quick and safe to call there.

        ``on_answer`` hears of each answer in a thread: RBAC verb, kind, HTTP status (0: none came). ``instance`` names
        this process in events; empty: the host's name.
        """
        self._caller = Caller(configuration, settings or ClientSettings(), may_write, on_answer)
        self._instance = instance or socket.gethostname()
        self._said = EventMemory()

    async def close(self) -> None:
        """Waits for what is under way, then lets the connections go; requests that wait for a thread are given up."""
        await self._caller.close()

    async def get(self, kind: str, key: ObjectKey) -> Object:
        """One object.

        Raises:
            NotFound, Forbidden, ApiAway: as their names say.
        """
        return await self._caller.call(Request("get", KINDS[kind], key.namespace, key.name))

    async def list(self, kind: str, namespace: str | None, label_selector: str = "", *, limit: int = _PAGE) -> Listing:
        """All objects of a kind, read in pages of ``limit``; namespace None: of all namespaces.

        Raises:
            NotFound: the kind is not known to the API server.
            Forbidden, ApiAway: as their names say.
        """
        for attempt in range(1, _MAX_LISTINGS + 1):
            try:
                return await self._list_once(KINDS[kind], namespace, label_selector, limit)
            except Gone:
                if attempt == _MAX_LISTINGS:
                    raise
        raise AssertionError("unreachable")

    async def create(self, obj: Object, namespace: str | None = None) -> Object:
        """Creates an object and returns it as stored; ``namespace``: where it names none itself.

        Raises:
            AlreadyExists: also when an earlier attempt of this very call got through without an answer.
            Rejected, Denied, Forbidden, NotLeader, ApiAway: as their names say.
        """
        kind, key = _identity(obj, namespace)
        query = {"fieldManager": names.MANAGED_BY}
        return await self._caller.call(Request("create", kind, key.namespace, body=obj, query=query))

    async def apply(self, obj: Object, namespace: str | None = None, *, force: bool = True) -> Object:
        """Server-side apply: makes the object's fields so, whoever else wrote them, and takes back those left out.

        Raises:
            Conflict: not ``force`` and others own fields, or `metadata.uid` is given and the object is another one.
            Rejected, Denied, Forbidden, NotLeader, ApiAway: as their names say.
        """
        kind, key = _identity(obj, namespace)
        query = {"fieldManager": names.MANAGED_BY, "force": str(force).lower()}
        return await self._caller.call(
            Request("patch", kind, key.namespace, key.name, body=_sent(obj), query=query, content_type=APPLY)
        )

    async def apply_status(self, obj: Object) -> Object:
        """Server-side apply of an object's status alone.

        Raises:
            NotFound: the object is gone.
            Conflict: `metadata.uid` is given, and another object has the name now. A custom resource's new object may
                have got the status all the same, as the API server looks at no uid there: tell it its own.
            Rejected, Forbidden, NotLeader, ApiAway: as their names say.
        """
        kind, key = _identity(obj, None)
        metadata = {"name": key.name, "namespace": key.namespace}
        if uid := obj["metadata"].get("uid"):
            metadata["uid"] = uid
        body = {
            "apiVersion": kind.api_version,
            "kind": kind.name,
            "metadata": metadata,
            "status": obj.get("status") or {},
        }
        query = {"fieldManager": names.MANAGED_BY, "force": "true"}
        answer = await self._caller.call(
            Request("patch", kind, key.namespace, key.name, "status", body=body, query=query, content_type=APPLY)
        )
        if uid and (found := answer.get("metadata", {}).get("uid")) != uid:
            raise Conflict(f"the status of {kind.name} {str(key)!r} went to another object of that name ({found})")
        return answer

    async def replace(self, obj: Object) -> Object:
        """Writes a whole object over the version it was read at (`metadata.resourceVersion`). Tried once.

        Raises:
            Conflict: it has changed since.
            NotFound, Rejected, Forbidden, NotLeader, ApiAway: as their names say.
        """
        kind, key = _identity(obj, None)
        return await self._caller.call(Request("update", kind, key.namespace, key.name, body=obj), pauses_s=())

    async def delete(self, kind: str, key: ObjectKey, uid: str | None = None, grace_s: int | None = None) -> bool:
        """Deletes an object, only the one with ``uid`` where given; False: it was gone already.

        ``grace_s`` None: what the object says itself. Dependents go in the background.

        Raises:
            Denied, Forbidden, NotLeader, ApiAway: as their names say.
        """
        body: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        try:
            await self._caller.call(Request("delete", KINDS[kind], key.namespace, key.name, body=body))
        except NotFound:
            return False
        except Conflict:
            if uid is None:
                raise
            return False
        return True

    async def event(self, event: ObjectEvent, involved: Object) -> None:
        """Tells an event about an object, once in ten minutes for the same words. Never raises; tried once."""
        uid = str(involved["metadata"].get("uid", ""))
        if not self._said.is_news(uid, event, time.monotonic()):
            return
        obj = event_object(event, involved, self._instance, datetime.now(UTC))
        try:
            await self._caller.call(Request("create", EVENT, obj["metadata"]["namespace"], body=obj), pauses_s=())
        except AlreadyExists:
            pass  # the same microsecond: said
        except NaruError as exc:
            self._said.forget(uid, event)
            logger.debug("event %s of %s was not sent: %s", event.reason, event.key, exc.message)

    async def schemas(self, kind: Kind) -> Object:
        """The OpenAPI document of a kind's group and version: what the API server knows of its fields.

        Raises:
            NotFound: nothing of that group is installed.
            Forbidden, ApiAway: as their names say.
        """
        path = f"/openapi/v3/apis/{kind.group}/{kind.version}" if kind.group else f"/openapi/v3/api/{kind.version}"
        return await self._caller.call(Request("get", kind, None, path=path))

    async def is_allowed(
        self, verb: str, kind: Kind, namespace: str | None, *, name: str = "", subresource: str = ""
    ) -> bool | None:
        """Whether the credentials permit something; None: the API server does not tell. ``name`` empty: to all.

        Raises:
            ApiAway: no answer.
        """
        review = Kind("SelfSubjectAccessReview", "authorization.k8s.io", "v1", "selfsubjectaccessreviews")
        asked = {
            "verb": verb,
            "group": kind.group,
            "resource": kind.plural,
            "subresource": subresource,
            "namespace": namespace or "",
            "name": name,
        }
        body = {"apiVersion": review.api_version, "kind": review.name, "spec": {"resourceAttributes": asked}}
        try:
            answer = await self._caller.call(Request("create", review, None, body=body), is_guarded=False)
        except ApiAway:
            raise
        except NaruError:
            return None
        allowed = (answer.get("status") or {}).get("allowed")
        return allowed if isinstance(allowed, bool) else None

    async def _list_once(self, kind: Kind, namespace: str | None, label_selector: str, limit: int) -> Listing:
        query: dict[str, str | int] = {"limit": limit}
        if label_selector:
            query["labelSelector"] = label_selector
        items: list[Object] = []
        version = ""
        while True:
            page = await self._caller.call(Request("list", kind, namespace, query=query))
            metadata = page.get("metadata") or {}
            version = version or str(metadata.get("resourceVersion") or "")
            for item in page.get("items") or ():
                # Items of a list do not carry what the list says for all of them.
                items.append({"apiVersion": kind.api_version, "kind": kind.name, **item})
            if not metadata.get("continue"):
                return Listing(tuple(items), version)
            query["continue"] = metadata["continue"]


def _identity(obj: Object, namespace: str | None) -> tuple[Kind, ObjectKey]:
    kind = KINDS[obj["kind"]]
    metadata = obj["metadata"]
    within = metadata.get("namespace") or namespace
    if not within:
        raise InvalidRequest(f"{kind.name} {metadata['name']!r} names no namespace; every object here lives in one")
    return kind, ObjectKey(within, metadata["name"])


def _sent(obj: Object) -> Object:
    """Without what an apply must not carry: it would tie the apply to one version."""
    metadata = {name: value for name, value in obj["metadata"].items() if name not in ("resourceVersion",)}
    return {**{name: value for name, value in obj.items() if name != "status"}, "metadata": metadata}
