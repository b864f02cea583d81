"""Prints docs/compatibility.md from the rows that tests/router/test_compatibility.py runs.

python docs/print_compatibility.py [--check]
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
SUPPORT = ROOT / "tests" / "router" / "support"
_HEAD = """\
# Compatibility

What each API's clients may send, and what happens. Every line is a test: its request is sent to a router, and what the
line says is checked. Printed by `make gen` from those tests; do not edit.

- **yes**: it has the effect that the API's own documentation gives it.
- **ignored**: it is accepted, and changes nothing.
- **refused**: an error in the API's form says why and names it; nothing of the request is computed.

A field that stands in no table is ignored. `null` is as good as absent, everywhere.
"""
_MARKS = {"yes": "yes", "ignored": "ignored", "refused": "**refused**"}


def printed() -> str:
    """The page."""
    if str(SUPPORT) not in sys.path:
        sys.path.insert(0, str(SUPPORT))
    from compatibility.rows import ROWS

    parts = [_HEAD]
    for api in dict.fromkeys(row.api for row in ROWS):
        lines = ((row.feature, _MARKS[row.status], row.what) for row in ROWS if row.api == api)
        parts.append(f"## {api}\n\n| | | |\n|---|---|---|\n{_table(lines)}")
    return "\n".join(parts)


def _table(lines: Iterable[tuple[str, str, str]]) -> str:
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def main() -> int:
    """Writes the page, or says that it is stale."""
    text = printed()
    if "--check" not in sys.argv:
        PAGE.write_text(text, "utf-8")
        return 0
    if PAGE.read_text("utf-8") == text:
        return 0
    print(f"{PAGE.name} is stale; run `make gen`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
