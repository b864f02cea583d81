"""Measures the `cuda` backend on an NVIDIA GPU: `python -m bench.gpu [--model FOLDER]`, in less than ten minutes.

Every kernel against plain torch, then its time as a part of what this very GPU reaches; steps of a whole model, and
what they take beyond their kernels; with ``--model`` a Hugging Face folder end to end, beside vLLM if it is installed.
Writes a JSON and a Markdown file under bench/results/. The exit code is 1 when a result is wrong or slower than wanted.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.gpu_limits import Limits
    from bench.gpu_place import Place
    from bench.gpu_report import DecodeResult, KernelResult, Run

RESULTS = Path(__file__).resolve().parent / "results"
TIME_S = 540.0
END_TO_END_S = 240.0
"""Kept for it where it is asked for."""
EXIT_NO_GPU = 2


def why_no_gpu() -> str:
    """Why nothing can be measured here; empty where it can."""
    from naru_worker.adapters.ops.cuda.interpreter import is_interpreted

    if is_interpreted():
        return "TRITON_INTERPRET is set, so kernels would run on the CPU: unset it"
    try:
        import torch
    except ImportError:
        return "torch is not installed: pip install 'naru[cuda]'"
    if torch.version.cuda is None:
        return "this torch is built without CUDA: pip install 'naru[cuda]'"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no NVIDIA GPU: see `nvidia-smi` and its driver's version"
    return ""


def main(arguments: Sequence[str], place: Place | None = None) -> int:
    """Measures, writes, prints the page. `place`: None: the GPU."""
    options = _parser().parse_args(arguments)
    reason = why_no_gpu() if place is None else ""
    if reason:
        print(f"bench.gpu measures on a GPU, and {reason}.", file=sys.stderr)
        print("Without one: make test-gpu-offline (are kernels right, do they compile), naru plan --roofline (how fast "
              "could they be).", file=sys.stderr)  # fmt: skip
        return EXIT_NO_GPU
    from bench.gpu_place import gpu_place
    from bench.gpu_report import as_json, as_markdown, misses

    from naru_proto.errors import LoadError

    try:
        run = _measured(options, gpu_place() if place is None else place)
    except LoadError as exc:
        print(f"bench.gpu: {exc.message}", file=sys.stderr)
        return EXIT_NO_GPU
    page = as_markdown(run)
    options.output.mkdir(parents=True, exist_ok=True)
    name = f"gpu-{slug(run.gpu)}"
    (options.output / f"{name}.json").write_text(json.dumps(as_json(run), indent=1) + "\n")
    (options.output / f"{name}.md").write_text(page)
    print(page)
    return 1 if list(misses(run)) else 0


def slug(name: str) -> str:
    """A GPU's name as part of a file's: "NVIDIA H200" is nvidia-h200."""
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


class Deadline:
    """How much of the time is left."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._end = now, now() + seconds

    def is_over(self, keeping_s: float = 0.0) -> bool:
        """Whether no more than `keeping_s` are left."""
        return self.left_s() <= keeping_s

    def left_s(self) -> float:
        """Seconds until it; below 0 behind it."""
        return self._end - self._now()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--model", type=Path, help="a Hugging Face folder to serve, for the end to end part")
    parser.add_argument("--seconds", type=float, default=TIME_S, help="what does not fit is left out, and noted")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the two files")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    return parser


def _measured(options: argparse.Namespace, place: Place) -> Run:
    from bench.gpu_limits import measured_limits
    from bench.gpu_place import release_memory
    from bench.gpu_report import Run

    deadline, notes, failures = Deadline(options.seconds), list[str](), list[str]()
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    setup = place.setup
    _say("what this GPU reaches")
    limits = measured_limits(
        setup.device, place.clock, setup.dtype, copy_bytes=place.copy_bytes, size=place.product_size
    )  # fmt: skip
    kept = END_TO_END_S if options.model else 0.0
    kernels = list(_kernels(place, lambda: deadline.is_over(kept + 60.0), notes, failures))
    decode = list(_decode(place, limits, lambda: deadline.is_over(kept), notes, failures))
    release_memory()
    return Run(
        gpu=place.name,
        versions=_versions(),
        date=time.strftime("%Y-%m-%d"),
        limits=limits,
        kernels=kernels,
        decode=decode,
        end_to_end=_end_to_end(options, deadline, notes, failures),
        notes=notes,
        failures=failures,
    )


