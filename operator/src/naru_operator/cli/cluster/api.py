"""The API server as the commands ask it: objects, events, logs, and the router behind its Service.

Authenticates as kubectl would, from the same kubeconfig. Synchronous: a command does one thing and ends.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from naru_operator.core.kube import Object
from naru_proto import names
from naru_proto.errors import InternalError, InvalidRequest, ModelNotFound, NaruError, Unavailable

_TIMEOUT = httpx.Timeout(10.0, read=60.0)
_PAGE = 500
_CUSTOM = f"/apis/{names.API_GROUP}/{names.API_VERSION}"


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Which cluster and namespace; None takes what kubectl would take."""

    kubeconfig: Path | None = None
    context: str | None = None
    namespace: str | None = None


class ClusterApi:
    """A connection to one cluster. Close it after use."""

    def __init__(self, http: httpx.Client, namespace: str) -> None:
        """``http`` has the API server as its base and all that it wants to see."""
        self.http = http
        self.namespace = namespace

    def close(self) -> None:
        """Closes the connections."""
        self.http.close()

    def get(self, path: str, params: Mapping[str, str] | None = None) -> Object:
        """One object, or one list.

        Raises:
            ModelNotFound: there is none.
            NaruError: as the API server said.
        """
        return self._json("GET", path, params=params)

    def items(self, path: str, params: Mapping[str, str] | None = None) -> Iterator[Object]:
        """All items of a list, page by page.

        Raises:
            NaruError: as the API server said.
        """
        more = ""
        while True:
            query = {**(params or {}), "limit": str(_PAGE)} | ({"continue": more} if more else {})
            page = self.get(path, query)
            yield from page.get("items") or ()
            more = (page.get("metadata") or {}).get("continue") or ""
            if not more:
                return

    def custom(self, plural: str, name: str = "") -> str:
        """Path of our objects of one kind in the namespace."""
        return f"{_CUSTOM}/namespaces/{self.namespace}/{plural}" + (f"/{name}" if name else "")

    def core(self, plural: str, name: str = "") -> str:
        """Path of core objects of one kind in the namespace."""
        return f"/api/v1/namespaces/{self.namespace}/{plural}" + (f"/{name}" if name else "")

    def model(self, name: str) -> Object:
        """The ModelDeployment of a name, or of an alias where none has that name.

        Raises:
            ModelNotFound: there is none; says which there are.
            NaruError: as the API server said.
        """
        try:
            return self.get(self.custom("modeldeployments", name))
        except ModelNotFound:
            found = list(self.items(self.custom("modeldeployments")))
        for item in found:
            if item["spec"].get("alias") == name:
                return item
        known = ", ".join(item["metadata"]["name"] for item in found[:10]) or "none"
        raise ModelNotFound(
            f"namespace {self.namespace!r} has no ModelDeployment {name!r}; it has: {known} (-n chooses another one)",
            param="name",
        )

    def revisions(self, model: Object) -> list[Object]:
        """The ControllerRevisions of a model, oldest first.

        Raises:
            NaruError: as the API server said.
        """
        path = f"/apis/apps/v1/namespaces/{self.namespace}/controllerrevisions"
        uid = model["metadata"]["uid"]
        query = {"labelSelector": f"{names.LABEL_MANAGED_BY}={names.MANAGED_BY}"}
        owned = [
            item
            for item in self.items(path, query)
            if any(owner.get("uid") == uid for owner in item["metadata"].get("ownerReferences") or ())
        ]
        return sorted(owned, key=lambda item: int(item.get("revision") or 0))

    def patch(self, path: str, operations: list[dict[str, Any]]) -> Object:
        """A JSON patch.

        Raises:
            NaruError: as the API server said.
        """
        headers = {"content-type": "application/json-patch+json"}
        return self._json("PATCH", path, json=operations, headers=headers, params={"fieldManager": "naru-cli"})

    def dry_run(self, item: Object, path: str) -> Object:
        """The object as the API server would store it; nothing is stored.

        Raises:
            InvalidRequest: it would be refused; says why.
            NaruError: as the API server said.
        """
        query = {"fieldManager": "naru-cli", "force": "true", "dryRun": "All", "fieldValidation": "Strict"}
        return self._json(
            "PATCH", path, json=item, headers={"content-type": "application/apply-patch+yaml"}, params=query
        )

    def events_of(self, item: Object) -> list[Object]:
        """Events about an object, oldest first.

        Raises:
            NaruError: as the API server said.
        """
        meta = item["metadata"]
        query = {"fieldSelector": f"involvedObject.uid={meta['uid']}"}
        return sorted(self.items(self.core("events"), query), key=event_time)

    def log_lines(self, pod: str, *, tail: int, is_following: bool = False) -> Iterator[str]:
        """Lines of a pod's log.

        Raises:
            NaruError: as the API server said.
        """
        query = {"tailLines": str(tail), "follow": str(is_following).lower(), "timestamps": "true"}
        timeout = httpx.Timeout(10.0, read=None if is_following else 60.0)
        with _told(), self.http.stream("GET", self.core("pods", f"{pod}/log"), params=query, timeout=timeout) as reply:
            if reply.status_code != 200:
                raise _refusal(reply.status_code, reply.read())
            yield from reply.iter_lines()

    def router_path(self) -> str:
        """Path below the API server that leads to the router's HTTP port.

        Raises:
            Unavailable: the namespace has no router.
        """
        query = {"labelSelector": "app.kubernetes.io/name=naru,app.kubernetes.io/component=router"}
        services = list(self.items(self.core("services"), query))
        if not services:
            raise Unavailable(
                f"namespace {self.namespace!r} has no Service of a Naru router; choose its namespace with -n, or give "
                "its address with --url"
            )
        return self.core("services", f"{services[0]['metadata']['name']}:http/proxy")

    def _json(self, method: str, path: str, **arguments: Any) -> Object:
        with _told():
            reply = self.http.request(method, path, **arguments)
        if reply.status_code not in (200, 201):
            raise _refusal(reply.status_code, reply.content)
        try:
            answer = reply.json()
        except ValueError as exc:
            raise InternalError(f"the API server answered {reply.content[:80]!r}, which is no JSON") from exc
        if not isinstance(answer, dict):
            raise InternalError(f"the API server answered {reply.content[:80]!r}, which is no object")
        return answer


