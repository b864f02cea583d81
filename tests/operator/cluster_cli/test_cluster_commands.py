"""The commands about a cluster, against an API server that answers from a table of objects."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from naru_operator.cli.cluster import logs, rollout, status
from naru_operator.cli.cluster.api import ClusterApi, ClusterOptions, open_api
from naru_operator.cli.cluster.group import cluster
from naru_operator.cli.main import cli
from naru_proto import names
from naru_proto.errors import InvalidRequest, ModelNotFound, Unavailable

MODELS = "/apis/serving.naru.dev/v1alpha1/namespaces/apps/modeldeployments"
REVISIONS = "/apis/apps/v1/namespaces/apps/controllerrevisions"


def model(name: str = "m", **changes: Any) -> dict[str, Any]:
    return {
        "apiVersion": "serving.naru.dev/v1alpha1",
        "kind": "ModelDeployment",
        "metadata": {"name": name, "uid": f"uid-{name}", "generation": 3},
        "spec": {"model": {"uri": "hf://o/new"}, "engine": {"maxModelLen": 9}, "alias": "friendly"},
        "status": {},
        **changes,
    }


def revision(number: int, digest: str, data: dict[str, Any], owner: str = "uid-m") -> dict[str, Any]:
    return {
        "metadata": {
            "name": f"m-{digest}",
            "annotations": {names.ANNOTATION_REVISION_DIGEST: digest},
            "ownerReferences": [{"uid": owner}],
            "creationTimestamp": "2026-01-02T03:04:05Z",
        },
        "revision": number,
        "data": data,
    }


class Server:
    """Lists and objects by path; remembers patches."""

    def __init__(self, lists: dict[str, list[dict[str, Any]]]) -> None:
        self.lists = lists
        self.patches: list[tuple[str, Any]] = []
        self.page_size = 500

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if request.method == "PATCH":
            self.patches.append((path, json.loads(request.content)))
            return httpx.Response(200, json={})
        if path in self.lists:
            start = int(request.url.params.get("continue", "0"))
            items = self.lists[path][start : start + self.page_size]
            more = start + self.page_size
            metadata = {"continue": str(more)} if more < len(self.lists[path]) else {}
            return httpx.Response(200, json={"items": items, "metadata": metadata})
        folder, _, name = path.rpartition("/")
        for item in self.lists.get(folder, ()):
            if item["metadata"]["name"] == name:
                return httpx.Response(200, json=item)
        return httpx.Response(404, json={"message": f"{name!r} not found"})


def api(server: Callable[[httpx.Request], httpx.Response]) -> ClusterApi:
    http = httpx.Client(base_url="https://cluster", transport=httpx.MockTransport(server))
    return ClusterApi(http, "apps")


def test_a_model_is_found_by_name_and_by_alias_and_an_unknown_one_names_the_known() -> None:
    server = Server({MODELS: [model("a", spec={"model": {"uri": "hf://o/a"}}), model("m")]})
    server.page_size = 1
    assert api(server).model("a")["metadata"]["name"] == "a"
    assert api(server).model("friendly")["metadata"]["name"] == "m"
    with pytest.raises(ModelNotFound, match=r"'apps' has no ModelDeployment 'x'; it has: a, m"):
        api(server).model("x")


@pytest.mark.parametrize(
    ("conditions", "states", "line", "is_over", "is_bad"),
    [
        ([], {"observedGeneration": 2}, "waiting for the operator to see the change", False, False),
        (
            [("Progressing", "True", "WaitingForCopies", "1 of 2")],
            {"observedGeneration": 3, "currentRevision": "aa", "updateRevision": "bb"},
            "aa serves, bb is on its way (WaitingForCopies: 1 of 2)",
            False,
            False,
        ),
        (
            [("Progressing", "False", "RevisionFailed", "no such file")],
            {"observedGeneration": 3, "currentRevision": "aa", "updateRevision": "bb"},
            "failed (RevisionFailed: no such file)",
            True,
            True,
        ),
        (
            [("Progressing", "True", "RolloutComplete", "")],
            {"observedGeneration": 3, "currentRevision": "bb", "updateRevision": "bb"},
            "revision bb serves (RolloutComplete)",
            True,
            False,
        ),
        (
            [("Accepted", "False", "NameConflict", "taken"), ("Progressing", "False", "x", "")],
            {"observedGeneration": 3},
            "refused (NameConflict): taken",
            True,
            True,
        ),
    ],
    ids=["unseen", "under way", "failed", "done", "refused"],
)
def test_a_rollout_is_told_from_the_status_alone(
    conditions: list[tuple[str, str, str, str]], states: dict[str, Any], line: str, is_over: bool, is_bad: bool
) -> None:
    told = [{"type": t, "status": s, "reason": r, "message": m} for t, s, r, m in conditions]
    assert rollout.rollout_line(model(status={**states, "conditions": told})) == (line, is_over, is_bad)


def test_undo_writes_back_the_earlier_revision_and_removes_what_it_did_not_have() -> None:
    earlier = revision(1, "aa", {"model": {"uri": "hf://o/old"}, "resources": {"tensorParallel": 1}})
    server = Server(
        {
            MODELS: [model(status={"currentRevision": "bb", "updateRevision": "bb"})],
            REVISIONS: [
                revision(2, "bb", {"model": {"uri": "hf://o/new"}}),
                earlier,
                revision(9, "cc", {}, owner="uid-other"),
            ],
        }
    )
    assert rollout.run_rollout_undo(api(server), "m", None) == 0
    assert server.patches == [
        (
            f"{MODELS}/m",
            [
                {"op": "test", "path": "/metadata/generation", "value": 3},
                {"op": "add", "path": "/spec/model", "value": {"uri": "hf://o/old"}},
                {"op": "remove", "path": "/spec/engine"},
                {"op": "add", "path": "/spec/resources", "value": {"tensorParallel": 1}},
            ],
        )
    ]


def test_undo_of_a_rollout_under_way_goes_back_to_what_serves() -> None:
    lists = {
        MODELS: [model(status={"currentRevision": "aa", "updateRevision": "cc"})],
        REVISIONS: [
            revision(1, "aa", {"model": {"uri": "hf://o/serves"}}),
            revision(2, "bb", {"model": {"uri": "hf://o/other"}}),
            revision(3, "cc", {"model": {"uri": "hf://o/new"}}),
        ],
    }
    server = Server(lists)
    rollout.run_rollout_undo(api(server), "m", None)
    assert server.patches[0][1][1]["value"] == {"uri": "hf://o/serves"}
    rollout.run_rollout_undo(api(server), "m", 2)
    assert server.patches[1][1][1]["value"] == {"uri": "hf://o/other"}
    with pytest.raises(InvalidRequest, match="no revision 7; there are: 1, 2, 3"):
        rollout.run_rollout_undo(api(server), "m", 7)


def test_history_marks_what_serves_and_what_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    lists = {
        MODELS: [model(status={"currentRevision": "aa", "updateRevision": "bb"})],
        REVISIONS: [
            revision(2, "bb", {"model": {"uri": "hf://o/new", "revision": "v2"}}),
            revision(1, "aa", {"model": {"uri": "hf://o/old"}}),
        ],
    }
    rollout.run_rollout_history(api(Server(lists)), "m")
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    assert [[cell.strip() for cell in row if cell.strip()] for row in rows[1:]] == [
        ["1", "aa", "serves", "2026-01-02T03:04:05Z", "hf://o/old"],
        ["2", "bb", "wanted", "2026-01-02T03:04:05Z", "hf://o/new at v2"],
    ]


def test_an_explanation_has_conditions_copies_eviction_and_events() -> None:
    told = {
        "phase": "Unloaded",
        "conditions": [{"type": "Loaded", "status": "False", "reason": "Evicted", "message": "made room"}],
        "residents": [{"worker": "w-0", "state": "Host", "weightBytes": 1 << 20, "kvBytes": 1 << 20, "inFlight": 2}],
        "lastEviction": {"worker": "w-0", "reason": "Pressure"},
    }
    text = status.render(model(status=told), [{"metadata": {}, "reason": "Evicted", "message": "for another"}])
    assert "m: Unloaded" in text
    assert "made room" in text
    assert "2.0 MiB" in text
    assert "last eviction: worker w-0, reason Pressure" in text
    assert "for another" in text
    assert "not seen by an operator yet" in status.render(model(status={}), [])


@pytest.mark.parametrize(
    ("line", "is_about"),
    [
        ("loaded m@0f", True),
        ("model 'm' failed", True),
        ("m", True),
        ("mm loaded", False),
        ("some-m loaded", False),
        ("m-2 loaded", False),
        ("m-2 loaded, m too", True),
        ("m.1", False),
    ],
)
def test_a_log_line_is_about_a_model_only_if_it_names_that_very_one(line: str, is_about: bool) -> None:
    assert logs.speaks_of(line, "m") is is_about


def test_refusals_of_the_api_server_become_sentences() -> None:
    def forbid(request: httpx.Request) -> httpx.Response:
        return httpx.Response(403, json={"message": "modeldeployments is forbidden"})

    with pytest.raises(InvalidRequest, match="you may not do that: modeldeployments is forbidden"):
        api(forbid).model("m")

    def vanish(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(Unavailable, match="does not answer"):
        api(vanish).model("m")


def test_without_a_kubeconfig_the_error_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="set KUBECONFIG, or give --kubeconfig"):
        open_api(ClusterOptions(kubeconfig=tmp_path / "none"))


def test_the_router_is_reached_through_its_service() -> None:
    service = {"metadata": {"name": "naru-router"}}
    path = api(Server({"/api/v1/namespaces/apps/services": [service]})).router_path()
    assert path == "/api/v1/namespaces/apps/services/naru-router:http/proxy"
    with pytest.raises(Unavailable, match="no Service of a Naru router"):
        api(Server({"/api/v1/namespaces/apps/services": []})).router_path()


def test_the_plugin_and_the_group_are_the_same_commands() -> None:
    assert set(cluster.commands) == {"status", "explain", "plan", "logs", "chat", "rollout"}
    assert cli.commands["cluster"] is cluster
    for name in cluster.commands:
        assert CliRunner().invoke(cluster, [name, "--help"]).exit_code == 0
    for name in ("status", "history", "undo"):
        assert CliRunner().invoke(cli, ["rollout", name, "--help"]).exit_code == 0
