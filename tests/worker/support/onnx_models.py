"""Tiny ONNX models, made anew for each test, and the folders they lie in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Size = str | int


def value(name: str, shape: Sequence[Size], kind: int = TensorProto.FLOAT) -> Any:
    """A tensor's name, type and shape; open dimensions are strings."""
    return helper.make_tensor_value_info(name, kind, list(shape))


def constant(name: str, array: Any) -> Any:
    """A weight."""
    return numpy_helper.from_array(np.asarray(array, np.float32), name)


def model(nodes: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], weights: Sequence[Any] = ()) -> Any:
    """A whole model of one graph."""
    graph = helper.make_graph(list(nodes), "g", list(inputs), list(outputs), list(weights))
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    made.ir_version = 9
    return made


def doubler(rows: Size = "rows") -> Any:
    """x (rows, 4) -> y = 2x + 1."""
    nodes = [helper.make_node("Mul", ["x", "two"], ["d"]), helper.make_node("Add", ["d", "one"], ["y"])]
    weights = [constant("two", [2.0]), constant("one", [1.0])]
    return model(nodes, [value("x", [rows, 4])], [value("y", [rows, 4])], weights)


def echo(kind: int, shape: Sequence[Size] = ("rows", 2)) -> Any:
    """x -> y = x, of any type."""
    return model([helper.make_node("Identity", ["x"], ["y"])], [value("x", shape, kind)], [value("y", shape, kind)])


def lookup(num_rows: int = 4) -> Any:
    """i (rows) -> y (rows, 2): rows of a table; an index beyond it is refused by the library."""
    table = constant("table", np.arange(2 * num_rows, dtype=np.float32).reshape(num_rows, 2))
    node = helper.make_node("Gather", ["table", "i"], ["y"])
    return model([node], [value("i", ["rows"], TensorProto.INT64)], [value("y", ["rows", 2])], [table])


def heavy(num_floats: int) -> Any:
    """x (rows, 1) -> y: a model whose weights take memory."""
    weights = [constant("w", np.ones((1, num_floats), np.float32))]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["z"]), helper.make_node("ReduceSum", ["z"], ["y"], keepdims=1)]
    return model(nodes, [value("x", ["rows", 1])], [value("y", [1, 1])], weights)


def save(made: Any, path: Path, *, data: str = "") -> Path:
    """Writes a model, its folder too. `data`: its weights go to a file of this name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(made, path, save_as_external_data=bool(data), location=data or None, size_threshold=0)
    return path


DOUBLER_CONFIG = """
name: "doubler"  # as in the folder's name
platform: "onnxruntime_onnx"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "y", data_type: TYPE_FP32, dims: 4 } ]
dynamic_batching { max_queue_delay_microseconds: 20000 }
instance_group [ { count: 2 kind: KIND_CPU } ]
"""


def triton_folder(folder: Path, config: str = DOUBLER_CONFIG, versions: Sequence[int] = (1,), made: Any = None) -> Path:
    """A model in Triton's layout."""
    folder.mkdir(parents=True)
    for version in versions:
        save(made or doubler(), folder / str(version) / "model.onnx")
    (folder / "config.pbtxt").write_text(config)
    return folder
