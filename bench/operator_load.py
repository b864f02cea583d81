"""The operator under thousands of models: ``make bench-operator`` runs ``python -m bench.operator_load``.

A real API server with etcd, a real Redis and the operator's own process; the workers are a fake fleet
(`fake_fleet` of the end-to-end tests), and no pod runs. Measures how long 2 000 ModelDeployments take from the first
write to the last status, what the operator does while nothing happens, and how it starts again. README.md beside this
file says how to read the figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
import redis
from bench import machine

from naru_operator.adapters.ports import free_port
from naru_proto import names

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "e2e" / "cluster" / "support"))

FLEET = ROOT / "e2e" / "controlplane" / "support" / "fake_fleet.py"
NAMESPACE = "bench"
NUM_WORKERS = 8
NUM_CLIENTS = 16
STEADY_S = 60.0
POLL_S = 0.2
SETTLE_S = 20.0
"""After the last status, before the quiet minute."""
KINDS = (
    "modeldeployments",
    "workerpools",
    "pods",
    "controllerrevisions",
    "persistentvolumeclaims",
    "poddisruptionbudgets",
)
"""Resources whose writes count; leases are renewed for ever, and events are for people."""
TARGETS = {"apply_2000_s": 60.0, "restart_s": 20.0, "restart_changes": 0, "steady_writes": 0, "rss_bytes": 300e6}

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Figures:
    """What is written to `bench/results/operator.json`."""

    num_models: int
    apply_2000_s: float
    """From the first write of a ModelDeployment to the last status that says Ready, all in the registry."""
    steady_cpu_share: float
    """Of one core, in a minute in which nothing happens."""
    steady_writes: int
    """Of the operator to objects in that minute."""
    restart_s: float
    """From the start of a new process, after kill -9 of the old one, to the end of its first turn over all models."""
    restart_changes: int
    """Writes to objects and changes of the registry by that new process until it was quiet."""
    rss_bytes: int
    """Of the operator, the largest seen."""


class Server:
    """The API server as an administrator sees it."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http

    def create(self, path: str, item: dict[str, Any]) -> None:
        """Creates an object."""
        reply = self.http.post(path, json=item)
        if reply.status_code not in (200, 201, 409):
            raise RuntimeError(f"the API server answered {reply.status_code}: {reply.text[:300]}")

    def watch_models(self, told: set[str]) -> None:
        """Fills a set with the names of models whose status says that they serve, until the process ends.

        A watch, as a list of thousands of objects each second would be most of the API server's work. It is begun anew
        whenever the API server ends it, as it does with one that reads too slowly; each begins with all objects.
        """
        path = f"/apis/{names.API_GROUP}/{names.API_VERSION}/namespaces/{NAMESPACE}/modeldeployments"
        query = {"watch": "true", "resourceVersion": "0"}
        while True:
            try:
                with self.http.stream("GET", path, params=query, timeout=None) as stream:
                    for line in stream.iter_lines():
                        item = json.loads(line)["object"]
                        if is_told(item):
                            told.add(item["metadata"]["name"])
            except httpx.HTTPError:
                time.sleep(POLL_S)

    def versions(self) -> dict[str, str]:
        """The resourceVersion of every object that counts: one that was written has another one."""
        found: dict[str, str] = {}
        for kind in KINDS:
            group = {
                "pods": "/api/v1",
                "persistentvolumeclaims": "/api/v1",
                "controllerrevisions": "/apis/apps/v1",
                "poddisruptionbudgets": "/apis/policy/v1",
            }.get(kind, f"/apis/{names.API_GROUP}/{names.API_VERSION}")
            for item in self.http.get(f"{group}/namespaces/{NAMESPACE}/{kind}").json()["items"]:
                found[f"{kind}/{item['metadata']['name']}"] = item["metadata"]["resourceVersion"]
        return found


