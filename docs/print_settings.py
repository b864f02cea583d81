"""Prints the settings tables of configuration.md from the settings themselves: `make gen`; `--check` in `make verify`.

A development tool: it imports operator, router and worker, which no part may do.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from naru_operator import settings as operator_settings
from naru_router import settings as router_settings
from naru_worker import settings_source as worker_settings

PAGE = Path(__file__).with_name("configuration.md")

_HEAD = "| flag | variable | default | meaning |\n|---|---|---|---|\n"
_SECTION = re.compile(r"(<!-- settings of the (\w+), printed by `make gen` -->\n\n).*?(\n<!-- end -->)", re.DOTALL)


def _row(flag: str, variable: str, default: object, meaning: str) -> str:
    if isinstance(default, bool):
        text = f"`{str(default).lower()}`"
    else:
        text = f"`{default}`" if default not in ("", ()) else "none"
    return f"| `{flag}` | `{variable}` | {text} | {meaning.replace('|', chr(92) + '|')} |\n"


def rows_of(module: ModuleType) -> Iterator[str]:
    """One row for each setting of the router or the operator."""
    docs = module.field_docs()
    for field in dataclasses.fields(module.Settings):
        variable = module.ENV_PREFIX + field.name.upper()
        yield _row("--" + field.name.replace("_", "-"), variable, field.default, docs[field.name])


def worker_rows() -> Iterator[str]:
    """One row for each setting of the worker."""
    docs = worker_settings.field_docs()
    for knob in worker_settings.knobs():
        yield _row(knob.flag, knob.variable, knob.default, docs[knob.field])


def printed(page: str) -> str:
    """The page with fresh tables."""
    tables = {
        "operator": _HEAD + "".join(rows_of(operator_settings)),
        "router": _HEAD + "".join(rows_of(router_settings)),
        "worker": _HEAD + "".join(worker_rows()),
    }
    return _SECTION.sub(lambda match: match[1] + tables[match[2]] + match[3], page)


def main(arguments: list[str]) -> int:
    """Prints or checks; 1 when the page is stale."""
    page = PAGE.read_text(encoding="utf-8")
    fresh = printed(page)
    if "--check" in arguments:
        if fresh != page:
            sys.stderr.write(f"docs/{PAGE.name} is stale: run `make gen`\n")
        return int(fresh != page)
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
