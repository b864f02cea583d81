"""Requests generated from the description at /openapi.json, sent to a router with stub workers.

    python e2e/api/support/fuzzing.py [MAX_EXAMPLES]

Prints what Schemathesis prints, and fails where it does: a status of 500 and above that is not described, a reply that
is not as it is described, a malformed request that is taken, a method that is answered wrongly.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[3]
CLIENTS = ROOT / ".venv-clients" / "bin"
STUB = ROOT / "tests" / "router" / "support" / "served_stub.py"
HOOKS = ROOT / "e2e" / "api" / "clients"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "use_after_free",
)
TIMEOUT_S = 1800.0


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """A router in a process of its own; its address."""
    command = [sys.executable, str(STUB), str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline().split()
        if not line or line[0] != "ready":
            raise RuntimeError("the router did not start; its output says why")
        yield line[1]
    finally:
        process.communicate(timeout=30)  # closes its input


def fuzz(url: str, folder: Path, phases: str, max_examples: int, seed: int = 1) -> subprocess.CompletedProcess[str]:
    """One run, reproducible by its seed."""
    command = [
        str(CLIENTS / "st"),
        "run",
        f"{url}/openapi.json",
        "--checks",
        ",".join(CHECKS),
        "--phases",
        phases,
        "--max-examples",
        str(max_examples),
        "--seed",
        str(seed),
        "--request-timeout",
        "20",
        "--no-color",
    ]
    env = {**os.environ, "PYTHONPATH": str(HOOKS), "SCHEMATHESIS_HOOKS": "fuzz_hooks", "PYTHONHASHSEED": "0"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def num_cases(output: str) -> tuple[int, int]:
    """(generated, passed) of a run's output."""
    match = re.search(r"(\d+) generated, (?:(\d+) passed)?", output)
    return (0, 0) if match is None else (int(match[1]), int(match[2] or 0))


def main() -> int:
    """A long run."""
    max_examples = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    with tempfile.TemporaryDirectory(prefix="naru-fuzz-") as name:
        folder = Path(name)
        with served(folder) as url:
            done = fuzz(url, folder, "coverage,fuzzing", max_examples)
    print(done.stdout, done.stderr, sep="\n")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
