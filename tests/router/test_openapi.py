"""The description at /openapi.json: valid, complete, and true of what is answered."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from router_rig import CHAT, COMPLETION, Rig, body, simple

from naru_router.core.openapi.document import document, schemas

ROOT = Path(__file__).parents[2]
REFERENCE = re.compile(r'"\$ref": "#/components/schemas/(\w+)"')


def validator(name: str) -> jsonschema.Draft202012Validator:
    """Of a component."""
    return jsonschema.Draft202012Validator({"$ref": f"#/components/schemas/{name}", **document()})


def test_every_schema_is_one_and_every_reference_leads_somewhere() -> None:
    for name, schema in schemas().items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert name[0].isupper()
    named = set(REFERENCE.findall(json.dumps(document())))
    assert named <= schemas().keys()
    assert schemas().keys() - named == set(), "described, and used nowhere"


def test_no_operation_has_the_name_of_another() -> None:
    paths: Any = document()["paths"]
    ids = [operation["operationId"] for methods in paths.values() for operation in methods.values()]
    assert len(ids) == len(set(ids))


async def test_what_is_described_is_there(rig: Rig) -> None:
    await simple(rig)
    response = await rig.client.get("/openapi.json")
    assert response.status_code == 200
    missing = []
    for path, methods in response.json()["paths"].items():
        for method in methods:
            reply = await rig.client.request(method, re.sub(r"\{\w+\}", "x", path), content=b"")
            if reply.status_code == 405 or "there is nothing at" in reply.text:
                missing.append((method, path, reply.status_code))
    assert missing == []


def test_what_is_there_is_described() -> None:
    """Paths of pages and endpoints as the sources name them; those with parameters as far as to the first one."""
    sources = [path.read_text("utf-8") for path in (ROOT / "router/src/naru_router").rglob("*.py")]
    found = {path for source in sources for path in re.findall(r'Route\(\s*"(/[^"]*)"', source)}
    found |= {path for source in sources for path in re.findall(r'b"(/[a-z0-9_/]+)":? ', source)}
    paths = list(document()["paths"])  # type: ignore[call-overload]
    assert len(found) > 20
    assert {path for path in found if not any(each.startswith(path.partition("{")[0]) for each in paths)} == set()


@pytest.mark.parametrize(
    ("path", "name"), [(CHAT, "ChatCompletion"), (COMPLETION, "Completion"), ("/v1/models", "Models")]
)
async def test_replies_are_as_they_are_described(rig: Rig, path: str, name: str) -> None:
    await simple(rig)
    response = await (rig.client.get(path) if path == "/v1/models" else rig.post(path, body(path)))
    assert response.status_code == 200
    validator(name).validate(response.json())


async def test_errors_are_as_they_are_described(rig: Rig) -> None:
    await simple(rig)
    for response in (await rig.post(CHAT, []), await rig.post(CHAT, body(CHAT, model="x")), await rig.client.get("/x")):
        assert response.status_code in (400, 404)
        validator("Error").validate(response.json())
