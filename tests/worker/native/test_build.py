"""Compiling and finding the native library, with a library of one line."""

from __future__ import annotations

import ctypes
import stat
import threading
from pathlib import Path

import pytest

from naru_worker.native import build
from naru_worker.native.build import BuildError


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package folder with one tiny source, and a home of its own."""
    folder = tmp_path / "package"
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "one.cc").write_text(
        'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n'
    )
    monkeypatch.setattr(build, "PACKAGE_DIR", folder)
    monkeypatch.setattr(build, "SOURCE_DIR", folder / "src")
    monkeypatch.setenv("NARU_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CXX", raising=False)
    return folder


def test_a_missing_library_is_compiled_and_then_found_again(package: Path) -> None:
    built = build.ensure_library("plain")
    assert built.parent == package
    assert ctypes.CDLL(str(built)).answer() == 42
    assert build.find_library("plain") == built


def test_a_found_library_needs_no_compiler(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build.ensure_library("plain")
    monkeypatch.setenv("PATH", "")
    assert build.ensure_library("plain") == built


def test_changed_sources_get_a_new_library_and_the_old_one_goes(package: Path) -> None:
    old = build.ensure_library("plain")
    (package / "src" / "one.cc").write_text(
        'extern "C" __attribute__((visibility("default"))) int answer() { return 7; }\n'
    )
    new = build.ensure_library("plain")
    assert new != old and not old.exists()
    assert ctypes.CDLL(str(new)).answer() == 7


def test_variants_have_names_of_their_own(package: Path) -> None:
    assert build.library_name("plain") != build.library_name("avx2")
    assert build.source_hash("plain") != build.source_hash("avx2"), "flags are part of the hash"


def test_without_a_compiler_the_error_says_what_to_install(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BuildError, match=r"no C\+\+ compiler .* install g\+\+"):
        build.ensure_library("plain")


def test_a_failing_compiler_is_quoted_and_leaves_no_library(package: Path) -> None:
    (package / "src" / "one.cc").write_text("this is no C++\n")
    with pytest.raises(BuildError, match=r"could not compile the CPU kernels: .*error"):
        build.ensure_library("plain")
    assert list(package.glob("*.so")) == []


def test_an_unwritable_package_folder_sends_the_library_to_the_cache(
    package: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # A file in the folder's place: root may write anywhere, so permissions would not do.
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    monkeypatch.setattr(build, "PACKAGE_DIR", blocked)
    built = build.ensure_library("plain")
    assert built.parent == tmp_path / "home" / "native"
    assert stat.S_IMODE(built.parent.stat().st_mode) == 0o700


def test_no_writable_folder_is_an_error_that_names_the_variable(
    package: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    monkeypatch.setattr(build, "PACKAGE_DIR", blocked)
    monkeypatch.setenv("NARU_HOME", str(blocked))
    with pytest.raises(BuildError, match="set NARU_HOME to a writable folder"):
        build.ensure_library("plain")


def test_two_builders_at_once_end_with_one_library(package: Path) -> None:
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(build.ensure_library("plain"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(results)) == 1 and len(list(package.glob("*.so"))) == 1


def test_the_command_line_prints_the_path(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build.main(["plain"])
    assert capsys.readouterr().out.strip() == str(build.find_library("plain"))


def test_the_command_line_ends_with_a_sentence_when_it_cannot(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match="install g"):
        build.main(["plain"])
