"""The operator's settings: one frozen dataclass, from which flags and environment variables are derived.

A flag is the field's name with dashes, a variable is NARU_OPERATOR_ and the name in capitals. Flags win.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from naru_proto.names import PORT_OPERATOR_HEALTH

ENV_PREFIX = "NARU_OPERATOR_"

ALL_NAMESPACES = "*"
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LISTEN = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\s]+):(\d{1,5})")


class SettingsError(Exception):
    """A setting cannot be used; the message names it and its text."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that can be set."""

    redis_url: str = "redis://127.0.0.1:6379/0"
    """Where the route map is: redis://, rediss:// or unix://. Give it by the variable: it may hold a password."""
    namespace: str = ""
    """The operator's own namespace, where its lease is. Empty: the pod's, from POD_NAMESPACE or the service account."""
    watch_namespaces: str = ""
    """Namespaces whose models and pools it serves, with commas between; `*`: all. Empty: its own alone."""
    identity: str = ""
    """Name under which this replica holds the lease; no two replicas may share it. A pod's name lets a container that
    is started again take up its lease at once. Empty: the host's name and a random part."""
    worker_image: str = ""
    """Container image of workers whose pool names none."""
    worker_redis_secret: str = "naru-redis"
    """Secret with the key `url`, in each pool's namespace, from which workers take the address of the route map."""
    worker_service_account: str = "default"
    """Service account of workers whose pool names none."""
    worker_image_pull_policy: str = "IfNotPresent"
    """Always, IfNotPresent or Never, for the workers' images."""
    worker_template_file: str = ""
    """YAML or JSON file of what all worker pods get, below what their pool sets: labels, annotations, env, volumes,
    tolerations, probes and so on, in the shapes of the Kubernetes API. Empty: nothing."""
    leader_election: bool = True
    """Act only while holding the lease. Without it there must never be two replicas."""
    status_interval_s: float = 5.0
    """Least seconds between two status writes of one object that tell of progress alone."""
    resync_s: float = 300.0
    """Seconds between full lists of what is watched: bounds how long a missed event or a drift stays unseen."""
    health_listen: str = f"127.0.0.1:{PORT_OPERATOR_HEALTH}"
    """host:port of /healthz, /readyz and /metrics; port 0 takes a free one. 0.0.0.0 in a container."""
    log_level: str = "info"
    """debug, info, warning or error."""
    log_format: str = "text"
    """text or json: one object on each line."""

    def __post_init__(self) -> None:
        """Checks what can be checked without looking anywhere.

        Raises:
            SettingsError: naming the setting, its value and what it must be.
        """
        schemes = ("redis://", "rediss://", "unix://")
        shown = self.redis_url.partition("://")[0] + "://…"  # the rest may hold a password
        _require("redis_url", shown, self.redis_url.startswith(schemes), f"a URL of {', '.join(schemes)}")
        _require("namespace", self.namespace, _is_name(self.namespace, or_empty=True), "a namespace's name")
        watched = self.watch_namespaces
        are_names = watched.strip() == ALL_NAMESPACES or all(_is_name(name) for name in _split(watched))
        _require("watch_namespaces", watched, are_names, "namespaces with commas between, or *")
        _require("identity", self.identity, len(self.identity) <= 253, "at most 253 characters")
        for name in ("worker_redis_secret", "worker_service_account"):
            value = getattr(self, name)
            is_good = len(value) <= 253 and _SUBDOMAIN.fullmatch(value) is not None
            _require(name, value, is_good, "the name of a Kubernetes object")
        _require("worker_image", self.worker_image, not re.search(r"\s", self.worker_image), "without blanks")
        for name, allowed in _CHOICES.items():
            _require(name, getattr(self, name), getattr(self, name) in allowed, f"one of {', '.join(allowed)}")
        _require("status_interval_s", self.status_interval_s, 0 <= self.status_interval_s <= 3600, "in [0, 3600]")
        _require("resync_s", self.resync_s, 1 <= self.resync_s <= 86400, "in [1, 86400]")
        listen = _LISTEN.fullmatch(self.health_listen)
        _require("health_listen", self.health_listen, listen is not None and int(listen[2]) <= 65535, "host:port")

    @property
    def health_address(self) -> tuple[str, int]:
        """Host and port of `health_listen`."""
        host, _, port = self.health_listen.rpartition(":")
        return host.strip("[]"), int(port)

    def watched(self, own_namespace: str) -> tuple[str, ...] | None:
        """The namespaces to watch, each once; None: all."""
        if self.watch_namespaces.strip() == ALL_NAMESPACES:
            return None
        return tuple(dict.fromkeys(_split(self.watch_namespaces))) or (own_namespace,)


_CHOICES = {
    "worker_image_pull_policy": ("Always", "IfNotPresent", "Never"),
    "log_level": ("debug", "info", "warning", "error"),
    "log_format": ("text", "json"),
}


def load_settings(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Reads flags and environment.

    Raises:
        SettingsError: naming the setting and its text.
    """
    parser = argparse.ArgumentParser(
        "naru-operator", description="Naru's operator: ModelDeployments and WorkerPools to worker pods and routes."
    )
    docs = field_docs()
    for field in dataclasses.fields(Settings):
        flag = "--" + field.name.replace("_", "-")
        text = f"{docs[field.name]} [{ENV_PREFIX}{field.name.upper()}; default {field.default}]".replace("%", "%%")
        if field.type == "bool":
            parser.add_argument(flag, help=text, default=None, action=argparse.BooleanOptionalAction)
        else:
            parser.add_argument(flag, help=text, default=None, metavar=str(field.type).upper())
    flags = vars(parser.parse_args(arguments))
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Settings):
        variable = ENV_PREFIX + field.name.upper()
        if flags[field.name] is not None:
            values[field.name] = _convert(field, flags[field.name], "--" + field.name.replace("_", "-"))
        elif variable in environment:
            values[field.name] = _convert(field, environment[variable], variable)
    return Settings(**values)


def field_docs() -> dict[str, str]:
    """The docstring under each field, on one line."""
    tree = ast.parse(inspect.getsource(Settings))
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    docs = {}
    for statement, following in itertools.pairwise(body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            assert isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            docs[statement.target.id] = " ".join(str(following.value.value).split())
    return docs


def _convert(field: dataclasses.Field[Any], text: str | bool, source: str) -> object:
    if isinstance(text, bool) or field.type == "str":
        return text
    if field.type == "bool":
        known = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        if text.lower() not in known:
            raise SettingsError(f"{source} is {text!r}; it must be true or false")
        return known[text.lower()]
    try:
        return int(text) if field.type == "int" else float(text)
    except ValueError:
        raise SettingsError(f"{source} is {text!r}; it must be a number ({field.type})") from None


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _is_name(text: str, *, or_empty: bool = False) -> bool:
    return (or_empty and not text) or _NAME.fullmatch(text) is not None


def _require(name: str, value: object, is_good: bool, wanted: str) -> None:
    if not is_good:
        raise SettingsError(f"{name} is {value!r}; it must be {wanted}")
