"""Reads `WorkerSettings` from flags and environment. Both are derived from the dataclass fields; help is their text.

Called by `__main__` alone. Knows no setting by name.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from naru_worker import settings as settings_module
from naru_worker.settings import SettingsError, WorkerSettings

_TRUE = frozenset(("1", "true", "yes", "on"))
_FALSE = frozenset(("0", "false", "no", "off"))


@dataclasses.dataclass(frozen=True, slots=True)
class Knob:
    """One setting with its names outside."""

    group: str
    """Field of WorkerSettings it lies in."""
    field: str
    kind: Any
    default: Any

    @property
    def flag(self) -> str:
        """As typed on the command line."""
        return "--" + self.field.replace("_", "-")

    @property
    def variable(self) -> str:
        """As set in the environment."""
        return "NARU_WORKER_" + self.field.removeprefix("worker_").upper()


def knobs() -> Iterator[Knob]:
    """All settings, in the order of the dataclasses."""
    for group_field in dataclasses.fields(WorkerSettings):
        group: Any = type(group_field.default)
        kinds = typing.get_type_hints(group)
        for field in dataclasses.fields(group):
            yield Knob(group_field.name, field.name, kinds[field.name], field.default)


def read_settings(argv: Sequence[str], environ: Mapping[str, str]) -> WorkerSettings:
    """The settings of this start.

    Raises:
        SettingsError: a value cannot be used; names the flag or variable, and the value.
        SystemExit: ``--help`` was asked for (0), or an unknown flag was given (2).
    """
    all_knobs = list(knobs())
    given = vars(_parser(all_knobs, with_help=any(a in ("-h", "--help") for a in argv)).parse_args(argv))
    groups: dict[str, dict[str, Any]] = {}
    for knob in all_knobs:
        flag_value = given[knob.field]
        if flag_value is not None:
            value = _convert(knob.flag, knob.kind, flag_value)
        elif knob.variable in environ:
            value = _convert(knob.variable, knob.kind, _split(knob.kind, environ[knob.variable]))
        else:
            continue
        groups.setdefault(knob.group, {})[knob.field] = value
    defaults: Any = WorkerSettings()
    built: dict[str, Any] = {
        name: dataclasses.replace(getattr(defaults, name), **values) for name, values in groups.items()
    }
    return dataclasses.replace(WorkerSettings(), **built)


def field_docs() -> dict[str, str]:
    """Field name → the docstring below it, of all settings."""
    docs: dict[str, str] = {}
    for node in ast.parse(inspect.getsource(settings_module)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, doc in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(doc, ast.Expr)
                and isinstance(doc.value, ast.Constant)
            ):
                docs[field.target.id] = " ".join(str(doc.value.value).split())
    return docs


def _parser(all_knobs: list[Knob], *, with_help: bool) -> argparse.ArgumentParser:
    """Texts are read from the source only when somebody wants to see them: it costs a third of the start."""
    docs = field_docs() if with_help else {}
    parser = argparse.ArgumentParser(
        prog="naru-worker",
        description="Serves language models over gRPC: one process, one paged-attention engine, many models.",
        allow_abbrev=False,
    )
    for knob in all_knobs:
        note = f"{docs.get(knob.field, '')} [{knob.variable}; default: {knob.default!r}]".replace("%", "%%")
        if knob.kind is bool:
            parser.add_argument(knob.flag, dest=knob.field, nargs="?", const="true", metavar="true|false", help=note)
        elif _is_list(knob.kind):
            parser.add_argument(knob.flag, dest=knob.field, action="append", metavar="VALUE", help=note)
        else:
            parser.add_argument(knob.flag, dest=knob.field, metavar="VALUE", help=note)
    return parser


def _is_list(kind: Any) -> bool:
    return typing.get_origin(kind) is tuple


def _split(kind: Any, text: str) -> Any:
    """A list is written with commas in the environment, as a repeated flag on the command line."""
    return [part for part in text.split(",") if part] if _is_list(kind) else text


def _convert(name: str, kind: Any, text: Any) -> Any:
    if _is_list(kind):
        return tuple(text)
    try:
        if kind is bool:
            lowered = text.lower()
            if lowered not in _TRUE | _FALSE:
                raise ValueError("not a truth value")
            return lowered in _TRUE
        if kind in (int, float):
            return kind(text)
    except ValueError as exc:
        words = {bool: "true or false", int: "a whole number", float: "a number"}
        raise SettingsError(f"{name} is {text!r}; it must be {words[kind]}") from exc
    if typing.get_origin(kind) is Literal and text not in typing.get_args(kind):
        raise SettingsError(f"{name} is {text!r}; it must be one of {', '.join(typing.get_args(kind))}")
    return text
