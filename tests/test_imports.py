"""What starting a part imports: a process pays only for what it uses."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

REPORT = """
import importlib, json, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def modules_after_importing(*modules: str) -> set[str]:
    """Top-level modules a fresh interpreter holds after these imports."""
    command = [sys.executable, "-W", "error", "-c", REPORT, *modules]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stdout))


def package_modules(part: str) -> list[str]:
    return list(paths_of_modules(part))


def worker_modules_of_the_cpu_path() -> list[str]:
    """All of the worker but what is torch, and the build script of the kernels."""
    return [module for module in package_modules("worker") if not is_torch(module) and ".native." not in module]


def is_torch(module: str) -> bool:
    """Whether it belongs to the reference backend, to that of GPUs, or to copies that are cut over several."""
    parts = module.split(".")
    return "cuda" in parts or "tensor_parallel" in parts or any(part.startswith("ref") for part in parts)


def test_a_cpu_worker_never_imports_what_only_others_need() -> None:
    loaded = modules_after_importing(*worker_modules_of_the_cpu_path())
    assert "naru_worker" in loaded
    assert not loaded & {"torch", "transformers", "pydantic", "starlette", "uvicorn", "kopf", "gguf", "rich"}


def test_wire_words_do_not_pay_for_pydantic() -> None:
    loaded = modules_after_importing("naru_proto.registry", "naru_proto.v1.worker_pb2", "naru_proto.shapes")
    assert "pydantic" not in loaded


def test_a_router_imports_no_engine() -> None:
    modules = package_modules("router")
    loaded = modules_after_importing(*modules)
    assert not loaded & {"torch", "transformers", "numpy", "tokenizers", "kopf", "naru_worker", "naru_operator"}


IMPORT_EACH_FIRST = """
import importlib, sys
package, *modules = sys.argv[1:]
for module in modules:
    for name in [name for name in sys.modules if name.startswith(package) and not name.startswith("naru_proto.v1")]:
        del sys.modules[name]
    importlib.import_module(module)
"""


@pytest.mark.parametrize("part", ["proto", "operator", "router", "worker"])
def test_every_module_can_be_the_first_import(part: str) -> None:
    """A cycle shows only when the module at its far end is imported first; so does a lean on another's import.

    Modules outside all cycles that name what they import are the same wherever they come, so one run does for them.
    """
    modules = {module: path for module, path in paths_of_modules(part).items() if needs_are_here(module)}
    assert modules
    graph = {module: imports_at_once(module, path, modules) for module, path in modules.items()}
    alone = sorted(module for module in modules if leans(modules[module]) or module in reached(module, graph))
    command = [sys.executable, "-W", "error", "-c", IMPORT_EACH_FIRST, f"naru_{part}", *alone]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert modules_after_importing(*modules)


def test_cycles_and_leans_are_seen(tmp_path: Path) -> None:
    texts = {
        "a": "from naru_x.b import B",
        "b": "def f():\n    from naru_x import a",
        "c": "class C:\n    from naru_x import d",
        "d": "if 1:\n    import naru_x.c\nelse:\n    from typing import TYPE_CHECKING",
        "e": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from naru_x.e import E",
    }
    modules = {}
    for name, text in texts.items():
        modules[f"naru_x.{name}"] = tmp_path / f"{name}.py"
        modules[f"naru_x.{name}"].write_text(text, encoding="utf-8")
    graph = {module: imports_at_once(module, path, modules) for module, path in modules.items()}
    assert [module for module in modules if module in reached(module, graph)] == ["naru_x.c", "naru_x.d"]
    assert [module for module, path in modules.items() if leans(path)] == ["naru_x.d"]


def paths_of_modules(part: str) -> dict[str, Path]:
    root = ROOT / part / "src"
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(root.rglob("*.py"))
    }


def statements_at_once(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """What runs when a module is imported: all but bodies of functions and what only type checkers see."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        is_hidden = isinstance(statement, ast.If) and ast.unparse(statement.test).endswith("TYPE_CHECKING")
        for field in ("body", "orelse", "finalbody", "handlers"):
            if field == "body" and is_hidden:
                continue
            inner = getattr(statement, field, [])
            yield from statements_at_once([s for each in inner for s in getattr(each, "body", [])]
                                          if field == "handlers" else inner)  # fmt: skip


def imports_at_once(module: str, path: Path, modules: Mapping[str, Path]) -> set[str]:
    """The part's modules that are imported while this one is; its packages, which come before it, are not counted."""
    found = set()
    for statement in statements_at_once(ast.parse(path.read_text(encoding="utf-8")).body):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            found |= {statement.module, *(f"{statement.module}.{alias.name}" for alias in statement.names)}
    # A package that only holds others is nobody's far end.
    return {name for name in found & set(modules) if name != module and not module.startswith(f"{name}.")}


def leans(path: Path) -> bool:
    """Whether it may use a module that another one has imported: by a dotted name that is no import of its own."""
    statements = statements_at_once(ast.parse(path.read_text(encoding="utf-8")).body)
    return any(
        alias.name.startswith("naru_") and alias.asname is None
        for statement in statements
        if isinstance(statement, ast.Import)
        for alias in statement.names
    )


def reached(module: str, graph: Mapping[str, set[str]]) -> set[str]:
    """Modules that importing this one imports; itself only where there is a cycle."""
    found: set[str] = set()
    waiting = list(graph[module])
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += graph[name]
    return found


def needs_are_here(module: str) -> bool:
    """Whether the extra a module needs is installed."""
    return not is_torch(module) or importlib.util.find_spec("torch") is not None


EXTRAS_OF_PART = {
    "proto": {"", "dev"},  # what prints code runs in a checkout only
    "operator": {"", "cli", "local", "operator"},
    "router": {"", "router"},
    "worker": {"", "worker", "cuda"},
}
IMPORT_NAMES = {
    "cuda": "cuda-bindings",
    "google": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "grpc_tools": "grpcio-tools",
    "pydantic_core": "pydantic",
    "yaml": "pyyaml",
}
"""Where a distribution is not called like what it installs."""


@pytest.mark.parametrize("part", EXTRAS_OF_PART)
def test_a_part_imports_only_what_its_extras_install(part: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = {"": project["dependencies"], **project["optional-dependencies"]}
    declared = {
        re.split(r"[\[<>=~! ]", requirement)[0].lower().replace("_", "-")
        for extra in EXTRAS_OF_PART[part]
        for requirement in requirements[extra]
    }
    missing = {
        f"{module} imports {name}"
        for module, path in module_files(part)
        for name in third_party_imports(path)
        if IMPORT_NAMES.get(name, name).lower().replace("_", "-") not in declared
    }
    assert missing == set(), "add these to the part's extra in pyproject.toml"


def module_files(part: str) -> list[tuple[str, Path]]:
    root = ROOT / part / "src"
    return [(str(path.relative_to(root)), path) for path in root.rglob("*.py") if "_pb2" not in path.name]


def third_party_imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    own = {"naru_proto", "naru_operator", "naru_router", "naru_worker"}
    beside = {sibling.stem for sibling in path.parent.glob("*.py")}  # a script's own neighbours
    return names - own - beside - set(sys.stdlib_module_names)
