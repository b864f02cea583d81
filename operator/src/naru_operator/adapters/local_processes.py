"""How router and workers are run as processes of this machine: programs and flags. Called by `naru up`.

They run under the same Python as this command, so that they are the same version.
"""

from __future__ import annotations

import sys
from pathlib import Path

from naru_operator.adapters.child_process import ProcessSpec
from naru_operator.core.desired import DesiredPool


def worker_process(worker_id: str, pool: DesiredPool, redis_url: str) -> ProcessSpec:
    """A worker on a free loopback port; its lease tells the others which."""
    flags = {
        "--worker-id": worker_id,
        "--pool": pool.name,
        "--listen": "127.0.0.1:0",
        "--metrics-listen": "127.0.0.1:0",
        "--redis-url": redis_url,
        "--drain-timeout-s": f"{pool.drain_timeout_s:g}",
    }
    if pool.num_threads is not None:
        flags["--num-threads"] = str(pool.num_threads)
    if pool.memory_budget_bytes is not None:
        flags["--memory-budget-bytes"] = str(pool.memory_budget_bytes)
    if pool.host_budget_bytes is not None:
        flags["--host-budget-bytes"] = str(pool.host_budget_bytes)
    if pool.watermarks is not None:
        low, high = pool.watermarks
        flags |= {"--low-watermark": f"{low:g}", "--high-watermark": f"{high:g}"}
    return ProcessSpec(worker_id, _argv("naru_worker", flags))


def router_process(
    name: str,
    redis_url: str,
    host: str,
    http_port: int,
    grpc_port: int,
    tenants_file: Path | None = None,
    files_dir: Path | None = None,
) -> ProcessSpec:
    """A router on two public ports; `files_dir`: what clients upload and have stored, shared by all routers."""
    flags = {
        "--host": host,
        "--http-port": str(http_port),
        "--grpc-port": str(grpc_port),
        "--redis-url": redis_url,
        "--log-level": "warning",
    }
    if tenants_file is not None:
        flags["--tenants-file"] = str(tenants_file.absolute())
    if files_dir is not None:
        flags["--files-dir"] = str(files_dir.absolute())
    return ProcessSpec(name, _argv("naru_router", flags))


def _argv(module: str, flags: dict[str, str]) -> tuple[str, ...]:
    argv = [sys.executable, "-m", module]
    for flag, value in flags.items():
        argv += [flag, value]
    return tuple(argv)