def _kernels(
    place: Place, is_late: Callable[[], bool], notes: list[str], failures: list[str]
) -> Iterator[KernelResult]:
    from bench.gpu_attention_cases import cache_cases
    from bench.gpu_cases import elementwise_cases, product_cases
    from bench.gpu_run import results_of
    from bench.gpu_sampler_cases import sampler_cases

    for cases in (cache_cases, elementwise_cases, sampler_cases, product_cases):
        # What cannot even be set up costs its own group.
        with _kept_apart(f"kernels of {cases.__name__}", failures):
            for result in results_of(cases(place.setup), place.clock, is_late):
                _say(f"{result.name}: {result.problem or f'{result.median_s * 1e6:.1f} us, error {result.error:.1e}'}")
                yield result
    if is_late():
        notes.append("kernels that come after the last one in the table: no time was left for them")


def _decode(
    place: Place, limits: Limits, is_late: Callable[[], bool], notes: list[str], failures: list[str]
) -> Iterator[DecodeResult]:
    from bench.gpu_decode import decode_results, options_for, random_model

    from naru_worker.adapters.ops.cuda import backend

    if is_late():
        notes.append("steps of a whole model: no time was left for them")
        return
    _say(f"steps of {place.model.name} with random weights")
    with _kept_apart("steps of a whole model", failures):
        checkpoint, options = random_model(place.model, place.context), options_for(place.batches, place.context)
        with contextlib.closing(backend.load_runner(checkpoint, options)) as runner:
            del checkpoint
            yield from decode_results(runner, place.model, limits, place.batches, place.context, is_late)


def _end_to_end(
    options: argparse.Namespace, deadline: Deadline, notes: list[str], failures: list[str]
) -> dict[str, Mapping[str, float]]:
    if options.model is None:
        notes.append("end to end: give a Hugging Face folder with --model")
        return {}
    from bench.gpu_end_to_end import figures_of, naru_spec, vllm_spec, words_of

    found: dict[str, Mapping[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for make in (naru_spec, vllm_spec):
            name = make.__name__.removesuffix("_spec")
            if deadline.is_over(30.0):
                notes.append(f"end to end, {name}: no time was left for it")
                continue
            with _kept_apart(f"end to end, {name}", failures):
                spec = make(options.model, Path(folder))
                if spec is None:
                    notes.append(f"end to end: {name} is not installed here")
                    continue
                _say(f"end to end: {name}")
                spec = replace(spec, start_timeout_s=min(spec.start_timeout_s, deadline.left_s()))
                found[name] = figures_of(spec, words_of(options.model), options.seed, options.output)
    return found


@contextlib.contextmanager
def _kept_apart(what: str, failures: list[str]) -> Iterator[None]:
    """What fails inside is a result as well: the other parts of a run are worth their while."""
    try:
        yield
    except Exception as exc:
        lines = str(exc).strip().splitlines() or [""]
        failures.append(f"{what}: {type(exc).__name__}: {lines[0]}")
        _say(f"FAILED {failures[-1]}")


def _versions() -> dict[str, str]:
    import torch

    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    with contextlib.suppress(ImportError, RuntimeError):  # no package, no driver
        _, number = importlib.import_module("cuda.bindings.driver").cuDriverGetVersion()
        found["CUDA driver"] = f"{number // 1000}.{number % 1000 // 10}"
    for package in ("triton", "naru", "vllm"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
