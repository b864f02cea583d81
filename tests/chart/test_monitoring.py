"""Alerts and dashboard ask for metrics that exist; monitors find the pods that serve them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from helm_chart import ROOT, all_values, find, render, workload

METRIC = re.compile(r"\bnaru_[a-z0-9_]+")


def known_series() -> set[str]:
    """Names that may stand in a query: those of the page, with the parts of histograms, and the operator's gauges."""
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    sources = (path.read_text("utf-8") for path in (ROOT / "operator" / "src").rglob("metrics.py"))
    series = {name for source in sources for name in re.findall(r'"(naru_operator_\w+)"', source)}
    for name, kind in re.findall(r"^\| `(naru_\w+)` \| (\w+) \|", page, re.MULTILINE):
        series |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if kind == "histogram" else {name}
    return series


def alerts(values: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    objects = render({"metrics": {"prometheusRule": {"enabled": True}}, **(values or {})})
    (group,) = find(objects, "PrometheusRule", "naru-alerts")["spec"]["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def dashboard() -> dict[str, Any]:
    data = find(render(all_values()), "ConfigMap", "naru-dashboard")["data"]
    ((name, text),) = data.items()
    assert name == "ns-a-naru.json"
    parsed: dict[str, Any] = json.loads(text)
    return parsed


def test_alerts_ask_for_metrics_that_exist() -> None:
    asked = {name for rule in alerts() for name in METRIC.findall(rule["expr"])}
    assert len(asked) >= 10
    assert asked <= known_series()
    assert len({rule["alert"] for rule in alerts()}) == len(alerts())
    for rule in alerts():
        assert {"summary", "description"} <= set(rule["annotations"]), rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical")


@pytest.mark.parametrize(
    ("watched", "selector"),
    [([], '{namespace=~"ns-a"}'), (["team-a", "team-b"], '{namespace=~"team-a|team-b"}'), (["*"], "{}")],
    ids=["own", "some", "all"],
)
def test_alerts_on_workers_speak_of_the_watched_namespaces(watched: list[str], selector: str) -> None:
    by_name = {rule["alert"]: rule["expr"] for rule in alerts({"watchNamespaces": watched})}
    assert by_name["NaruWorkerDoesNotServe"] == f"naru_worker_serving{selector} == 0"
    assert 'naru_router_registry_up{namespace="ns-a"}' in by_name["NaruRouteMapUnreadable"]


def test_braces_of_queries_are_even() -> None:
    for rule in alerts({"watchNamespaces": ["*"]}):
        for opening, closing in ("{}", "()", "[]"):
            assert rule["expr"].count(opening) == rule["expr"].count(closing), rule["alert"]
        assert ",}" not in rule["expr"] and "{," not in rule["expr"]


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    asked = {name for query in queries for name in METRIC.findall(query)}
    assert len(asked) >= 20
    assert asked <= known_series()
    for query in queries:
        assert query.count("(") == query.count(")") and query.count("{") == query.count("}"), query


def test_the_dashboards_variables_are_those_its_panels_use() -> None:
    board = dashboard()
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(board["panels"]))) - {"__rate_interval"}
    assert used == {variable["name"] for variable in board["templating"]["list"]}


def test_monitors_find_routers_and_workers() -> None:
    objects = render(all_values())
    service = find(objects, "Service", "naru-router")
    monitor = find(objects, "ServiceMonitor", "naru-router")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["spec"]["endpoints"][0]["port"] in [port["name"] for port in service["spec"]["ports"]]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    operator = find(objects, "PodMonitor", "naru-operator")["spec"]
    template = workload(objects, "operator")["spec"]["template"]
    assert operator["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    ports = template["spec"]["containers"][0]["ports"]
    assert operator["podMetricsEndpoints"][0]["port"] in [port["name"] for port in ports]
    pods = find(objects, "PodMonitor", "naru-worker")["spec"]
    assert pods["namespaceSelector"] == {"matchNames": ["team-a", "team-b"]}
    assert pods["podMetricsEndpoints"][0]["port"] == "metrics"
