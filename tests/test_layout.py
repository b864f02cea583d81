"""Guards over the tree: names, sizes, layers, links. Each says what to do when it fails."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE_FOLDERS = ("proto", "operator", "router", "worker", "tests", "bench", "e2e")
SOURCE_ROOTS = {name: ROOT / name / "src" / f"naru_{name}" for name in ("proto", "operator", "router", "worker")}

MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 80

GENERATED = re.compile(r"_pb2(_grpc)?\.pyi?$")
TEXT_SUFFIXES = (".py", ".md", ".toml", ".yaml", ".yml", ".cc", ".h", ".proto", ".txt", ".svg", ".json", ".sh", "")


def code_files() -> list[Path]:
    return sorted(
        path
        for folder in CODE_FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if not GENERATED.search(path.name) and ".cache" not in path.parts
    )


def project_files() -> list[Path]:
    """Files git tracks or would track; all but the ignored ones where git is not at hand."""
    listing = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        names = subprocess.run(listing, check=True, capture_output=True, text=True).stdout.split("\0")
        paths = [ROOT / name for name in names if name]
    except (OSError, subprocess.CalledProcessError):
        skipped = {"__pycache__", "node_modules"}
        paths = [
            path
            for path in ROOT.rglob("*")
            if not any(part.startswith(".") or part in skipped for part in path.relative_to(ROOT).parts)
        ]
    return sorted(path for path in paths if path.is_file())


def project_texts() -> Iterator[tuple[Path, str]]:
    for path in project_files():
        if path.suffix in TEXT_SUFFIXES:
            try:
                yield path.relative_to(ROOT), path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def test_no_folder_called_operator_is_a_package() -> None:
    """It would shadow the standard library's `operator`: `import collections` itself would fail."""
    assert [path for path in ROOT.rglob("operator/__init__.py") if "site-packages" not in path.parts] == []


def test_tests_are_no_packages() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_no_module_is_longer_than_the_limit() -> None:
    long = {
        str(path.relative_to(ROOT)): lines for path in code_files() if (lines := count_lines(path)) > MAX_MODULE_LINES
    }
    assert long == {}, "split these by noun"


def count_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_no_function_is_longer_than_the_limit() -> None:
    long = {
        f"{path.relative_to(ROOT)}:{node.name}": length
        for path in code_files()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert long == {}, "cut these into named steps"


def imported_modules(path: Path) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules.add(node.module)
    return modules


def test_nothing_imports_pickle() -> None:
    """Pickles execute code when read; models come as safetensors and GGUF."""
    banned = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
    users = {
        str(path.relative_to(ROOT)): sorted(found)
        for folder in SOURCE_ROOTS.values()
        for path in folder.rglob("*.py")
        if (found := {module.partition(".")[0] for module in imported_modules(path)} & banned)
    }
    assert users == {}


def test_modules_say_what_they_are() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for folder in SOURCE_ROOTS.values()
        for path in folder.rglob("*.py")
        if not GENERATED.search(path.name) and ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) is None
    ]
    assert silent == []


def test_no_module_has_a_name_that_says_nothing() -> None:
    nameless = {"utils", "util", "helpers", "helper", "common", "misc"}
    assert [path for folder in SOURCE_ROOTS.values() for path in folder.rglob("*.py") if path.stem in nameless] == []


def test_layers_are_kept() -> None:
    """Operator, router and worker never import one another; cores stay pure. The contracts stand in pyproject.toml."""
    pytest.importorskip("importlinter")
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")


def anchors(text: str) -> set[str]:
    """Anchors GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ +(.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_pages_resolve() -> None:
    broken = []
    for path, text in project_texts():
        if path.suffix != ".md":
            continue
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        for match in LINK.finditer(prose):
            target, _, anchor = (match[1] or match[2]).partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            page = (ROOT / path.parent / target) if target else ROOT / path
            if not page.exists() or (anchor and anchor not in anchors(page.read_text(encoding="utf-8"))):
                broken.append(f"{path}: {match[0]}")
    assert broken == []


def test_paths_named_in_docs_are_there() -> None:
    """A page that names a file or folder of the tree in backquotes names one that exists."""
    named = re.compile(
        r"`((?:proto|operator|router|worker|tests|bench|e2e|docs|designs|crds|examples|charts)/[\w./-]*)`"
    )
    missing = [
        f"{path}: {name}"
        for path, text in project_texts()
        if path.suffix == ".md" and path.parts[0] != "designs"
        for name in named.findall(text)
        if not (ROOT / name).exists() and "/.cache/" not in name
    ]
    assert missing == []


MACHINE_MARKS = {
    "a path of some machine": re.compile(r"(?<![\w.])/(?:work|root|home/\w+|tmp/v0|tmp/dl)/[\w.]"),
    "a package index or mirror": re.compile(r"--(?:extra-)?index-url[ =]\S|--find-links[ =]\S|--trusted-host"),
}


def test_no_file_knows_the_machine_it_was_written_on() -> None:
    found = [
        f"{path}: {what}: {match[0]!r}"
        for path, text in project_texts()
        if path != Path("tests/test_layout.py")
        for what, mark in MACHINE_MARKS.items()
        for match in mark.finditer(text)
    ]
    assert found == []
