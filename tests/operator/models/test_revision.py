"""Revisions: what changes their digest, the objects that keep them, and which of those may go."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_world import raw_model

from naru_operator.core.kube import Object, ObjectKey
from naru_operator.core.models.revision import (
    RevisionSpec,
    build_revision,
    label_value,
    object_name,
    read_revision,
    revision_spec,
    surplus_revisions,
)
from naru_proto import names
from naru_proto.crd.v1alpha1 import ModelDeployment

RICH: dict[str, Any] = {
    "model": {"uri": "hf://o/m", "revision": "v1", "credentialsSecret": "token"},
    "engine": {"maxModelLen": 4096},
    "resources": {"kvCache": {"min": "1Gi"}},
}


def part(**spec: Any) -> RevisionSpec:
    return revision_spec(ModelDeployment.model_validate(raw_model("m", **spec)).spec)


def kept(number: int = 1, name: str = "m", **spec: Any) -> Object:
    return build_revision(raw_model(name), part(**(spec or RICH)), number)


def test_a_digest_is_ten_hex_digits_and_the_same_in_every_process() -> None:
    assert re.fullmatch("[0-9a-f]{10}", part(**RICH).digest)
    assert part(model={"uri": "pypi://m"}).digest == "cae2da9726"


@pytest.mark.parametrize(
    "change",
    [
        {"model": {**RICH["model"], "uri": "hf://o/n"}},
        {"model": {**RICH["model"], "revision": "v2"}},
        {"model": {**RICH["model"], "credentialsSecret": "other"}},
        {"engine": {"maxModelLen": 4097}},
        {"engine": {"maxModelLen": 4096, "enablePrefixCaching": False}},
        {"resources": {"kvCache": {"min": "2Gi"}}},
        {"batching": {"maxBatchSize": 8}},
        {"batching": {"maxDelay": "5ms"}},
        {"adapters": [{"name": "l", "uri": "hf://o/l"}]},
    ],
)
def test_what_a_worker_loads_makes_a_revision(change: dict[str, Any]) -> None:
    assert part(**(RICH | change)).digest != part(**RICH).digest


@pytest.mark.parametrize(
    "change",
    [
        {"alias": "x"},
        {"replicas": {"min": 3}},
        {"residency": {"policy": "Pinned"}},
        {"placement": {"poolSelector": {"matchLabels": {"a": "b"}}}},
        {"rollout": {"strategy": "Recreate"}},
        {"queue": {"maxWait": "5s", "maxDepth": 5}},
        {"engine": {"maxModelLen": 4096}, "adapters": [], "batching": {}},
        {"resources": {"kvCache": {"min": 1 << 30}, "tensorParallel": 1, "quantization": "AsStored"}},
    ],
    ids=["alias", "replicas", "residency", "placement", "rollout", "queue", "an empty list", "defaults written out"],
)
def test_anything_else_is_no_revision(change: dict[str, Any]) -> None:
    assert part(**(RICH | change)).digest == part(**RICH).digest


def test_no_default_is_kept_so_that_a_later_field_changes_no_digest() -> None:
    assert part(model={"uri": "pypi://m"}).to_data() == {"model": {"uri": "pypi://m"}}
    assert part(**RICH).to_data() == RICH


def test_the_order_of_adapters_does_not_matter() -> None:
    adapters = [{"name": "a", "uri": "hf://o/a"}, {"name": "b", "uri": "hf://o/b"}]
    assert part(adapters=adapters).digest == part(adapters=adapters[::-1]).digest


def test_the_object_of_a_revision() -> None:
    digest = part(**RICH).digest
    assert kept(3) == {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": {
            "name": f"m-{digest}",
            "namespace": "default",
            "labels": {names.LABEL_MODEL: "m", names.LABEL_MANAGED_BY: "naru-operator"},
            "annotations": {names.ANNOTATION_REVISION_DIGEST: digest, names.ANNOTATION_MODEL_NAME: "m"},
            "ownerReferences": [
                {
                    "apiVersion": "serving.naru.dev/v1alpha1",
                    "kind": "ModelDeployment",
                    "name": "m",
                    "uid": "uid-default-m-1700000000",
                    "controller": True,
                    "blockOwnerDeletion": False,
                }
            ],
        },
        "revision": 3,
        "data": RICH,
    }


def test_a_revision_is_read_back_as_it_was_written() -> None:
    found = read_revision(kept(3))
    assert found is not None
    assert (found.number, found.owner_uid) == (3, "uid-default-m-1700000000")
    assert found.spec() == part(**RICH)


BROKEN: dict[str, Any] = {
    "no metadata": {"metadata": None},
    "no annotations": {"annotations": None},
    "no digest": {"annotations": {}},
    "no number": {"revision": "3"},
    "a yes for a number": {"revision": True},
    "no owner": {"ownerReferences": []},
    "an owner of another kind": {"ownerReferences": [{"kind": "Job", "apiVersion": "batch/v1", "controller": True}]},
    "an owner that does not control it": {"controller": False},
    "no list of owners": {"ownerReferences": {"a": 1}},
}  # fmt: skip


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN.keys())
def test_what_is_not_ours_is_not_read(change: dict[str, Any]) -> None:
    raw = copy.deepcopy(kept())
    for name, value in change.items():
        if name in ("metadata", "revision"):
            raw[name] = value
        elif name == "controller":
            raw["metadata"]["ownerReferences"][0][name] = value
        else:
            raw["metadata"][name] = value
    assert read_revision(raw) is None


@pytest.mark.parametrize(
    "data",
    [None, [], "x", {}, {"model": {"uri": "pypi://m"}}, {"model": {"uri": "nowhere"}}, {**RICH, "newer": 1}],
    ids=["nothing", "a list", "a text", "no model", "another model", "a bad source", "a field of a later version"],
)
def test_data_that_are_not_what_the_digest_says_are_not_read(data: object) -> None:
    found = read_revision({**kept(), "data": data})
    assert found is not None and found.spec() is None


@settings(deadline=None)
@given(st.from_regex(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", fullmatch=True))
def test_names_and_labels_of_objects_are_valid_however_long_the_models_is(model: str) -> None:
    name, label = object_name(model, "0123456789"), label_value(model)
    assert len(name) <= 253 and re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", name)
    assert len(label) <= 63 and re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", label)


def test_long_names_that_begin_alike_stay_apart() -> None:
    first, second = "a" * 252 + "b", "a" * 252 + "c"
    assert object_name(first, "0123456789") != object_name(second, "0123456789")
    assert label_value(first) != label_value(second)


def test_the_oldest_revisions_go_but_for_those_in_use_and_those_that_cannot_be_read() -> None:
    raws = [kept(number, model={"uri": f"pypi://{number}"}) for number in range(1, 7)]
    raws[1] = {**raws[1], "data": None}
    found = [each for raw in raws if (each := read_revision(raw)) is not None]
    in_use = {found[0].digest, found[5].digest}
    assert [key.name for key in surplus_revisions(found[::-1], in_use, 1)] == [
        f"m-{found[2].digest}",
        f"m-{found[3].digest}",
    ]
    assert surplus_revisions(found, in_use, 4) == ()
    assert ObjectKey("default", f"m-{found[4].digest}") in surplus_revisions(found, in_use, 0)
