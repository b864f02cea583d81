"""A model served by Naru and by vLLM on the same GPU, one after the other, asked by the same client. For `gpu`."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench import measure, report
from bench.engines import SERVED_NAME
from bench.peers import PeerError
from bench.servers import Server, ServerSpec, free_port
from bench.workload import FULL, CaseName, single_token_words

CASES: tuple[CaseName, ...] = ("single", "conc16")
MAX_MODEL_LEN = 4096
KV_CACHE_GIB = 8
REPEATS = measure.Repeats(most=3, budget_s=15.0)
SERVING_TIMEOUT_S = 120.0


def naru_spec(model: Path, folder: Path) -> ServerSpec:
    """`naru up` with one manifest and the backend `cuda`.

    Raises:
        PeerError: the command is not in this environment.
    """
    document = {
        "apiVersion": "serving.naru.dev/v1alpha1",
        "kind": "ModelDeployment",
        "metadata": {"name": SERVED_NAME},
        "spec": {
            "model": {"uri": model.resolve().as_uri()},
            "resources": {"kvCache": {"max": f"{KV_CACHE_GIB}Gi"}},
            "engine": {"speculation": "Never", "maxModelLen": MAX_MODEL_LEN},
        },
    }
    manifest = folder / "naru-model.yaml"
    manifest.write_text(json.dumps(document, indent=2) + "\n")  # JSON is YAML
    program = Path(sys.executable).parent / "naru"
    if not program.exists():
        raise PeerError(f"{program} does not exist; install the project into this environment")
    port = free_port()
    return ServerSpec(
        name="naru",
        argv=(str(program), "up", "--workers", "1", str(manifest)),
        port=port,
        ready_path="/readyz",
        model=SERVED_NAME,
        start_timeout_s=180,
        environment={
            "NARU_HTTP_PORT": str(port),
            "NARU_GRPC_PORT": str(free_port()),
            "NARU_HOME": str(folder / "naru-home"),
            "NARU_WORKER_BACKEND": "cuda",
        },
        settings=f"naru up, backend cuda, no speculation, KV cache {KV_CACHE_GIB} GiB",
    )


def vllm_spec(model: Path, folder: Path) -> ServerSpec | None:
    """`vllm serve` as it comes, with CUDA graphs and prefix caching; None where it is not installed."""
    program = shutil.which("vllm")
    if program is None:
        return None
    port = free_port()
    return ServerSpec(
        name="vllm",
        argv=(
            *(program, "serve", str(model), "--served-model-name", SERVED_NAME, "--host", "127.0.0.1"),
            *("--port", str(port), "--dtype", "bfloat16", "--max-model-len", str(MAX_MODEL_LEN)),
            *("--kv-cache-memory-bytes", str(KV_CACHE_GIB << 30), "--enable-prompt-tokens-details"),
        ),
        port=port,
        ready_path="/health",
        model=SERVED_NAME,
        start_timeout_s=240,
        environment={"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CACHE_ROOT": str(folder / "vllm")},
        settings=f"vllm serve, bfloat16, KV cache {KV_CACHE_GIB} GiB",
        version=_vllm_version(),
    )


def words_of(model: Path) -> Sequence[str]:
    """Words that are one token each, of a folder's tokenizer.json.

    Raises:
        PeerError: there is none, it has no vocabulary, or too few such words.
    """
    path = model / "tokenizer.json"
    try:
        vocabulary = json.loads(path.read_text(encoding="utf-8"))["model"]["vocab"]
        tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise PeerError(f"{path} has no vocabulary ({type(exc).__name__}); give a Hugging Face folder") from exc
    try:
        return single_token_words(tokens)
    except ValueError as exc:
        raise PeerError(f"{path}: {exc}; give another model") from exc


def figures_of(spec: ServerSpec, words: Sequence[str], seed: int, log_folder: Path) -> Mapping[str, float]:
    """Tokens a second, one request alone and sixteen at once, and the latter's p99 times.

    Raises:
        ServerError: it did not start, or ended.
        MeasureError: it answered otherwise than asked.
    """
    found: dict[str, float] = {}
    with Server(spec, log_folder / f"gpu-{spec.name}.log") as server:
        measure.wait_until_serving(server, SERVING_TIMEOUT_S)
        for case in CASES:
            rounds = measure.run_case(server, case, words, seed, FULL, REPEATS, lambda _: None, warms=True)
            figures = report.figures(rounds)
            if case == "single":
                found["single_tok_s"] = figures["output_tok_s"]
            else:
                found |= {name: figures[name] for name in ("output_tok_s", "ttft_p99_ms", "itl_p99_ms")}
    return found


def _vllm_version() -> str:
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return f"of {os.fspath(shutil.which('vllm') or '')}"
