"""A loopback HTTP server that answers like an API server where a real one cannot be made to: errors, silence, cuts.

Runs in the test's own loop. Whatever can be had from a real API server is tested there instead.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aiohttp import web
from kubernetes.client.configuration import Configuration

from naru_operator.adapters.kube.kinds import WATCHED, Kind

TOKEN = "very-secret-token"


@dataclass(frozen=True)
class Seen:
    """A request that came."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any


@dataclass(frozen=True)
class Reply:
    """An answer: a status with a JSON body, or raw text."""

    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    raw: str | None = None


Handler = Callable[[Seen, web.Request], Awaitable[Reply | web.StreamResponse]]


async def hang(_seen: Seen, _request: web.Request) -> Reply:
    """Never answers."""
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


async def cut(_seen: Seen, request: web.Request) -> web.StreamResponse:
    """Ends the connection in the middle of an answer."""
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"kind": ')
    assert request.transport is not None
    request.transport.abort()
    return response


def refusal(status: int, reason: str, message: str, **headers: str) -> Reply:
    """A Status object."""
    body = {"kind": "Status", "status": "Failure", "reason": reason, "message": message, "code": status}
    return Reply(status, body, {name.replace("_", "-"): value for name, value in headers.items()})


class FakeKubeApi:
    """`async with FakeKubeApi() as api`: answers what it was told to; everything else is 404."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.port = 0
        self._answers: list[tuple[str, re.Pattern[str], list[Reply | Handler]]] = []
        self._came = asyncio.Condition()
        app = web.Application(client_max_size=16 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.1)

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = int(self._runner.addresses[0][1])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    def on(self, method: str, path: str, *answers: Reply | Handler) -> None:
        """Answers requests whose whole path matches (with the query, where ``path`` has a `\\?`).

        Answers come in order, the last for ever. What was told later wins.
        """
        self._answers.insert(0, (method, re.compile(path), list(answers)))

    def discover(self, kinds: tuple[Kind, ...] = tuple(WATCHED)) -> None:
        """Tells of these kinds as an API server's discovery does."""
        groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for kind in kinds:
            verbs = ["get", "list", "watch"]
            entry = {"name": kind.plural, "kind": kind.name, "singularName": "", "namespaced": True, "verbs": verbs}
            groups.setdefault((kind.group, kind.version), []).append(entry)
        extra = {"namespaces": "Namespace"}
        for name, text in extra.items():
            entry = {"name": name, "kind": text, "singularName": "", "namespaced": False, "verbs": ["list"]}
            groups.setdefault(("", "v1"), []).append(entry)
        crds = {"name": "customresourcedefinitions", "kind": "CustomResourceDefinition", "singularName": ""}
        groups[("apiextensions.k8s.io", "v1")] = [{**crds, "namespaced": False, "verbs": ["list"]}]
        self.on("GET", "/api", Reply(body={"versions": ["v1"]}))
        listed = []
        for (group, version), resources in groups.items():
            path = f"/apis/{group}/{version}" if group else f"/api/{version}"
            self.on("GET", re.escape(path), Reply(body={"kind": "APIResourceList", "resources": resources}))
            if group:
                one = {"groupVersion": f"{group}/{version}", "version": version}
                listed.append({"name": group, "versions": [one], "preferredVersion": one})
        self.on("GET", "/apis", Reply(body={"kind": "APIGroupList", "groups": listed}))

    def configuration(self) -> Configuration:
        """How to reach it."""
        found = Configuration(host=f"http://127.0.0.1:{self.port}")
        found.api_key["BearerToken"] = f"Bearer {TOKEN}"
        return found

    def kubeconfig(self, folder: Path) -> Path:
        """The same as a file."""
        path = folder / "kubeconfig"
        cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}
        user = {"name": "u", "user": {"token": TOKEN}}
        context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
        content = {"current-context": "x", "clusters": [cluster], "users": [user], "contexts": [context]}
        path.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", **content}))
        return path

    def requests(self, method: str, path: str) -> list[Seen]:
        """Those that came so far."""
        return [seen for seen in self.seen if seen.method == method and _matches(re.compile(path), seen)]

    async def wait_for(self, method: str, path: str, count: int = 1) -> list[Seen]:
        """Returns once so many such requests came."""
        async with asyncio.timeout(30), self._came:
            await self._came.wait_for(lambda: len(self.requests(method, path)) >= count)
        return self.requests(method, path)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        text = await request.text()
        seen = Seen(
            request.method,
            request.path,
            dict(request.query),
            dict(request.headers),
            json.loads(text) if text else None,
        )
        self.seen.append(seen)
        async with self._came:
            self._came.notify_all()
        for method, pattern, answers in self._answers:
            if method == seen.method and _matches(pattern, seen):
                answer = answers.pop(0) if len(answers) > 1 else answers[0]
                made = answer if isinstance(answer, Reply) else await answer(seen, request)
                return made if isinstance(made, web.StreamResponse) else _response(made)
        return _response(refusal(404, "NotFound", f"{seen.path} not found"))


def _matches(pattern: re.Pattern[str], seen: Seen) -> bool:
    query = "&".join(f"{name}={value}" for name, value in sorted(seen.query.items()))
    if "watch" in seen.query and r"\?" not in pattern.pattern:
        return False  # a watch has the path of the list
    return pattern.fullmatch(f"{seen.path}?{query}" if r"\?" in pattern.pattern else seen.path) is not None


def _response(reply: Reply) -> web.Response:
    text = reply.raw if reply.raw is not None else json.dumps(reply.body)
    return web.Response(status=reply.status, text=text, headers={"Content-Type": "application/json", **reply.headers})


def listing(*objects: dict[str, Any], version: str = "10") -> Reply:
    """A list of objects, whole."""
    return Reply(body={"kind": "List", "metadata": {"resourceVersion": version}, "items": list(objects)})


def stream(*events: dict[str, Any], is_open: bool = True) -> Handler:
    """A watch that tells these events and then stays open in silence, or ends."""

    async def handle(_seen: Seen, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for event in events:
            await response.write(json.dumps(event).encode() + b"\n")
        if is_open:
            await asyncio.Event().wait()
        return response

    return handle