def event_time(event: Object) -> str:
    """When an event happened last, as a text that sorts."""
    return str(event.get("lastTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp") or "")


def open_api(options: ClusterOptions) -> ClusterApi:
    """Connects as kubectl would.

    Raises:
        Unavailable: no kubeconfig, or one that cannot be read; says what to set.
    """
    import kubernetes.client
    import kubernetes.config

    settings = kubernetes.client.Configuration()
    config_file = str(options.kubeconfig) if options.kubeconfig else None
    try:
        kubernetes.config.load_kube_config(config_file, context=options.context, client_configuration=settings)
        _, active = kubernetes.config.list_kube_config_contexts(config_file)
    except (kubernetes.config.ConfigException, OSError) as exc:
        raise Unavailable(f"no cluster to ask ({exc}); set KUBECONFIG, or give --kubeconfig and --context") from exc
    context = active
    if options.context:
        contexts, _ = kubernetes.config.list_kube_config_contexts(config_file)
        context = next(it for it in contexts if it["name"] == options.context)
    namespace = options.namespace or context["context"].get("namespace") or "default"
    headers = {}
    if token := settings.get_api_key_with_prefix("authorization"):
        headers["authorization"] = token
    client = httpx.Client(
        base_url=settings.host, verify=_tls(settings), headers=headers, timeout=_TIMEOUT, trust_env=False
    )
    return ClusterApi(client, namespace)


def _tls(settings: Any) -> ssl.SSLContext | bool:
    if not settings.verify_ssl:
        return False
    context = ssl.create_default_context(cafile=settings.ssl_ca_cert)
    if settings.cert_file:
        context.load_cert_chain(settings.cert_file, settings.key_file)
    return context


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except httpx.HTTPError as exc:
        raise Unavailable(f"the API server does not answer ({type(exc).__name__}: {exc}); check the context") from exc


def _refusal(status: int, body: bytes) -> NaruError:
    try:
        import json

        message = str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        message = body[:200].decode("utf-8", "replace")
    if status == 404:
        return ModelNotFound(message)
    if status == 403:
        return InvalidRequest(f"you may not do that: {message}")
    if status in (400, 409, 422):
        return InvalidRequest(message)
    return Unavailable(f"the API server answered HTTP {status}: {message}")
