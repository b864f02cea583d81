"""The operator's settings: one frozen dataclass, from which flags and environment variables are derived.

A flag is the field's name with dashes, a variable is NARU_OPERATOR_ and the name in capitals. Flags win.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from naru_proto import settings
from naru_proto.names import PORT_OPERATOR_HEALTH
from naru_proto.settings import read_values, require

ENV_PREFIX = "NARU_OPERATOR_"

ALL_NAMESPACES = "*"
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LISTEN = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\s]+):(\d{1,5})")


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
        require("redis_url", shown, self.redis_url.startswith(schemes), f"a URL of {', '.join(schemes)}")
        require("namespace", self.namespace, _is_name(self.namespace, or_empty=True), "a namespace's name")
        watched = self.watch_namespaces
        are_names = watched.strip() == ALL_NAMESPACES or all(_is_name(name) for name in _split(watched))
        require("watch_namespaces", watched, are_names, "namespaces with commas between, or *")
        require("identity", self.identity, len(self.identity) <= 253, "at most 253 characters")
        for name in ("worker_redis_secret", "worker_service_account"):
            value = getattr(self, name)
            is_good = len(value) <= 253 and _SUBDOMAIN.fullmatch(value) is not None
            require(name, value, is_good, "the name of a Kubernetes object")
        require("worker_image", self.worker_image, not re.search(r"\s", self.worker_image), "without blanks")
        for name, allowed in _CHOICES.items():
            require(name, getattr(self, name), getattr(self, name) in allowed, f"one of {', '.join(allowed)}")
        require("status_interval_s", self.status_interval_s, 0 <= self.status_interval_s <= 3600, "in [0, 3600]")
        require("resync_s", self.resync_s, 1 <= self.resync_s <= 86400, "in [1, 86400]")
        listen = _LISTEN.fullmatch(self.health_listen)
        require("health_listen", self.health_listen, listen is not None and int(listen[2]) <= 65535, "host:port")

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
    values = read_values(Settings, parser, ENV_PREFIX, arguments, environment, is_empty_false=False)
    return Settings(**values)


def field_docs() -> dict[str, str]:
    """The docstring under each field, on one line."""
    return settings.field_docs(Settings)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _is_name(text: str, *, or_empty: bool = False) -> bool:
    return (or_empty and not text) or _NAME.fullmatch(text) is not None
