"""The comparison of the installed definitions with our own."""

from __future__ import annotations

import copy
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fake_kube_api import FakeKubeApi, Reply

from naru_operator.adapters.kube.caller import ClientSettings
from naru_operator.adapters.kube.client import KubeClient
from naru_operator.adapters.kube.errors import NotFound
from naru_operator.adapters.kube.schema_check import SchemaCheck, missing_fields
from naru_proto import crdgen, names

PATH = "/openapi/v3/apis/serving.naru.dev/v1alpha1"


def document() -> dict[str, Any]:
    """As an API server publishes our definitions: metadata by reference, a list kind beside each."""
    schemas: dict[str, Any] = {"io.k8s.ObjectMeta": {"type": "object", "properties": {"name": {"type": "string"}}}}
    for root in crdgen.ROOTS:
        schema = copy.deepcopy(crdgen.root_schema(root))
        schema["properties"]["metadata"] = {"allOf": [{"$ref": "#/components/schemas/io.k8s.ObjectMeta"}]}
        gvk = {"group": names.API_GROUP, "version": names.API_VERSION, "kind": root.__name__}
        schemas[f"dev.naru.serving.v1alpha1.{root.__name__}"] = {**schema, "x-kubernetes-group-version-kind": [gvk]}
    return {"openapi": "3.0.0", "components": {"schemas": schemas}}


def fields(schemas: dict[str, Any], kind: str, *path: str) -> dict[str, Any]:
    node: dict[str, Any] = schemas["components"]["schemas"][f"dev.naru.serving.v1alpha1.{kind}"]["properties"]
    for name in path:
        node = node[name]["properties"]
    return node


@pytest.fixture
async def api() -> AsyncIterator[FakeKubeApi]:
    async with FakeKubeApi() as running:
        yield running


@pytest.fixture
async def check(api: FakeKubeApi) -> AsyncIterator[SchemaCheck]:
    client = KubeClient(api.configuration(), ClientSettings(num_threads=1, retry_pauses_s=()))
    yield SchemaCheck(client, resync_s=3600.0)
    await client.close()


async def test_definitions_of_this_version_lack_nothing(
    api: FakeKubeApi, check: SchemaCheck, caplog: pytest.LogCaptureFixture
) -> None:
    api.on("GET", PATH, Reply(body=document()))
    assert await check.look() == ""
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_older_definitions_are_told_once_by_field_with_the_remedy_and_so_is_their_end(
    api: FakeKubeApi, check: SchemaCheck, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    old = document()
    del fields(old, "ModelDeployment", "spec", "model")["credentialsSecret"]
    del fields(old, "ModelDeployment", "status")["residents"]
    del fields(old, "WorkerPool", "spec", "cache")["size"]
    api.on("GET", PATH, Reply(body=old), Reply(body=old), Reply(body=document()))
    told = await check.look()
    assert "ModelDeployment lacks spec.model.credentialsSecret, status.residents" in told
    assert "WorkerPool lacks spec.cache.size" in told
    assert "apply the crds/ folder" in told
    assert await check.look() == told
    assert await check.look() == ""
    assert [record.levelname for record in caplog.records if record.name.endswith("schema_check")] == ["ERROR", "INFO"]


async def test_kinds_that_are_not_installed_are_left_to_the_informer_to_tell(check: SchemaCheck) -> None:
    with pytest.raises(NotFound):
        await check.look()


def test_lists_maps_and_open_objects_are_looked_into() -> None:
    text = {"type": "string"}
    ours = {
        "properties": {
            "items": {"items": {"properties": {"a": text, "b": text}}},
            "map": {"additionalProperties": {"properties": {"c": text}}},
            "open": {"properties": {"d": text}},
            "gone": {"properties": {"e": text}},
        }
    }
    theirs = {
        "properties": {
            "items": {"items": {"properties": {"a": text}}},
            "map": {"additionalProperties": {"$ref": "elsewhere"}},
            "open": {"x-kubernetes-preserve-unknown-fields": True},
        }
    }

    def resolve(schema: Any) -> Any:
        return {"properties": {}} if "$ref" in schema else schema

    assert missing_fields(ours, theirs, resolve) == ["items[].b", "map.*.c", "gone"]
