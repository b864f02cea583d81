"""The operator's own process: settings that are wrong, health, the lease, and its end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from cluster_rig import SETTINGS, moments, until
from fake_kube_api import FakeKubeApi, Reply, Seen, listing, refusal, stream
from kubernetes.client.configuration import Configuration

from naru_operator.__main__ import main
from naru_operator.adapters.kube.errors import Forbidden
from naru_operator.adapters.kube.kinds import WATCHED
from naru_operator.app import OperatorApp
from naru_operator.settings import Settings
from naru_proto.errors import Unavailable

LEASES = "/apis/coordination.k8s.io/v1/namespaces/ns/leases"
LEASE = f"{LEASES}/naru-operator"
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


class LeaseBook:
    """The one lease of an API server."""

    def __init__(self, api: FakeKubeApi) -> None:
        self.lease: dict[str, Any] | None = None
        api.on("POST", REVIEWS, Reply(201, {"status": {"allowed": True}}))
        api.on("GET", LEASE, self._get)
        api.on("POST", LEASES, self._write)
        api.on("PUT", LEASE, self._write)

    @property
    def holder(self) -> str:
        return str(self.lease["spec"]["holderIdentity"]) if self.lease else ""

    async def _get(self, _seen: Seen, _request: web.Request) -> Reply:
        return Reply(body=self.lease) if self.lease else refusal(404, "NotFound", "no lease")

    async def _write(self, seen: Seen, _request: web.Request) -> Reply:
        version = int(self.lease["metadata"]["resourceVersion"]) + 1 if self.lease else 1
        self.lease = {**seen.body, "metadata": {**seen.body["metadata"], "resourceVersion": str(version)}}
        return Reply(body=self.lease)


@pytest.fixture
async def api() -> AsyncIterator[FakeKubeApi]:
    """A server with all kinds, nothing in them, and silent watches."""
    async with FakeKubeApi() as running:
        running.discover()
        for kind in WATCHED:
            running.on("GET", kind.path("ns"), listing())
            running.on("GET", kind.path("ns") + r"\?.*watch=true.*", stream())
        yield running


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--redis-url", "http://user:hush-hush@h"], "redis_url is 'http://…'; it must be a URL of redis://"),
        (["--redis-url", "redis://user:hush-hush@h:port/0"], "--redis-url begins with 'redis'"),
        (["--resync-s", "soon"], "--resync-s is 'soon'; it must be a number"),
        (["--worker-image", ""], "worker_image is empty; name the container image of the workers"),
        (["--worker-template-file", "/nowhere/t.yaml"], "worker_template_file '/nowhere/t.yaml' cannot be read"),
        (["--watch-namespaces", "A,b"], "watch_namespaces is 'A,b'; it must be namespaces"),
    ],
)
def test_a_wrong_setting_is_a_sentence_and_exit_code_2(
    arguments: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("naru_operator.app.find_configuration", Configuration)
    assert main(["--namespace", "ns", "--worker-image", "w:1", *arguments]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert words in told
    assert "hush-hush" not in told
    assert told.count("\n") == 1


def test_no_way_to_a_cluster_is_a_sentence_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nothing"))
    assert main(["--namespace", "ns", "--worker-image", "w:1"]) == 1
    assert "set KUBECONFIG" in capsys.readouterr().err


async def start(api: FakeKubeApi, folder: Path, redis_url: str) -> tuple[asyncio.subprocess.Process, str]:
    """The operator's process, and the URL of its health pages."""
    env = {
        **os.environ,
        "KUBECONFIG": str(api.kubeconfig(folder)),
        "NARU_OPERATOR_REDIS_URL": redis_url,
        "NARU_OPERATOR_NAMESPACE": "ns",
        "NARU_OPERATOR_IDENTITY": "me",
        "NARU_OPERATOR_WORKER_IMAGE": "w:1",
        "NARU_OPERATOR_HEALTH_LISTEN": "127.0.0.1:0",
        "NARU_OPERATOR_LOG_FORMAT": "json",
    }
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, "-m", "naru_operator"]
    process = await asyncio.create_subprocess_exec(*command, env=env, stdout=pipe, stderr=pipe)
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode()
    found = re.search(r"health on (\S+)", line)
    assert found, line
    return process, f"http://{found[1]}"


async def page(client: httpx.AsyncClient, path: str, words: str) -> None:
    """Returns once a page says so."""
    async for _ in moments():
        if words in (await client.get(path)).text:
            return


@pytest.mark.usefixtures("route_map")
async def test_a_replica_leads_answers_for_its_health_and_ends_at_once_with_its_lease_released(
    api: FakeKubeApi, tmp_path: Path, redis_server_url: str
) -> None:
    leases = LeaseBook(api)
    process, url = await start(api, tmp_path, redis_server_url)
    async with httpx.AsyncClient(base_url=url, timeout=10.0) as client:
        await until(lambda: leases.holder == "me")
        await page(client, "/readyz", "ok")
        await page(client, "/metrics", "naru_operator_turns_total 1.0")
        assert (await client.get("/healthz")).text == "ok"
        metrics = (await client.get("/metrics")).text
        assert "naru_operator_is_leader 1.0" in metrics
        assert 'naru_operator_objects{kind="WorkerPool"} 0.0' in metrics
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(10):
        _, errors = await process.communicate()
    assert (process.returncode, leases.holder) == (0, "")
    lines = [json.loads(line) for line in errors.decode().splitlines()]
    assert not [line for line in lines if "traceback" in line]
    assert "this replica acts" in [line["message"] for line in lines]
    writes = [seen for seen in api.seen if seen.method != "GET" and seen.path not in (REVIEWS, LEASES, LEASE)]
    assert writes == []


async def test_a_missing_permission_to_lead_ends_the_start_with_a_sentence(api: FakeKubeApi) -> None:
    api.on("POST", REVIEWS, Reply(201, {"status": {"allowed": False}}))
    settings = Settings(
        namespace="ns", worker_image="w:1", health_listen="127.0.0.1:0", redis_url="redis://127.0.0.1:1/0"
    )
    app = OperatorApp(settings, api.configuration(), SETTINGS)
    with pytest.raises(Forbidden, match="no replica can lead: the permission to"):
        await app.run()


async def test_an_address_that_is_taken_ends_the_start_with_a_sentence(api: FakeKubeApi) -> None:
    taken = f"127.0.0.1:{api.port}"
    app = OperatorApp(Settings(namespace="ns", health_listen=taken), api.configuration(), SETTINGS)
    with pytest.raises(Unavailable, match=f"cannot listen on '{taken}'"):
        await app.run()


async def test_nobody_leads_before_the_election_has_begun(api: FakeKubeApi) -> None:
    app = OperatorApp(Settings(namespace="ns"), api.configuration(), SETTINGS)
    alone = OperatorApp(Settings(namespace="ns", leader_election=False), api.configuration(), SETTINGS)
    assert (app._may_write(), alone._may_write()) == (False, True)
