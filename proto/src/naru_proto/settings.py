"""Settings from flags and environment variables, derived from one frozen dataclass. Called by router and operator.

A flag is the field's name with dashes, a variable is the part's prefix and the name in capitals; flags win. The
docstring under a field is its help. Fields are of type str, bool, int or float.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any


class SettingsError(Exception):
    """A setting cannot be used; the message names it and its text."""


def read_values(
    settings: type[Any],
    parser: argparse.ArgumentParser,
    prefix: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    is_empty_false: bool,
) -> dict[str, Any]:
    """What is set of a dataclass's fields, by name. ``is_empty_false``: whether an empty text turns a bool off.

    Raises:
        SettingsError: a text is not of the field's type; names the flag or variable.
    """
    docs = field_docs(settings)
    fields = dataclasses.fields(settings)
    for field in fields:
        flag = "--" + field.name.replace("_", "-")
        text = f"{docs[field.name]} [{prefix}{field.name.upper()}; default {field.default}]".replace("%", "%%")
        if field.type == "bool":
            parser.add_argument(flag, help=text, default=None, action=argparse.BooleanOptionalAction)
        else:
            parser.add_argument(flag, help=text, default=None, metavar=str(field.type).upper())
    flags = vars(parser.parse_args(arguments))
    values: dict[str, Any] = {}
    for field in fields:
        variable = prefix + field.name.upper()
        if flags[field.name] is not None:
            source = "--" + field.name.replace("_", "-")
            values[field.name] = _convert(field, flags[field.name], source, is_empty_false)
        elif variable in environment:
            values[field.name] = _convert(field, environment[variable], variable, is_empty_false)
    return values


def field_docs(settings: type[Any]) -> dict[str, str]:
    """The docstring under each field of a dataclass, on one line."""
    tree = ast.parse(inspect.getsource(settings))
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    docs = {}
    for statement, following in itertools.pairwise(body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            assert isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            docs[statement.target.id] = " ".join(str(following.value.value).split())
    return docs


def require(name: str, value: object, is_good: bool, wanted: str) -> None:
    """Refuses a value that is not good.

    Raises:
        SettingsError: naming the setting, its value and what it must be.
    """
    if not is_good:
        raise SettingsError(f"{name} is {value!r}; it must be {wanted}")


def _convert(field: dataclasses.Field[Any], text: str | bool, source: str, is_empty_false: bool) -> object:
    if isinstance(text, bool) or field.type == "str":
        return text
    if field.type == "bool":
        known = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        if is_empty_false:
            known[""] = False
        if text.lower() not in known:
            raise SettingsError(f"{source} is {text!r}; it must be true or false")
        return known[text.lower()]
    try:
        return int(text) if field.type == "int" else float(text)
    except ValueError:
        raise SettingsError(f"{source} is {text!r}; it must be a number ({field.type})") from None
