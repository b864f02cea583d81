"""The router's settings: one frozen dataclass, from which flags and environment variables are derived.

A flag is the field's name with dashes, a variable is NARU_ROUTER_ and the name in capitals. Flags win.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from naru_proto import settings
from naru_proto.names import PORT_ROUTER_GRPC, PORT_ROUTER_HTTP
from naru_proto.settings import read_values, require

ENV_PREFIX = "NARU_ROUTER_"


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that can be set."""

    host: str = "127.0.0.1"
    """Address both servers listen on; 0.0.0.0 in a container."""
    http_port: int = PORT_ROUTER_HTTP
    """Port of the OpenAI API; 0 takes a free one."""
    grpc_port: int = PORT_ROUTER_GRPC
    """Port of the gRPC API; 0 takes a free one."""
    num_processes: int = 1
    """Router processes behind the same two ports, each a router of its own; about one a core."""
    process_port: int = 0
    """With several processes: number i of them, from 0, serves HTTP at this port plus i as well, so that the metrics
    of each can be read; 0: it does not."""
    share_ports: bool = False
    """Let other processes of this user listen on the same ports; set by the one that starts several."""
    redis_url: str = "redis://127.0.0.1:6379/0"
    """Where the route map is: redis://, rediss:// or unix://."""
    registry_poll_s: float = 1.0
    """Seconds between readings of the route map when no change is announced; with the lease's 3 s it bounds how long
    a dead worker stays in the map."""
    model_wait_s: float = 30.0
    """Most seconds a request waits for a model to be loaded, here or on a worker; then 503."""
    max_waiting_per_model: int = 1024
    """Most requests that wait for one model to be loaded; more are refused with 429."""
    max_queue_s: float = 60.0
    """Longest wait for its turn on a worker that a request of priority 0 is sent into; above it 429. Each priority
    up or down is a sixth less or a fifth more."""
    tenants_file: str = ""
    """YAML file of tenants with their keys and quotas; empty: everybody may use everything."""
    tls_cert_file: str = ""
    """PEM file of the certificate, with those between it and its authority, that both servers show; empty: no TLS. A
    changed file counts for new connections."""
    tls_key_file: str = ""
    """PEM file of its key, without a password."""
    tls_client_ca_file: str = ""
    """PEM file of the authorities whose certificates clients must show (mutual TLS); empty: they need none."""
    advertise_address: str = ""
    """host:port at which others reach this router's HTTP; empty: as it listens, where that is one address."""
    num_traces: int = 4096
    """Most requests whose decisions are remembered for `naru explain request`; 0: none."""
    max_body_bytes: int = 8 * 1024 * 1024
    """Largest request body."""
    files_dir: str = ""
    """Folder of uploaded files, batches and stored responses, shared by all routers; empty: none of them is offered."""
    max_file_bytes: int = 200 * 1024 * 1024
    """Largest uploaded file."""
    batch_concurrency: int = 80
    """Requests of batches in flight at once, for each worker that is connected; somewhat more than a worker has in one
    step, so that it never waits for the next one."""
    max_unsent_bytes: int = 64 * 1024 * 1024
    """Most bytes of answers that wait for clients who read too slowly, all together; past it the slowest is
    disconnected."""
    send_timeout_s: float = 30.0
    """A client that takes nothing of its answer for so many seconds is disconnected."""
    load_factor: float = 1.25
    """How far above the mean a worker's requests in flight may go before its keys move on; at least 1."""
    num_virtual_nodes: int = 128
    """Points of a worker on the hash ring; more spread keys more evenly."""
    template_timeout_s: float = 2.0
    """Most seconds of processor time one chat template may take; it may wait three times as long."""
    template_max_steps: int = 500_000
    """Most loop turns, calls, filters and operators of one chat template."""
    template_max_chars: int = 8 * 1024 * 1024
    """Most characters of one rendered chat."""
    leave_delay_s: float = 0.0
    """Seconds after SIGTERM in which requests are still taken, while readiness says no: balancers learn of it late."""
    drain_timeout_s: float = 30.0
    """Seconds running requests may take to finish after that; then they end with an error."""
    log_level: str = "info"
    """debug, info, warning or error."""
    exit_with_parent: bool = False
    """End when the process that started this one ends (Linux)."""

    def __post_init__(self) -> None:
        """Checks ranges.

        Raises:
            SettingsError: naming the setting, its value and what it must be.
        """
        require("num_processes", self.num_processes, 1 <= self.num_processes <= 256, "in [1, 256]")
        for name in ("http_port", "grpc_port", "process_port"):
            require(name, getattr(self, name), 0 <= getattr(self, name) <= 65535, "in [0, 65535]")
        for name in ("registry_poll_s", "template_timeout_s", "send_timeout_s"):
            require(name, getattr(self, name), 0.01 <= getattr(self, name) <= 3600, "in [0.01, 3600]")
        for name in ("model_wait_s", "leave_delay_s", "drain_timeout_s", "max_queue_s"):
            require(name, getattr(self, name), 0 <= getattr(self, name) <= 86400, "in [0, 86400]")
        for name in (
            "max_waiting_per_model",
            "max_body_bytes",
            "max_file_bytes",
            "batch_concurrency",
            "max_unsent_bytes",
            "template_max_steps",
            "template_max_chars",
        ):
            require(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        has_cert, has_key = bool(self.tls_cert_file), bool(self.tls_key_file)
        require("tls_key_file", self.tls_key_file, has_key or not has_cert, "set, as tls_cert_file is")
        require("tls_cert_file", self.tls_cert_file, has_cert or not has_key, "set, as tls_key_file is")
        client_ca = self.tls_client_ca_file
        require("tls_client_ca_file", client_ca, has_cert or not client_ca, "empty where tls_cert_file is empty")
        require("num_traces", self.num_traces, 0 <= self.num_traces <= 1_000_000, "in [0, 1000000]")
        require("load_factor", self.load_factor, 1.0 <= self.load_factor <= 1000.0, "in [1, 1000]")
        require("num_virtual_nodes", self.num_virtual_nodes, 1 <= self.num_virtual_nodes <= 4096, "in [1, 4096]")
        levels = ("debug", "info", "warning", "error")
        require("log_level", self.log_level, self.log_level in levels, f"one of {', '.join(levels)}")
        schemes = ("redis://", "rediss://", "unix://")
        shown = self.redis_url.partition("://")[0] + "://…"  # the rest may hold a password
        require("redis_url", shown, self.redis_url.startswith(schemes), f"a URL of {', '.join(schemes)}")


def load_settings(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Reads flags and environment.

    Raises:
        SettingsError: naming the setting and its text.
    """
    parser = argparse.ArgumentParser(
        "naru-router", description="Naru's router: OpenAI HTTP and gRPC in front of workers."
    )
    values = read_values(Settings, parser, ENV_PREFIX, arguments, environment, is_empty_false=True)
    return Settings(**values)


def field_docs() -> dict[str, str]:
    """The docstring under each field, on one line."""
    return settings.field_docs(Settings)
