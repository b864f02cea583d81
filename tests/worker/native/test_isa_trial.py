"""An instruction set that is not what the CPU's flags promise."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from naru_proto.errors import LoadError
from naru_worker.adapters.ops import native_lib
from naru_worker.adapters.ops.isa_trial import trial_failure
from naru_worker.native.build import ensure_library, find_compiler


@pytest.fixture(autouse=True)
def _own_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("NARU_HOME", str(tmp_path / "home"))
    for cached in (native_lib._failure_of, native_lib._warn_once):
        cached.cache_clear()
    yield
    native_lib._failure_of.cache_clear()
    native_lib._warn_once.cache_clear()


def library_that(does: str, folder: Path) -> Path:
    """A library whose self-test does this."""
    source = folder / "trial.c"
    source.write_text(f"int naru_tiles(void) {{ return 1; }}\nint naru_self_test(void) {{ {does} }}\n")
    library = folder / "libtrial.so"
    subprocess.run([find_compiler(), "-shared", "-fPIC", "-x", "c", str(source), "-o", str(library)], check=True)
    return library


def test_every_variant_of_this_machine_passes_its_own_test(variant: str) -> None:
    assert trial_failure(ensure_library(variant)) == ""


@pytest.mark.parametrize(
    ("does", "failure"),
    [
        ("__builtin_trap();", "its self-test was ended by SIGILL"),
        ("return 5;", "its self-test computed wrong numbers (code 5)"),
    ],
)
def test_what_fails_is_told_and_tried_again_the_next_time(tmp_path: Path, does: str, failure: str) -> None:
    library = library_that(does, tmp_path)
    assert trial_failure(library) == failure
    library_that("return 0;", tmp_path)
    assert trial_failure(library) == ""


def test_what_passed_is_not_tried_again_on_the_same_cpu_but_on_another_and_after_new_microcode(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model\t: 1\nmicrocode\t: 0x1\ncpu MHz\t: 1000\n\nmodel\t: 9\n")
    library = library_that("return 0;", tmp_path)
    assert trial_failure(library, cpuinfo) == ""
    library_that("return 5;", tmp_path)
    cpuinfo.write_text("model\t: 1\nmicrocode\t: 0x1\ncpu MHz\t: 2000\n")
    assert trial_failure(library, cpuinfo) == ""
    for text in ("model\t: 2\nmicrocode\t: 0x1\n", "model\t: 1\nmicrocode\t: 0x2\n"):
        cpuinfo.write_text(text)
        assert trial_failure(library, cpuinfo) != ""


def test_where_no_note_can_be_written_the_test_still_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NARU_HOME", str(tmp_path / "file"))
    library = library_that("return 0;", tmp_path)
    assert trial_failure(library) == ""
    library_that("return 1;", tmp_path)
    assert trial_failure(library) != ""


@pytest.fixture
def lying(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """A machine that promises amx; the variants in the set fail their test."""
    failing: set[str] = set()
    monkeypatch.setattr(native_lib, "detect_isa", lambda: "amx")
    monkeypatch.setattr(native_lib, "ensure_library", Path)
    monkeypatch.setattr(
        native_lib, "trial_failure", lambda path: "it computes nonsense" if path.name in failing else ""
    )
    monkeypatch.setattr(native_lib, "load_variant", lambda isa: SimpleNamespace(naru_tiles=lambda: 1))
    return failing


def test_the_next_lower_variant_that_passes_is_taken_with_one_warning_each(
    lying: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    lying |= {"amx", "avx512_bf16"}
    assert [native_lib.best_isa() for _ in range(2)] == ["avx512", "avx512"]
    assert [record.getMessage().split()[4] for record in caplog.records] == ["amx", "avx512_bf16"]
    assert "amx are not used: it computes nonsense; a slower variant takes their place" in caplog.text


def test_a_forced_variant_that_fails_is_an_error(lying: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lying.add("amx")
    monkeypatch.setenv("NARU_CPU_ISA", "amx")
    with pytest.raises(LoadError, match=r"NARU_CPU_ISA is 'amx', but it computes nonsense; unset it"):
        native_lib.best_isa()


def test_where_nothing_passes_the_backend_says_so(lying: set[str]) -> None:
    lying |= {"amx", "avx512_bf16", "avx512", "avx2", "plain"}
    with pytest.raises(LoadError, match="no variant of the CPU kernels passes"):
        native_lib.best_isa()


def test_where_the_system_refuses_tiles_the_next_variant_is_taken(
    lying: set[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native_lib, "load_variant", lambda isa: SimpleNamespace(naru_tiles=lambda: int(isa != "amx")))
    assert native_lib.best_isa() == "avx512_bf16"
    assert "the system does not grant tiles" in caplog.text
