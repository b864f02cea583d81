"""The health server and its numbers."""

from __future__ import annotations

import httpx

from naru_operator.adapters.kube.client import Listing
from naru_operator.adapters.kube.health import HealthServer
from naru_operator.adapters.kube.kinds import WATCHED
from naru_operator.adapters.kube.metrics import OperatorMetrics
from naru_operator.adapters.kube.store import ObjectStore


async def ask(port: int, path: str) -> tuple[int, str]:
    async with httpx.AsyncClient(trust_env=False) as http:
        answer = await http.get(f"http://127.0.0.1:{port}{path}")
        return answer.status_code, answer.text


async def test_checks_answer_200_or_503_with_the_reason() -> None:
    trouble = {"live": "", "ready": "pods are not listed yet"}
    checks = {"live": lambda: trouble["live"], "ready": lambda: trouble["ready"]}
    async with HealthServer(("127.0.0.1", 0), metrics=OperatorMetrics(), **checks) as server:
        assert await ask(server.port, "/healthz") == (200, "ok")
        assert await ask(server.port, "/readyz") == (503, "pods are not listed yet")
        trouble.update(live="the loop stands still", ready="")
        assert await ask(server.port, "/healthz") == (503, "the loop stands still")
        assert await ask(server.port, "/readyz") == (200, "ok")
        assert (await ask(server.port, "/"))[0] == 404


async def test_numbers_follow_store_and_election() -> None:
    clock = [0.0]
    store = ObjectStore(None, clock=lambda: clock[0])
    metrics = OperatorMetrics()
    metrics.follow(store, lambda: True)
    metrics.answered("patch", "Pod", 200)
    metrics.answered("patch", "Pod", 0)
    clock[0] = 60.0
    for kind in WATCHED:
        if kind.name != "Pod":
            store.replace(kind.name, None, Listing((), "1"))
    store.replace("WorkerPool", None, Listing(({"metadata": {"name": "a", "resourceVersion": "2"}},), "2"))
    clock[0] = 75.0
    async with HealthServer(("127.0.0.1", 0), live=str, ready=str, metrics=metrics) as server:
        status, text = await ask(server.port, "/metrics")
    assert status == 200
    lines = text.splitlines()
    assert 'naru_operator_api_requests_total{kind="Pod",status="200",verb="patch"} 1.0' in lines
    assert 'naru_operator_api_requests_total{kind="Pod",status="0",verb="patch"} 1.0' in lines
    assert "naru_operator_is_leader 1.0" in lines
    assert 'naru_operator_seconds_since_heard{kind="Pod"} 75.0' in lines
    assert 'naru_operator_seconds_since_heard{kind="WorkerPool"} 15.0' in lines
    assert 'naru_operator_objects{kind="WorkerPool"} 1.0' in lines