class Operator:
    """The operator's process."""

    def __init__(self, kubeconfig: Path, redis_url: str, health_port: int, log: Path) -> None:
        self._log = log
        self.url = f"http://127.0.0.1:{health_port}"
        self._env = {
            **os.environ,
            "KUBECONFIG": str(kubeconfig),
            "NARU_OPERATOR_REDIS_URL": redis_url,
            "NARU_OPERATOR_NAMESPACE": NAMESPACE,
            "NARU_OPERATOR_IDENTITY": "operator",  # a pod's name in the chart: a restarted container keeps its lease
            "NARU_OPERATOR_WORKER_IMAGE": "naru.local/worker:bench",
            "NARU_OPERATOR_WORKER_REDIS_SECRET": "naru-redis",
            "NARU_OPERATOR_HEALTH_LISTEN": f"127.0.0.1:{health_port}",
        }
        self.process: subprocess.Popen[bytes] | None = None
        self.max_rss_bytes = 0

    def start(self) -> None:
        """Starts it."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "naru_operator"], env=self._env, stdout=log, stderr=subprocess.STDOUT
            )

    def kill(self) -> None:
        """As `kill -9` does."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def metric(self, name: str) -> float | None:
        """A figure of its own; None while it does not answer."""
        try:
            text = httpx.get(f"{self.url}/metrics", timeout=5.0).text
        except httpx.HTTPError:
            return None
        for line in text.splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[1])
        return None

    def sample(self) -> psutil.Process:
        """The process; its memory is taken note of."""
        assert self.process is not None
        found = psutil.Process(self.process.pid)
        self.max_rss_bytes = max(self.max_rss_bytes, found.memory_info().rss)
        return found


def model(index: int) -> dict[str, Any]:
    """A ModelDeployment like any other."""
    return {
        "apiVersion": f"{names.API_GROUP}/{names.API_VERSION}",
        "kind": "ModelDeployment",
        "metadata": {"name": f"model-{index:05}"},
        "spec": {"model": {"uri": f"hf://bench/model-{index:05}"}},
    }


def pool() -> dict[str, Any]:
    """The pool whose workers are the fake fleet."""
    return {
        "apiVersion": f"{names.API_GROUP}/{names.API_VERSION}",
        "kind": "WorkerPool",
        "metadata": {"name": "default"},
        "spec": {"workers": {"min": NUM_WORKERS}},
    }


def apply_all(server: Server, count: int) -> None:
    """Creates all models at once."""
    path = f"/apis/{names.API_GROUP}/{names.API_VERSION}/namespaces/{NAMESPACE}/modeldeployments"
    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        list(clients.map(lambda index: server.create(path, model(index)), range(count)))


def is_told(item: dict[str, Any]) -> bool:
    """Whether a model's status says that it serves, as its newest spec asks."""
    status = item.get("status") or {}
    return status.get("phase") == "Ready" and status.get("observedGeneration") == item["metadata"]["generation"]


