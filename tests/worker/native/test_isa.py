"""The choice of the instruction set."""

from __future__ import annotations

from pathlib import Path

import pytest

from naru_worker.native.isa import VARIANTS, cpu_flags, detect_isa

AVX2 = frozenset("sse4_2 avx avx2 fma f16c bmi2".split())
AVX512 = AVX2 | frozenset("avx512f avx512bw avx512vl avx512dq avx512_vnni".split())
AVX512_BF16 = AVX512 | {"avx512_bf16"}
AMX = AVX512_BF16 | frozenset("amx_tile amx_bf16 amx_int8".split())


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (frozenset(), "plain"),
        (frozenset({"avx"}), "plain"),
        (AVX2 - {"f16c"}, "plain"),
        (AVX2, "avx2"),
        (AVX512 - {"avx512_vnni"}, "avx2"),
        (AVX512, "avx512"),
        (AVX512_BF16, "avx512_bf16"),
        (AMX - {"amx_int8"}, "avx512_bf16"),
        (AMX - {"avx512_bf16"}, "avx512"),
        (AMX, "amx"),
    ],
)
def test_the_best_variant_whose_every_flag_is_there_is_taken(flags: frozenset[str], expected: str) -> None:
    assert detect_isa(flags, forced="") == expected


def test_a_forced_variant_wins_over_a_better_one() -> None:
    assert detect_isa(AMX, forced="avx2") == "avx2"


def test_an_unknown_forced_variant_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"NARU_CPU_ISA is 'sse9'; use one of plain, avx2, avx512, avx512_bf16, amx"):
        detect_isa(AMX, forced="sse9")


def test_a_forced_variant_this_machine_lacks_is_an_error_that_names_the_flags() -> None:
    with pytest.raises(ValueError, match=r"'avx512', but this machine lacks avx512_vnni, .*avx512vl"):
        detect_isa(AVX2, forced="avx512")


def test_the_environment_forces_a_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NARU_CPU_ISA", "plain")
    assert detect_isa() == "plain"


def test_flags_come_from_the_first_processor(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nflags\t\t: fpu avx2 fma\nprocessor\t: 1\nflags\t\t: fpu\n")
    assert cpu_flags(file) == {"fpu", "avx2", "fma"}


def test_without_cpuinfo_the_plain_variant_is_taken(tmp_path: Path) -> None:
    assert cpu_flags(tmp_path / "absent") == frozenset()
    assert detect_isa(cpu_flags(tmp_path / "absent"), forced="") == "plain"


def test_no_variant_is_tied_to_the_machine_it_was_built_on() -> None:
    assert all("-march=native" not in flags for flags in VARIANTS.values())
