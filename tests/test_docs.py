"""Docs keep pace with the code: every setting, metric and environment variable is on its page, with its default."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from naru_proto.errors import BY_CODE

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SOURCES = [path for part in ("proto", "operator", "router", "worker") for path in (ROOT / part / "src").rglob("*.py")]


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def test_settings_tables_are_fresh() -> None:
    pytest.importorskip("naru_router.settings")
    spec = importlib.util.spec_from_file_location("print_settings", DOCS / "print_settings.py")
    assert spec is not None and spec.loader is not None
    printer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(printer)
    current = page("configuration.md")
    assert "NARU_ROUTER_HTTP_PORT" in current
    assert "NARU_WORKER_ID" in current
    assert printer.printed(current) == current, "run `make gen`"
    stale = current.replace("`NARU_WORKER_ID`", "`NARU_WORKER_NAME`")
    assert printer.printed(stale) == current


def test_every_environment_variable_is_listed() -> None:
    used = {name for path in SOURCES for name in re.findall(r'"(NARU_[A-Z]+(?:_[A-Z]+)*)"', path.read_text("utf-8"))}
    assert "NARU_HOME" in used
    assert {name for name in used if f"`{name}`" not in page("configuration.md")} == set()


def test_every_flag_of_naru_up_is_listed() -> None:
    cli = pytest.importorskip("naru_operator.cli.main")
    flags = {option for parameter in cli.up.params for option in parameter.opts if option.startswith("--")}
    assert {flag for flag in flags if flag not in page("configuration.md") + page("troubleshooting.md")} == set()


def test_every_command_is_listed() -> None:
    cli = pytest.importorskip("naru_operator.cli.main")
    assert {name for name in cli.cli.commands if f"`naru {name}" not in page("getting-started.md")} == set()


def test_every_metric_is_listed_and_none_that_is_gone() -> None:
    """Names stand in the metrics modules as strings, before a help text that begins with a capital."""
    sources = [path.read_text("utf-8") for path in SOURCES if path.name == "metrics.py"]
    found = {name for source in sources for name in re.findall(r'"([a-z0-9_]+)",\s*"[A-Z1]', source)}
    names = {"naru_" + name.removeprefix("naru_") for name in found}
    rows = re.findall(r"^\| `(naru_\w+)` \|", page("metrics.md"), re.MULTILINE)
    assert len(rows) > 20
    assert {name.removesuffix("_total") for name in rows} == names


def test_every_error_code_of_the_api_is_listed() -> None:
    codes = {code for code in BY_CODE if code != "invalid_request_error"}
    assert {code for code in codes if f"`{code}`" not in page("api.md")} == set()


def test_every_http_endpoint_is_listed() -> None:
    source = (ROOT / "router/src/naru_router/adapters/http/application.py").read_text(encoding="utf-8")
    paths = {
        path.replace(":path}", "}").replace("{model_id}", "{id}") for path in re.findall(r'Route\("([^"]+)"', source)
    }
    assert "/healthz" in paths
    assert {path for path in paths if f" {path}`" not in page("api.md")} == set()


def test_every_tensor_format_and_architecture_is_listed() -> None:
    protocol = (ROOT / "worker/src/naru_worker/adapters/ops/protocol.py").read_text(encoding="utf-8")
    match = re.search(r"^FileFormat = Literal\[(.+)\]$", protocol, re.MULTILINE)
    assert match is not None
    formats = [name.strip('" ').upper() for name in match[1].split(",")]
    assert [name for name in formats if name not in page("models.md")] == []