def wait_for(condition: Callable[[], _T | None], timeout_s: float, what: str, watch: Operator | None = None) -> _T:
    """The first true value of the condition."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        if value := condition():
            return value
        if watch is not None:
            watch.sample()
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"not within {timeout_s:g} s: {what}")
        time.sleep(POLL_S)


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """A Redis of our own. Gives its URL."""
    from naru_operator.adapters.redis_server import find_redis_server

    port = free_port("127.0.0.1")
    process = subprocess.Popen(
        [str(find_redis_server()), "--port", str(port), "--save", "", "--dir", str(folder)], stdout=subprocess.DEVNULL
    )
    url = f"redis://127.0.0.1:{port}/0"
    try:
        client = redis.Redis.from_url(url)
        wait_for(lambda: _answers(client), 10, "Redis answers")
        yield url
    finally:
        process.terminate()
        process.wait()


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def measure(count: int, folder: Path) -> Figures:
    """All figures of one run."""
    from naru_cluster.cluster import Cluster
    from naru_cluster.parts import build_parts

    with ExitStack() as stack:
        say(f"starting etcd, the API server and {NUM_WORKERS} fake workers")
        cluster = Cluster(f"bench{os.getpid()}", build_parts(say))
        cluster.up(full_node=False, end_with_caller=True)
        stack.callback(cluster.down)
        cluster.kubectl("apply", "-f", str(ROOT / "crds"))
        cluster.kubectl("create", "namespace", NAMESPACE)
        cluster.add_fake_nodes(2)
        url = stack.enter_context(redis_server(folder))
        operator = Operator(cluster.kubeconfig, url, free_port("127.0.0.1"), folder / "operator.log")
        stack.callback(operator.kill)
        server = Server(cluster.api)
        operator.start()
        server.create(f"/apis/{names.API_GROUP}/{names.API_VERSION}/namespaces/{NAMESPACE}/workerpools", pool())
        fleet = start_fleet(url)
        stack.callback(fleet.wait)
        stack.callback(fleet.terminate)
        wait_for(lambda: _ready_workers(server) == NUM_WORKERS, 60, "the pool is ready", operator)
        return _measure(count, server, operator, redis.Redis.from_url(url))


def _measure(count: int, server: Server, operator: Operator, board: redis.Redis) -> Figures:
    say(f"applying {count} ModelDeployments")
    told: set[str] = set()
    threading.Thread(target=server.watch_models, args=(told,), daemon=True).start()
    started_s = time.monotonic()
    feeder = threading.Thread(target=apply_all, args=(server, count))
    feeder.start()
    wait_for(lambda: len(told) == count, 600, f"{count} models are Ready", operator)
    apply_s = time.monotonic() - started_s
    feeder.join()
    in_registry = {name for name in map(_text, board.hkeys(names.KEY_MODELS)) if "@" not in name}
    if len(in_registry) != count:
        raise RuntimeError(f"{len(in_registry)} of {count} models stand in the registry")
    say(f"all told after {apply_s:.1f} s; now a minute in which nothing happens")
    time.sleep(SETTLE_S)
    before, process = server.versions(), operator.sample()
    cpu_before = sum(process.cpu_times()[:2])
    time.sleep(STEADY_S)
    cpu_share = (sum(operator.sample().cpu_times()[:2]) - cpu_before) / STEADY_S
    steady_writes = _num_changed(before, server.versions())
    say("kill -9, and a new process")
    operator.kill()
    before, registry = server.versions(), board.hgetall(names.KEY_MODELS)
    started_s = time.monotonic()
    operator.start()
    wait_for(lambda: (operator.metric("naru_operator_turns_total") or 0) >= 1, 120, "its first turn", operator)
    restart_s = time.monotonic() - started_s
    time.sleep(SETTLE_S)
    operator.sample()
    changes = _num_changed(before, server.versions())
    now = board.hgetall(names.KEY_MODELS)
    changes += sum(registry.get(key) != now.get(key) for key in registry.keys() | now.keys())
    return Figures(count, apply_s, cpu_share, steady_writes, restart_s, changes, operator.max_rss_bytes)


def start_fleet(redis_url: str) -> subprocess.Popen[str]:
    """The fake workers, under the names of the pool's pods."""
    worker_ids = [f"default-{index}" for index in range(NUM_WORKERS)]
    fleet = subprocess.Popen([sys.executable, str(FLEET), redis_url, *worker_ids], stdout=subprocess.PIPE, text=True)
    assert fleet.stdout is not None
    if "ready" not in fleet.stdout.readline():
        raise RuntimeError("the fake workers did not start")
    return fleet


def _ready_workers(server: Server) -> int:
    path = f"/apis/{names.API_GROUP}/{names.API_VERSION}/namespaces/{NAMESPACE}/workerpools/default"
    status = server.http.get(path).json().get("status") or {}
    return int((status.get("workers") or {}).get("ready") or 0)


def _text(key: bytes | str) -> str:
    return key.decode() if isinstance(key, bytes) else key


def _num_changed(before: dict[str, str], after: dict[str, str]) -> int:
    return sum(before.get(key) != after.get(key) for key in before.keys() | after.keys())


def say(text: str) -> None:
    """Progress for a person."""
    print(text, file=sys.stderr, flush=True)


def table(figures: Figures) -> str:
    """Figures beside their targets."""
    rows = [("figure", "measured", "target")]
    for field in dataclasses.fields(figures):
        value, target = getattr(figures, field.name), TARGETS.get(field.name)
        shown = f"{value:.3g}" if isinstance(value, float) else str(value)
        rows.append((field.name, shown, "-" if target is None else f"<= {target:g}"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints, writes; 1 where a target is missed."""
    parser = argparse.ArgumentParser("bench.operator_load", description="Measures the operator under many models.")
    parser.add_argument("--models", type=int, default=2000, help="how many (default: 2000, which the targets are for)")
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results" / "operator.json")
    options = parser.parse_args(arguments)
    import tempfile

    here = machine.describe()
    with tempfile.TemporaryDirectory() as folder:
        try:
            figures = measure(options.models, Path(folder))
        except RuntimeError as exc:
            log = Path(folder) / "operator.log"
            tail = log.read_text(errors="replace")[-3000:] if log.exists() else ""
            say(f"{tail}\nerror: {exc}")
            return 1
    print(table(figures))
    result = {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": dataclasses.asdict(here),
        **dataclasses.asdict(figures),
        "targets": TARGETS,
    }
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    missed = [name for name, limit in TARGETS.items() if getattr(figures, name) > limit]
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
