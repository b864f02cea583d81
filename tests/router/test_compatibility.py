"""What docs/compatibility.md says holds: every row's request is sent, and has the effect that the row tells."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from compatibility.known_worker import FACTS, answer
from compatibility.row import Outcome, Row
from compatibility.rows import ROWS
from router_rig import Rig

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("api", list(dict.fromkeys(row.api for row in ROWS)))
async def test_every_row_of_the_table_holds(rig: Rig, api: str, tmp_path: Path) -> None:
    for name in FACTS:
        await rig.publish_model(name)
    for name, facts in FACTS.items():
        await rig.start_worker(f"w-{name}", answer, models=(name,), facts=facts)
    await rig.start_router(files_dir=str(tmp_path))
    wrong = []
    for row in ROWS:
        if row.api != api:
            continue
        outcome = await send(rig, row)
        try:
            check(row, outcome)
        except (AssertionError, LookupError, TypeError, ValueError) as exc:
            wrong.append(f"{row.feature}: {exc!r}: {outcome.response.status_code} {outcome.response.text[:300]}")
    assert wrong == [], "\n".join(wrong)


def check(row: Row, outcome: Outcome) -> None:
    assert outcome.response.status_code == (row.code or (400 if row.status == "refused" else 200))
    if row.status != "refused":
        row.check(outcome)
        return
    assert outcome.requests == [], "refused before any worker was asked"
    assert row.says in outcome.response.text
    if row.param:
        assert outcome.json["error"]["param"] == row.param


async def send(rig: Rig, row: Row) -> Outcome:
    for worker in rig.workers.values():
        worker.requests.clear()
    method = row.method or ("GET" if row.body is None else "POST")
    if isinstance(row.body, bytes):
        response = await rig.client.request(method, row.path, content=row.body, headers=row.headers)
    else:
        response = await rig.client.request(method, row.path, json=row.body, headers=row.headers)
    return Outcome(response, [request for worker in rig.workers.values() for request in worker.requests])


def test_no_feature_stands_twice() -> None:
    keys = [(row.api, row.feature) for row in ROWS]
    assert {key for key in keys if keys.count(key) > 1} == set()
    assert {row.status for row in ROWS} == {"yes", "ignored", "refused"}


def printer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("print_compatibility", ROOT / "docs" / "print_compatibility.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_fresh() -> None:
    assert printer().printed() == (ROOT / "docs" / "compatibility.md").read_text("utf-8"), "run `make gen`"
