"""Compiles the kernels ahead of time, without a GPU, and checks what they cost. Also warms Triton's cache in an image.

``python -m naru_worker.adapters.ops.cuda.compiling [--arch 90] [--kernel attention] [--jobs 2] [--one-each]
[--check FILE | --write-snapshot FILE]``: a line for every case, then what is wrong. Ends with 1 if something is.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from naru_worker.adapters.ops.cuda import judging
from naru_worker.adapters.ops.cuda.figures import KernelFigures, cases_of, compile_case, kernel_modules
from naru_worker.adapters.ops.cuda.interpreter import is_interpreted
from naru_worker.adapters.ops.cuda.judging import Snapshot
from naru_worker.adapters.ops.cuda.kernels.compile_case import ARCHITECTURES, CompileCase

_HEAD = f"{'kernel':64} {'arch':>5} {'regs':>4} {'threads':>7} {'shared':>7} {'spills':>6} {'cubin':>7} {'s':>6}"


@dataclass(frozen=True, slots=True)
class _Job:
    """Names a case, for another process: kernels themselves cannot be sent."""

    module: str
    arch: int
    name: str


@dataclass(frozen=True, slots=True)
class _Outcome:
    job: _Job
    figures: KernelFigures | None
    """None: it could not be compiled."""
    faults: tuple[str, ...]


def main(arguments: Sequence[str]) -> int:
    """Compiles, prints, compares; the process's exit code."""
    options = _parser().parse_args(arguments)
    if is_interpreted():
        print(
            "TRITON_INTERPRET is set, so kernels run in Python and nothing can be compiled: unset it", file=sys.stderr
        )
        return 2
    jobs = list(_jobs(options.arch or ARCHITECTURES, options.kernel or [""], options.one_each))
    if not jobs:
        print(f"no kernel's name has {' or '.join(options.kernel)} in it", file=sys.stderr)
        return 2
    whole = not (options.arch or options.kernel or options.one_each)
    started = time.perf_counter()
    print(_HEAD, flush=True)
    outcomes = []
    for count, outcome in enumerate(_compiled(jobs, options.jobs), start=1):
        outcomes.append(outcome)
        print(f"{_row(outcome)}  {count}/{len(jobs)}", flush=True)
    faults = [f"{_key(outcome.job)} {fault}" for outcome in outcomes for fault in outcome.faults]
    figures = [outcome.figures for outcome in outcomes if outcome.figures is not None]
    if options.check:
        faults += _against_snapshot(options.check, figures, {_key(job) for job in jobs}, whole)
    if options.write_snapshot and not faults:
        faults += _write(options.write_snapshot, figures, whole)
    print(f"{len(jobs)} kernels in {time.perf_counter() - started:.0f} s, {len(faults)} faults")
    for fault in faults:
        print(f"FAULT {fault}", file=sys.stderr)
    return 1 if faults else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="compiling", description="Compiles the CUDA kernels without a GPU.")
    parser.add_argument("--arch", type=int, nargs="+", choices=ARCHITECTURES, help="only these (default: all)")
    parser.add_argument("--kernel", nargs="+", help="only cases with one of these words in their names")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument(
        "--one-each",
        action="store_true",
        help="of each kernel the first case for the newest GPU, and for others where instructions are promised",
    )
    act = parser.add_mutually_exclusive_group()
    act.add_argument("--check", type=Path, metavar="FILE", help="compares with the snapshot")
    act.add_argument("--write-snapshot", type=Path, metavar="FILE", help="writes it; of all kernels, or adds these")
    return parser


def _jobs(architectures: Sequence[int], words: Sequence[str], one_each: bool) -> Iterator[_Job]:
    seen: set[str] = set()
    newest = max(architectures)
    for module in kernel_modules():
        for arch in architectures:
            kernels: set[int] = set()
            for case in cases_of(module, arch):
                job = _Job(module, arch, case.name)
                if _key(job) in seen:
                    raise ValueError(f"{module} has two cases {case.name} for sm_{arch}; names are unique")
                seen.add(_key(job))
                # Without tensor cores the code is nearly the same for all.
                is_left_out = one_each and (id(case.kernel) in kernels or not (arch == newest or case.expects))
                if not is_left_out and any(word in case.name for word in words):
                    kernels.add(id(case.kernel))
                    yield job


def _compiled(jobs: Sequence[_Job], processes: int) -> Iterator[_Outcome]:
    """What came of each, as they are done."""
    if processes <= 1:
        yield from map(_outcome, jobs)
        return
    # Forked, for importing torch takes longer than compiling many a kernel. Nothing was computed: there are no threads.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
        for future in as_completed([pool.submit(_outcome, job) for job in jobs]):
            yield future.result()


def _outcome(job: _Job) -> _Outcome:
    case = _case(job)
    try:
        figures = compile_case(case)
    except Exception as error:  # whatever the compiler's stages raise: the other kernels are checked all the same
        return _Outcome(job, None, (f"cannot be compiled: {type(error).__name__}: {error}",))
    return _Outcome(job, figures, tuple(judging.own_faults(case, figures)))


def _case(job: _Job) -> CompileCase:
    return next(case for case in cases_of(job.module, job.arch) if case.name == job.name)


def _key(job: _Job) -> str:
    return f"{job.name}@{job.arch}"


def _row(outcome: _Outcome) -> str:
    figures = outcome.figures
    name = f"{outcome.job.name:64} {outcome.job.arch:5}"
    if figures is None:
        return f"{name} cannot be compiled"
    return (
        f"{name} {figures.registers:4} {figures.threads:7} {figures.shared_bytes:7} {figures.spill_bytes:6} "
        f"{figures.cubin_bytes:7} {figures.seconds:6.2f}{' FAULT' if outcome.faults else ''}"
    )


def _against_snapshot(path: Path, figures: Sequence[KernelFigures], asked: set[str], whole: bool) -> list[str]:
    snapshot = judging.read_snapshot(path)
    faults = []
    if whole:
        faults += [f"{key} is in {path}, but no kernel is; --write-snapshot" for key in judging.gone(asked, snapshot)]
    if snapshot.triton != _triton_version():
        print(f"{path} was written with Triton {snapshot.triton}, this is {_triton_version()}: figures not compared")
        return faults
    return faults + [f"{each.key} {fault}" for each in figures for fault in judging.growth(each, snapshot)]


def _write(path: Path, figures: Sequence[KernelFigures], whole: bool) -> list[str]:
    version = _triton_version()
    before = Snapshot(version) if whole else judging.read_snapshot(path)
    if before.kernels and before.triton != version:
        return [f"{path} was written with Triton {before.triton}, this is {version}: write it whole, without filters"]
    judging.write_snapshot(
        path, Snapshot(version, {**before.kernels, **{each.key: judging.entry(each) for each in figures}})
    )
    return []


def _triton_version() -> str:
    import triton

    return str(triton.__version__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
