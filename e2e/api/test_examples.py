"""The examples on the pages of the APIs are run as they stand there, but for the addresses."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from running_naru import RunningNaru

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / ".venv-clients" / "bin" / "python"
PAGES = ("openai", "responses", "anthropic", "embeddings", "batches", "oip", "grpc")
_BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_OWN = "# needs: naru\n"


def examples() -> list[tuple[str, int, str, str]]:
    """(page, number, language, text) of all of them."""
    found = []
    for page in PAGES:
        text = (ROOT / "docs" / f"{page}.md").read_text("utf-8")
        found += [(page, number, match[1], match[2]) for number, match in enumerate(_BLOCK.finditer(text), 1)]
    return found


def test_each_page_has_examples() -> None:
    assert {page for page, *_ in examples()} == set(PAGES)


@pytest.mark.parametrize(
    ("page", "number", "language", "text"), examples(), ids=lambda value: str(value) if len(str(value)) < 20 else ""
)
def test_an_example_works(api: RunningNaru, page: str, number: int, language: str, text: str, tmp_path: Path) -> None:
    text = text.replace("http://127.0.0.1:8080", api.url).replace("127.0.0.1:8080", api.url.removeprefix("http://"))
    text = text.replace("127.0.0.1:8081", api.grpc_address)
    if language == "sh":
        # `curl` tells by its exit status whether the reply was an error only where it is asked to.
        command = [
            "bash",
            "-euo",
            "pipefail",
            "-c",
            f'curl() {{ command curl --silent --show-error --fail "$@"; }}\n{text}',
        ]
    else:
        command = [sys.executable if text.startswith(_OWN) else str(CLIENTS), "-c", text]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    assert done.stdout.strip(), "an example shows something"
