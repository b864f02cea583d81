"""Models loaded and unloaded over the Open Inference Protocol, on a real worker: cold, ready, gone, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from every_kind import write_doubler
from running_naru import RunningNaru, eventually

MANIFESTS = """\
apiVersion: serving.naru.dev/v1alpha1
kind: WorkerPool
metadata: {{name: default}}
spec: {{workers: {{min: 1}}}}
---
apiVersion: serving.naru.dev/v1alpha1
kind: ModelDeployment
metadata: {{name: doubler}}
spec:
  model: {{uri: "{doubler}"}}
  residency: {{policy: OnDemand}}
  replicas: {{min: 0}}
"""
CALL = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}
DOUBLED = [3, 5, 7, 9]


def test_a_model_is_loaded_called_unloaded_and_brought_back_by_a_call(tmp_path: Path) -> None:
    doubler = write_doubler(tmp_path / "repository")
    manifests = tmp_path / "models.yaml"
    manifests.write_text(MANIFESTS.format(doubler=doubler.as_uri()), "utf-8")
    home = tmp_path / "home"
    home.mkdir()
    with RunningNaru([str(manifests)], home) as naru:

        def state() -> Any:
            (model,) = naru.http.post(f"{naru.url}/v2/repository/index").json()
            return model["state"]

        def post(path: str, body: Any = None) -> Any:
            response = naru.http.post(f"{naru.url}/v2/{path}", json=body)
            assert response.status_code == 200, response.text
            return response.json()

        assert state() == "UNAVAILABLE"
        assert post("models/doubler/infer", CALL)["outputs"][0]["data"] == DOUBLED, "nobody knew what it takes"
        eventually(lambda: state() == "READY", 10, "the copy that the call brought up is shown")
        post("repository/models/doubler/unload")
        assert state() == "UNAVAILABLE"
        assert naru.http.get(f"{naru.url}/v2/models/doubler/ready").status_code == 503
        post("repository/models/doubler/load")
        assert state() == "READY"
        assert naru.http.get(f"{naru.url}/v2/models/doubler/ready").status_code == 200
        assert post("models/doubler/infer", CALL)["outputs"][0]["data"] == DOUBLED
