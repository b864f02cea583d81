"""Kernels compiled ahead of time for GPUs that aren't here, and the judgement of what they cost."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.torch
pytest.importorskip("torch")
pytest.importorskip("triton")

from naru_worker.adapters.ops.cuda import compiling, judging  # noqa: E402
from naru_worker.adapters.ops.cuda.figures import (  # noqa: E402
    KernelFigures,
    cases_of,
    compile_case,
    kernel_modules,
    opcodes,
    resource_usage,
)
from naru_worker.adapters.ops.cuda.judging import Snapshot  # noqa: E402
from naru_worker.adapters.ops.cuda.kernels.compile_case import ARCHITECTURES, CompileCase, tuned_arch  # noqa: E402

SNAPSHOT = Path(__file__).parent / "kernels.json"

FIGURES = KernelFigures(
    name="gemm/f16",
    arch=90,
    threads=256,
    registers=200,
    shared_bytes=100_000,
    spill_bytes=0,
    cubin_bytes=9000,
    instructions=frozenset({"HGMMA.64x128x16.F32", "LDGSTS.E.BYPASS.128"}),
    seconds=1.0,
)
CASE = CompileCase(
    name="gemm/f16",
    kernel=SimpleNamespace(arg_names=["out", "n", "BLOCK"]),
    arch=90,
    signature={"out": "*fp16", "n": "i32", "BLOCK": "constexpr"},
    constexprs={"BLOCK": 64},
    num_warps=8,
    num_stages=3,
    expects=("HGMMA",),
)


def run_module(*arguments: str) -> subprocess.CompletedProcess[str]:
    # A process of its own: in this one kernels run under the interpreter, and cannot be compiled.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "naru_worker.adapters.ops.cuda.compiling", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.timeout(600)
def test_every_kernel_compiles_and_costs_what_it_did() -> None:
    done = run_module("--one-each", "--arch", "80", "90", "--jobs", "2", "--check", str(SNAPSHOT))
    assert done.returncode == 0, done.stdout + done.stderr
    compiled = [line.split()[:2] for line in done.stdout.splitlines()]
    for module in kernel_modules():
        for arch in (80, 90):
            first = next(iter(cases_of(module, arch)), None)
            if first is not None and (arch == 90 or first.expects):
                assert [first.name, str(arch)] in compiled


def test_the_snapshot_has_no_cases_that_are_gone() -> None:
    """That none is missing is for the check of all of them to say, which compiles them."""
    cases = {
        f"{case.name}@{arch}" for arch in ARCHITECTURES for name in kernel_modules() for case in cases_of(name, arch)
    }
    assert not set(judging.read_snapshot(SNAPSHOT).kernels) - cases


def test_nothing_is_compiled_under_the_interpreter(capsys: pytest.CaptureFixture[str]) -> None:
    assert compiling.main([]) == 2
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err


def test_a_word_that_no_kernel_has_in_its_name_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    assert compiling.main(["--kernel", "warp_drive"]) == 2
    assert capsys.readouterr().err == "no kernel's name has warp_drive in it\n"


def test_a_kernel_within_all_limits_has_no_fault() -> None:
    assert list(judging.own_faults(CASE, FIGURES)) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"spill_bytes": 8}, "spills 8 bytes a thread; 0 are allowed"),
        ({"instructions": frozenset({"HMMA.16816.F32"})}, "has no HGMMA, which it promises"),
        ({"instructions": frozenset({"HGMMAX"})}, "has no HGMMA, which it promises"),
        ({"shared_bytes": 232_449}, "takes 232449 bytes of shared memory; sm_90 has 232448"),
        ({"arch": 89, "shared_bytes": 101_377}, "takes 101377 bytes of shared memory; sm_89 has 101376"),
        ({"arch": 80, "shared_bytes": 166_913}, "takes 166913 bytes of shared memory; sm_80 has 166912"),
        (
            {"registers": 129, "threads": 512},
            "takes 69632 registers (129 a thread, 512 threads); a multiprocessor has 65536",
        ),
    ],
)
def test_a_fault_names_the_value_and_the_limit(change: dict[str, Any], fault: str) -> None:
    assert list(judging.own_faults(CASE, replace(FIGURES, **change))) == [fault]


def test_spills_that_a_case_allows_and_an_exact_opcode_are_no_faults() -> None:
    case = replace(CASE, max_spill_bytes=16, expects=("LDGSTS.E.BYPASS.128",))
    assert list(judging.own_faults(case, replace(FIGURES, spill_bytes=16))) == []


def test_a_tenth_more_than_the_snapshot_passes_and_what_is_beyond_it_does_not() -> None:
    snapshot = Snapshot("3.9.0", {FIGURES.key: {"registers": 100, "shared_bytes": 100_000, "spill_bytes": 0}})
    assert list(judging.growth(replace(FIGURES, registers=110, shared_bytes=110_000), snapshot)) == []
    grown = replace(FIGURES, registers=111, shared_bytes=110_001, spill_bytes=4)
    assert list(judging.growth(grown, snapshot)) == [
        "registers: 111, in the snapshot 100",
        "shared bytes: 110001, in the snapshot 100000",
        "spill bytes: 4, in the snapshot 0",
    ]


def test_a_kernel_that_the_snapshot_lacks_and_one_that_is_gone_are_told() -> None:
    snapshot = Snapshot("3.9.0", {"old@90": judging.entry(FIGURES)})
    assert list(judging.growth(FIGURES, snapshot)) == ["is not in the snapshot; write it with --write-snapshot"]
    assert judging.gone([FIGURES.key], snapshot) == ["old@90"]


def test_a_snapshot_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "kernels.json"
    assert judging.read_snapshot(path) == Snapshot()
    snapshot = Snapshot("3.9.0", {FIGURES.key: judging.entry(FIGURES), "a@80": judging.entry(FIGURES)})
    judging.write_snapshot(path, snapshot)
    assert judging.read_snapshot(path) == snapshot
    assert len(path.read_text().splitlines()) == 7


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"triton": "3.9.0"}'])
def test_a_file_that_is_no_snapshot_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "kernels.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"kernels\.json is no snapshot of kernels"):
        judging.read_snapshot(path)


def test_what_cuobjdump_prints_is_read() -> None:
    usage = " Function f:\n  REG:168 STACK:24 SHARED:1024 LOCAL:8 CONSTANT[0]:568 TEXTURE:0\n"
    assert resource_usage(usage) == (168, 32, 1024)
    with pytest.raises(ValueError, match="printed no registers: 'nothing'"):
        resource_usage("nothing")
    code = (
        "        /*0000*/                   LDC R1, c[0x0][0x28] ;   /* 0x00000a00ff017b82 */\n"
        "                                                            /* 0x000ff00000000800 */\n"
        "        /*0230*/              @!P2 LDG.E.128 R4, desc[UR4][R20.64+0x800] ;\n"
        "        /*0240*/              @!UPT UIADD3 URZ, URZ, URZ, URZ ;\n"
        "        /*0250*/                   HGMMA.64x64x16.F32 R24, gdesc[UR4], !UPT ;\n"
    )
    assert opcodes(code) == {"LDC", "LDG.E.128", "UIADD3", "HGMMA.64x64x16.F32"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"signature": {"out": "*fp16", "BLOCK": "constexpr"}}, "the signature has .*'out', 'BLOCK'.*, the kernel"),
        ({"constexprs": {"BLOCKS": 64}}, "the kernel has no parameter BLOCKS"),
        ({"aligned": ("in",)}, "the kernel has no parameter in"),
    ],
)
def test_a_case_that_does_not_fit_its_kernel_is_an_error(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^gemm/f16: {message}"):
        compile_case(replace(CASE, **change))


def test_a_gpu_runs_with_the_tiles_of_the_next_lower_architecture_that_fits_and_none_below_the_lowest() -> None:
    given = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
    assert [tuned_arch(each) for each in given] == [80, 80, 89, 90, 90, 89]
    with pytest.raises(ValueError, match=r"a GPU of compute capability 7\.5 is too old; 8\.0"):
        tuned_arch((7, 5))


BORROWERS = """
import dataclasses
from naru_worker.adapters.ops.cuda import judging
from naru_worker.adapters.ops.cuda.figures import cases_of, compile_case
from naru_worker.adapters.ops.cuda.kernels.compile_case import tuned_arch

kernels = {
    "attention_decode": "attention_decode/bf16/kv-int8/d128/rows-4-of-8",
    "attention_prefill": "attention_prefill/bf16/kv-bf16/d256",
    "gemm_groups": "gemm_groups_prompt/bf16/w4-g32-z8/m128",
    "grouped_gemm": "grouped_gemm/bf16/dense/prompt",
}
for major, minor, limit in ((8, 6, 99), (10, 0, 227), (12, 0, 99)):
    for module, name in kernels.items():
        [case] = [case for case in cases_of(module, tuned_arch((major, minor))) if case.name == name]
        figures = compile_case(dataclasses.replace(case, arch=10 * major + minor, expects=()))
        assert figures.shared_bytes <= limit * 1024, (major, minor, name, figures.shared_bytes)
        assert figures.registers * figures.threads <= judging.REGISTERS, (major, minor, name, figures.registers)
"""


@pytest.mark.gpu_offline
@pytest.mark.timeout(1800)
def test_gpus_that_borrow_tiles_have_the_memory_and_registers_for_the_largest_kernels() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", BORROWERS], env=environment, check=True)
