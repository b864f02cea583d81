"""What the chart's jobs do in the cluster before an install or upgrade. Standard library only; run as `python3 -c`.

`redis-secret` makes the password of Redis once and puts the URL into each watched namespace.
`crds` brings the custom resource definitions up to the chart's, and never takes a field away.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import ssl
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

CREDENTIALS = Path(os.environ.get("CREDENTIALS", "/var/run/secrets/kubernetes.io/serviceaccount"))
ROTATION = "serving.naru.dev/rotation"
MANAGER = "naru-chart"
TIMEOUT_S = 30.0


class HookError(Exception):
    """The job cannot go on; the message says what to do."""


def call(method: str, path: str, body: object = None, content_type: str = "application/json") -> tuple[int, Any]:
    """One request to the API server: status and parsed body. 404 and 409 are answers, other errors end the job."""
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    host = f"[{host}]" if ":" in host else host
    token = (CREDENTIALS / "token").read_text(encoding="utf-8")
    request = urllib.request.Request(
        f"https://{host}:{port}{path}",
        None if body is None else json.dumps(body).encode(),
        {"Authorization": f"Bearer {token}", "Accept": "application/json", "Content-Type": content_type},
        method=method,
    )
    context = ssl.create_default_context(cafile=str(CREDENTIALS / "ca.crt"))
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as exc:
        with exc:
            text = exc.read(4096).decode(errors="replace")
        if exc.code in (404, 409):
            return exc.code, None
        raise HookError(f"{method} {path}: {exc.code} {text}") from exc


def make_redis_secret() -> None:
    """Makes or renews the Secret of the release's namespace, then its copies with the URL alone."""
    name, rotation = os.environ["SECRET_NAME"], os.environ["SECRET_ROTATION"]
    own, *others = os.environ["SECRET_NAMESPACES"].split(",")
    url = ensure_password(own, name, rotation, os.environ["REDIS_ADDRESS"])
    for namespace in others:
        put_secret(namespace, name, {"url": url}, rotation)


def ensure_password(namespace: str, name: str, rotation: str, address: str) -> str:
    """The URL that stands in the Secret; a new one where there is none yet or `rotation` is a new text.

    Raises:
        HookError: the Secret is somebody else's: it lacks a key.
    """
    status, found = call("GET", f"/api/v1/namespaces/{namespace}/secrets/{name}")
    if status == 200 and (found["metadata"].get("annotations") or {}).get(ROTATION, "") == rotation:
        data = found.get("data") or {}
        if missing := [key for key in ("password", "url") if key not in data]:
            raise HookError(
                f"Secret {namespace}/{name} has no key {missing[0]!r}: delete it, or set redis.auth.existingSecret"
            )
        return base64.b64decode(data["url"]).decode()
    password = secrets.token_urlsafe(32)
    url = f"redis://:{password}@{address}/0"
    if put_secret(namespace, name, {"password": password, "url": url}, rotation) == 409:
        return ensure_password(namespace, name, rotation, address)  # another job was first
    return url


def put_secret(namespace: str, name: str, texts: dict[str, str], rotation: str) -> int:
    """Writes a Secret where it differs; the last status. 409: it came to be at the same time."""
    data = {key: base64.b64encode(text.encode()).decode() for key, text in texts.items()}
    annotations = {ROTATION: rotation}
    path = f"/api/v1/namespaces/{namespace}/secrets"
    status, found = call("GET", f"{path}/{name}")
    if status == 200:
        if found.get("data") != data or (found["metadata"].get("annotations") or {}).get(ROTATION) != rotation:
            patch = {"metadata": {"annotations": annotations}, "data": data}
            call("PATCH", f"{path}/{name}", patch, "application/merge-patch+json")
            print(f"Secret {namespace}/{name} was renewed")
        return 200
    metadata = {"name": name, "annotations": annotations, "labels": {"app.kubernetes.io/part-of": "naru"}}
    secret = {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": metadata, "data": data}
    status, _ = call("POST", path, secret)
    if status == 404:
        raise HookError(f"there is no namespace {namespace!r}: make it, or take it out of watchNamespaces")
    print(f"Secret {namespace}/{name} was made")
    return status


def apply_crds() -> None:
    """Applies every definition of the folder unless the cluster's is further on."""
    for path in sorted(Path(os.environ["CRD_FOLDER"]).glob("*.json")):
        crd = json.loads(path.read_text(encoding="utf-8"))
        name = crd["metadata"]["name"]
        url = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}"
        status, found = call("GET", url)
        if status == 200 and (lost := sorted(fields(found) - fields(crd))):
            print(f"{name} is left alone: the cluster's has fields that this chart's lacks: {', '.join(lost[:8])}")
            continue
        query = urllib.parse.urlencode({"fieldManager": MANAGER, "force": "true"})
        call("PATCH", f"{url}?{query}", crd, "application/apply-patch+yaml")
        print(f"{name} was applied")


def fields(crd: dict[str, Any]) -> set[str]:
    """Paths of all fields of all versions of a definition."""
    paths: set[str] = set()
    todo = [(version["name"], version["schema"]["openAPIV3Schema"]) for version in crd["spec"]["versions"]]
    while todo:
        path, schema = todo.pop()
        paths.add(path)
        todo += [(f"{path}.{name}", child) for name, child in schema.get("properties", {}).items()]
        for inside in ("items", "additionalProperties"):
            if isinstance(schema.get(inside), dict):
                todo.append((f"{path}[]", schema[inside]))
    return paths


def main() -> int:
    """Runs the one named; 1 when it could not be done."""
    try:
        {"redis-secret": make_redis_secret, "crds": apply_crds}[sys.argv[1]]()
    except (HookError, OSError) as exc:
        print(exc, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
