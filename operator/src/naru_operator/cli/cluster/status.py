"""`naru cluster status` and `explain`: objects, conditions and events as text. Reads the API server alone."""

from __future__ import annotations

import click

from naru_operator.cli.cluster.api import ClusterApi, event_time
from naru_operator.cli.text import human_bytes, table
from naru_operator.core.kube import Object

_MODELS = ("MODEL", "ALIAS", "PHASE", "READY", "BYTES", "LOAD", "WORKERS")
_POOLS = ("POOL", "PHASE", "READY", "USED/BUDGET", "ACCELERATOR")
_WORKERS = ("WORKER", "POOL", "NODE", "STATE", "USED/BUDGET", "MODELS")
_MAX_EVENTS = 15


def run_status(api: ClusterApi) -> int:
    """Prints models, pools and workers of the namespace.

    Raises:
        NaruError: as the API server said.
    """
    models = list(api.items(api.custom("modeldeployments")))
    pools = list(api.items(api.custom("workerpools")))
    parts = [
        table(_MODELS, [_model_row(item) for item in models]),
        table(_POOLS, [_pool_row(item) for item in pools]),
        table(_WORKERS, [row for item in pools for row in _worker_rows(item)]),
    ]
    click.echo("\n\n".join(parts))
    return 0


def run_explain(api: ClusterApi, kind: str, name: str) -> int:
    """Prints why a model or pool is as it is: conditions, copies or workers, the last error, the last events.

    Raises:
        NaruError: as the API server said.
    """
    item = api.model(name) if kind == "model" else api.get(api.custom("workerpools", name))
    click.echo(render(item, api.events_of(item)[-_MAX_EVENTS:]))
    return 0


def render(item: Object, events: list[Object]) -> str:
    """An object's state in words."""
    status = item.get("status") or {}
    parts = [f"{item['metadata']['name']}: {status.get('phase') or 'not seen by an operator yet'}"]
    conditions = status.get("conditions") or ()
    rows = [(c["type"], c["status"], c["reason"], c.get("message", "")) for c in conditions]
    parts.append(table(("CONDITION", "STATUS", "REASON", "MESSAGE"), rows))
    if residents := status.get("residents"):
        copies = [
            (
                r["worker"],
                r["state"],
                human_bytes((r.get("weightBytes") or 0) + (r.get("kvBytes") or 0)),
                str(r.get("inFlight", 0)),
                str(r.get("lastUsed", "-")),
            )
            for r in residents
        ]
        parts.append(table(("WORKER", "STATE", "BYTES", "IN FLIGHT", "LAST USED"), copies))
    if members := status.get("members"):
        rows_of = [(m["worker"], "ready" if m.get("ready") else "not ready", str(m.get("node", "-"))) for m in members]
        parts.append(table(("WORKER", "STATE", "NODE"), rows_of))
    for title, field in (("last eviction", "lastEviction"), ("last error", "lastError")):
        if told := status.get(field):
            parts.append(f"{title}: " + ", ".join(f"{key} {value}" for key, value in told.items()))
    if events:
        lines = [(event_time(e), str(e.get("reason", "")), str(e.get("message", ""))) for e in events]
        parts.append(table(("TIME", "EVENT", "MESSAGE"), lines))
    return "\n\n".join(parts)


def load_text(status: Object) -> str:
    """A load under way, with its progress and time left."""
    load = status.get("load")
    if not load:
        return "-"
    total = load.get("bytesTotal") or 0
    share = f"{100 * (load.get('bytesDone') or 0) // total} %" if total else "begun"
    return share + (f", {load['etaSeconds']} s left" if load.get("etaSeconds") else "")


def _model_row(item: Object) -> tuple[str, ...]:
    status = item.get("status") or {}
    replicas = status.get("replicas") or {}
    workers = sorted(str(resident["worker"]) for resident in status.get("residents") or ())
    return (
        item["metadata"]["name"],
        item["spec"].get("alias") or "-",
        status.get("phase") or "-",
        f"{replicas.get('ready', 0)}/{replicas.get('desired', 0)}",
        human_bytes(status["weightBytes"]) if status.get("weightBytes") else "-",
        load_text(status),
        ", ".join(workers) or "-",
    )


def _pool_row(item: Object) -> tuple[str, ...]:
    status = item.get("status") or {}
    workers = status.get("workers") or {}
    accelerator = (item.get("spec") or {}).get("accelerator") or {}
    return (
        item["metadata"]["name"],
        status.get("phase") or "-",
        f"{workers.get('ready', 0)}/{workers.get('desired', 0)}",
        _used(status),
        str(accelerator.get("kind", "cpu")),
    )


def _worker_rows(pool: Object) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for member in (pool.get("status") or {}).get("members") or ():
        state = "draining" if member.get("draining") else "ready" if member.get("ready") else "not ready"
        rows.append(
            (
                str(member["worker"]),
                pool["metadata"]["name"],
                str(member.get("node", "-")),
                state,
                _used(member),
                str(member.get("numModels", 0)),
            )
        )
    return rows


def _used(status: Object) -> str:
    if not status.get("budgetBytes"):
        return "-"
    return f"{human_bytes(status.get('usedBytes') or 0)} / {human_bytes(status['budgetBytes'])}"
