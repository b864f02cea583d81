"""Models of tensors over gRPC, computed by onnxruntime itself: results, batches, and everything that may be wrong."""

from __future__ import annotations

import asyncio
import gc
import re
import struct
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from disk_worker import batch_engine, disk_worker, load_error, load_ready
from onnx import TensorProto, helper
from onnx_models import DOUBLER_CONFIG, doubler, echo, heavy, lookup, model, save, triton_folder, value
from toy_worker import DEADLINE_S, Exchange, RunningWorker, ask, eventually

from naru_proto.registry import TensorRecord
from naru_proto.v1 import inference_pb2, worker_pb2
from naru_worker.adapters.engine import onnx_model
from naru_worker.adapters.machine import rss_bytes
from naru_worker.adapters.onnx import probing, session

WORDS = {
    "BOOL": "?", "INT8": "i1", "INT16": "i2", "INT32": "i4", "INT64": "i8",
    "UINT8": "u1", "UINT16": "u2", "UINT32": "u4", "UINT64": "u8", "FP16": "f2", "FP32": "f4", "FP64": "f8",
}  # fmt: skip
KINDS = {
    "BOOL": TensorProto.BOOL, "INT8": TensorProto.INT8, "INT16": TensorProto.INT16, "INT32": TensorProto.INT32,
    "INT64": TensorProto.INT64, "UINT8": TensorProto.UINT8, "UINT16": TensorProto.UINT16, "UINT32": TensorProto.UINT32,
    "UINT64": TensorProto.UINT64, "FP16": TensorProto.FLOAT16, "FP32": TensorProto.FLOAT, "FP64": TensorProto.DOUBLE,
}  # fmt: skip


def tensor(name: str, array: Any, word: str = "FP32") -> worker_pb2.Tensor:
    array = np.asarray(array, WORDS[word])
    return worker_pb2.Tensor(name=name, datatype=word, shape=array.shape, data=array.tobytes())


def infer(
    request_id: str, *inputs: worker_pb2.Tensor, model: str = "d", outputs: tuple[str, ...] = (), **more: Any
) -> worker_pb2.GenerateRequest:
    task = worker_pb2.TensorTask(inputs=inputs, outputs=outputs)
    return worker_pb2.GenerateRequest(request_id=request_id, model=model, tensors=task, **more)


def rows(first: int, count: int = 1) -> Any:
    return np.arange(4 * first, 4 * (first + count), dtype=np.float32).reshape(count, 4)


def output(deltas: list[worker_pb2.Delta]) -> Any:
    """The only output of a request that went well."""
    last = deltas[-1]
    assert not last.error.code, last.error
    assert last.finish_reason == inference_pb2.FINISH_REASON_STOP
    (found,) = [each for delta in deltas for each in delta.tensors]
    return np.frombuffer(found.data, WORDS[found.datatype]).reshape(tuple(found.shape))


async def error_of(worker: RunningWorker, request: worker_pb2.GenerateRequest) -> worker_pb2.Error:
    (delta,) = await worker.generate(request)
    assert delta.request_done
    return delta.error


async def test_a_folder_in_tritons_layout_is_served_as_it_is(tmp_path: Path) -> None:
    folder = triton_folder(tmp_path / "m", versions=(1, 2, 10))
    (folder / "0").mkdir()
    (folder / "notes").mkdir()
    async with disk_worker(tmp_path / "home") as worker:
        await load_ready(worker, "d", folder)
        info = worker.app.hub.models_by_name()["d"].facts.info
        assert (info.tasks, info.platform, info.max_batch_size) == (("tensors",), "onnxruntime", 8)
        assert info.inputs == (TensorRecord("x", "FP32", (4,)),)
        assert info.outputs == (TensorRecord("y", "FP32", (4,)),)
        (described,) = (await worker.stub.Describe(worker_pb2.DescribeRequest())).models
        assert list(described.tasks) == ["tensors"]
        assert described.revision.endswith("@10")
        deltas = await worker.generate(infer("r", tensor("x", rows(0, 2))))
        assert output(deltas).tolist() == (2 * rows(0, 2) + 1).tolist()
        assert deltas[-1].tensors[0].name == "y"
        assert deltas[-1].revision == described.revision


async def test_requests_that_come_together_are_computed_together(tmp_path: Path) -> None:
    folder = triton_folder(tmp_path / "m", DOUBLER_CONFIG.replace("20000", "5000000") + "\n")
    async with disk_worker(tmp_path / "home") as worker:
        await load_ready(worker, "d", folder)
        router = Exchange(worker.stub)
        ids = [f"r{index}" for index in range(4)]
        await router.send(*(infer(each, tensor("x", rows(index, 2))) for index, each in enumerate(ids)))
        await router.finish(*ids)
        for index, each in enumerate(ids):
            assert output(router.deltas[each]).tolist() == (2 * rows(index, 2) + 1).tolist()
        stats = batch_engine(worker, "d").stats
        assert stats.num_steps == 1, "eight rows are a whole batch, which waits for nobody"
        assert stats.batch_rows.total == 8
        await router.close()


async def test_what_the_load_says_of_batches_counts(tmp_path: Path) -> None:
    path = save(doubler(), tmp_path / "model.onnx")
    async with disk_worker(tmp_path / "home") as worker:
        await load_ready(worker, "d", path, max_batch_size=3, max_batch_delay_s=30.0)
        assert worker.app.hub.models_by_name()["d"].facts.info.max_batch_size == 3
        router = Exchange(worker.stub)
        await router.send(*(infer(f"r{index}", tensor("x", rows(index))) for index in range(7)))
        await router.finish(*(f"r{index}" for index in range(6)))
        assert batch_engine(worker, "d").stats.num_steps == 2
        assert "r6" not in router.deltas, "it waits for two more"
        await router.send(infer("r7", tensor("x", rows(7, 2))))
        await router.finish("r6", "r7")
        error = await error_of(worker, infer("r", tensor("x", rows(0, 4))))
        assert "4 rows" in error.message and "1 to 3" in error.message
        await router.close()


async def test_a_bad_row_does_not_fail_those_it_came_with(tmp_path: Path) -> None:
    path = save(lookup(), tmp_path / "model.onnx")
    async with disk_worker(tmp_path / "home") as worker:
        await load_ready(worker, "d", path, max_batch_size=4, max_batch_delay_s=30.0)
        router = Exchange(worker.stub)
        await router.send(*(infer(f"r{i}", tensor("i", [i], "INT64")) for i in (0, 1, 99, 3)))
        await router.finish("r0", "r1", "r99", "r3")
        assert [output(router.deltas[f"r{i}"]).tolist() for i in (0, 1, 3)] == [[[0, 1]], [[2, 3]], [[6, 7]]]
        error = router.deltas["r99"][-1].error
        assert (error.code, error.param) == ("invalid_request_error", "inputs")
        assert "99" in error.message, "in the library's own words"
        await router.close()


async def test_a_model_without_open_rows_serves_requests_one_by_one(tmp_path: Path) -> None:
    path = save(doubler(rows=2), tmp_path / "any name.onnx")
    async with disk_worker(tmp_path / "home") as worker:
        await load_ready(worker, "d", path)
        info = worker.app.hub.models_by_name()["d"].facts.info
        assert (info.max_batch_size, info.inputs[0].shape) == (0, (2, 4))
        for index in range(2):
            deltas = await worker.generate(infer(f"r{index}", tensor("x", rows(0, 2))))
            assert output(deltas).tolist() == (2 * rows(0, 2) + 1).tolist()
        assert "[3, 4]" in (await error_of(worker, infer("bad", tensor("x", rows(0, 3))))).message


async def test_every_type_goes_through_unchanged(tmp_path: Path) -> None:
    words = [*KINDS, "BYTES"]
    kinds = {**KINDS, "BYTES": TensorProto.STRING}
    nodes = [helper.make_node("Identity", [f"x{word}"], [f"y{word}"]) for word in words]
    inputs, outputs = ([value(f"{side}{word}", ["rows", 2], kinds[word]) for word in words] for side in ("x", "y"))
    data = b"".join(struct.pack("<I", len(raw)) + raw for raw in (b"", "n\u00e9\0".encode()))
    sent = []
    for word in KINDS:
        array = np.array([[0, 1]], WORDS[word])
        if word.startswith("FP"):
            array = np.array([[np.nan, -np.inf]], WORDS[word])
        sent.append(tensor(f"x{word}", array, word))
    texts = worker_pb2.Tensor(name="xBYTES", datatype="BYTES", shape=[1, 2], data=data)
    async with disk_worker(tmp_path / "home") as worker:
        await load_ready(worker, "d", save(model(nodes, inputs, outputs), tmp_path / "model.onnx"))
        (delta,) = await worker.generate(infer("r", *sent, texts))
        got = {each.name: each for each in delta.tensors}
        assert got.keys() == {f"y{word}" for word in words}
        for each in (*sent, texts):
            back = got[each.name.replace("x", "y", 1)]
            assert (back.datatype, list(back.shape), back.data) == (each.datatype, [1, 2], each.data)
        (delta,) = await worker.generate(infer("r", *sent, texts, outputs=("yINT8",)))
        assert [each.name for each in delta.tensors] == ["yINT8"]
        for broken in (data[:-1], data + b"\0", data[:6], data[:3], struct.pack("<I", 1) + b"\xff" + data[:4], b""):
            bad = worker_pb2.Tensor(name="xBYTES", datatype="BYTES", shape=[1, 2], data=broken)
            error = await error_of(worker, infer("b", *sent, bad))
            assert (error.code, error.param) == ("invalid_request_error", "inputs")
            assert "its data" in error.message


BIG = 2**62
WRONG = [
    (infer("r"), "inputs", "no inputs"),
    (infer("r", tensor("z", rows(0))), "inputs", "no input 'z'; it has 'x'"),
    (infer("r", tensor("x", rows(0)), tensor("x", rows(0))), "inputs", "twice"),
    (infer("r", tensor("x", rows(0)), outputs=("q",)), "outputs", "no output 'q'; it has 'y'"),
    (infer("r", tensor("x", rows(0), "FP64")), "inputs", "datatype 'FP64'; the model takes FP32"),
    (infer("r", tensor("x", rows(0)[0])), "inputs", "shape [4]; the model takes [-1, 4]"),
    (infer("r", tensor("x", rows(0)[:, :3])), "inputs", "shape [1, 3]"),
    (infer("r", tensor("x", rows(0)[:0])), "inputs", "0 rows"),
    (infer("r", worker_pb2.Tensor(name="x", datatype="FP32", shape=[1, 4], data=b"abc")), "inputs", "3 bytes of data"),
    (infer("r", worker_pb2.Tensor(name="x", datatype="FP32", shape=[BIG, 4], data=b"")), "inputs", "0 bytes of data"),
    (infer("r", worker_pb2.Tensor(name="x", datatype="FP32", shape=[-1, 4], data=b"")), "inputs", "shape [-1, 4]"),
    (infer("r", worker_pb2.Tensor(name="x", datatype="FP32", shape=[1] * 99, data=b"")), "inputs", "shape [1, 1"),
    (infer("r", tensor("x", rows(0)), text="and a prompt"), "prompt", "a task and a prompt"),
]


async def test_wrong_tensors_are_refused_by_name_and_number(tmp_path: Path) -> None:
    async with disk_worker(tmp_path / "home") as worker:
        await load_ready(worker, "d", triton_folder(tmp_path / "m"))
        for request, param, message in WRONG:
            error = await error_of(worker, request)
            assert (error.code, error.param) == ("invalid_request_error", param), error
            assert message in error.message
        for wrong in (
            ask("r", model="d"),
            worker_pb2.GenerateRequest(
                request_id="r",
                model="d",
                pooling=worker_pb2.PoolingTask(
                    kind=worker_pb2.POOLING_KIND_EMBED, inputs=[worker_pb2.PoolingInput(text="a")]
                ),
            ),
            worker_pb2.GenerateRequest(request_id="r", model="d", tokenize=worker_pb2.TokenizeTask(text="a")),
        ):
            error = await error_of(worker, wrong)
            assert (error.code, error.param) == ("invalid_request_error", "model")
            assert "tensors" in error.message
        assert batch_engine(worker, "d").stats.num_steps == 0


async def test_an_answer_larger_than_a_message_is_refused(tmp_path: Path) -> None:
    async with disk_worker(tmp_path / "home", max_message_bytes=2**16) as worker:
        await load_ready(worker, "d", save(echo(TensorProto.FLOAT, ("rows", "n")), tmp_path / "model.onnx"))
        error = await error_of(worker, infer("r", tensor("x", np.zeros((1, 10_000), np.float32))))
        assert (error.code, error.param) == ("invalid_request_error", "outputs")
        assert "40" in error.message


async def test_cancelled_and_late_requests_leave_the_queue(tmp_path: Path) -> None:
    async with disk_worker(tmp_path / "home") as worker:
        await load_ready(
            worker, "d", save(doubler(), tmp_path / "model.onnx"), max_batch_size=3, max_batch_delay_s=60.0
        )
        router = Exchange(worker.stub)
        await router.send(infer("gone", tensor("x", rows(0))), infer("late", tensor("x", rows(1)), timeout_s=0.05))
        await router.finish("late")
        assert router.deltas["late"][-1].error.code == "deadline_exceeded"
        engine = batch_engine(worker, "d")
        await eventually(lambda: engine.stats.num_waiting == 1, "one waits")
        await router.send(cancel=("gone",))
        await router.finish("gone")
        assert router.deltas["gone"][-1].finish_reason == inference_pb2.FINISH_REASON_CANCELLED
        await router.send(*(infer(f"r{index}", tensor("x", rows(index))) for index in range(3)))
        await router.finish("r0", "r1", "r2")
        assert (engine.stats.num_steps, engine.stats.batch_rows.total) == (1, 3)
        assert len(worker.app.board) == 0
        await router.close()


async def test_a_request_is_held_while_its_model_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    real = session.OnnxRunner.__init__

    def slow(self: session.OnnxRunner, *arguments: Any) -> None:
        assert gate.wait(DEADLINE_S)
        real(self, *arguments)

    monkeypatch.setattr(session.OnnxRunner, "__init__", slow)
    async with disk_worker(tmp_path / "home") as worker:
        loading = asyncio.create_task(load_ready(worker, "d", triton_folder(tmp_path / "m")))
        await eventually(lambda: worker.app.hub.resident("d") is not None, "it is known")
        router = Exchange(worker.stub)
        await router.send(infer("r", tensor("x", rows(0))))
        await eventually(lambda: worker.app.board.num_held("d") == 1, "it waits")
        gate.set()
        await router.finish("r")
        assert output(router.deltas["r"]).tolist() == (2 * rows(0) + 1).tolist()
        await loading
        await router.close()


async def test_an_evicted_model_comes_back_for_a_request_and_a_new_version_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed: list[Path] = []

    def counted(path: Path, *arguments: Any) -> Any:
        probed.append(path)
        return probing.probe(path, *arguments)

    monkeypatch.setattr(onnx_model, "probe", counted)
    folder = triton_folder(tmp_path / "m")
    async with disk_worker(tmp_path / "home") as worker:
        await load_ready(worker, "d", folder)
        for version, num_probes in ((1, 1), (2, 2)):
            if version == 2:
                save(doubler(), folder / "2" / "model.onnx")
            await worker.stub.Move(worker_pb2.MoveRequest(model="d", tier=worker_pb2.TIER_COLD))
            await eventually(lambda: not worker.app.hub.models(), "it leaves")
            deltas = await worker.generate(infer("r", tensor("x", rows(0))))
            assert output(deltas).tolist() == (2 * rows(0) + 1).tolist()
            assert deltas[0].revision.endswith(f"@{version}")
            assert len(probed) == num_probes, "files that are known are not measured again"


async def test_memory_comes_back_and_the_ledger_holds_what_was_measured(tmp_path: Path) -> None:
    num_bytes = 64 << 20
    path = save(heavy(num_bytes // 4), tmp_path / "model.onnx", data="weights")
    async with disk_worker(tmp_path / "home") as worker:
        ledger = worker.app.hub.operations.bookings.ledger
        gc.collect()
        before = rss_bytes()
        await load_ready(worker, "h", path)
        x = tensor("x", np.ones((1, 1), np.float32))
        assert output(await worker.generate(infer("r", x, model="h"))).tolist() == [[num_bytes / 4]]
        loaded = rss_bytes()
        booked = ledger.budget_bytes - ledger.free_bytes()
        assert num_bytes <= booked <= 4 * num_bytes
        assert loaded - before <= booked + (32 << 20), "nothing is held beside what is booked"
        await worker.stub.Unload(worker_pb2.UnloadRequest(model="h"))
        assert ledger.free_bytes() == ledger.budget_bytes - ledger.fixed_bytes("workspace")
        assert loaded - rss_bytes() > num_bytes / 2


async def test_bad_models_do_not_load_and_say_why(tmp_path: Path) -> None:
    whole = doubler().SerializeToString()
    noise = tmp_path / "noise.onnx"
    noise.write_bytes(bytes(range(256)) * 8)
    short = tmp_path / "short.onnx"
    short.write_bytes(whole[:-20])
    hollow = tmp_path / "hollow.onnx"
    hollow.write_bytes(b"\x08\x08")  # a model of format 8, without a graph
    config = DOUBLER_CONFIG
    cases = [
        (noise, "damaged"),
        (short, "damaged"),
        (hollow, "onnxruntime refuses it"),
        (triton_folder(tmp_path / "a", config.replace("TYPE_FP32 dims: [ 4 ]", "TYPE_INT32 dims: [ 4 ]")), "FP32, not"),
        (triton_folder(tmp_path / "b", config.replace("dims: 4", "dims: 5")), r"\[4\].*\[5\]"),
        (triton_folder(tmp_path / "c", config.replace('"y"', '"z"')), "no output 'z'"),
        (triton_folder(tmp_path / "d", made=doubler(rows=1)), "first dimension is not open"),
        (triton_folder(tmp_path / "e", config + "version_policy { specific { versions: 7 } }"), r"no version of \[7\]"),
        (triton_folder(tmp_path / "f", config + "sequence_batching {}"), "sequence_batching"),
        (triton_folder(tmp_path / "g", versions=()), "no model.onnx"),
        (tmp_path / "nothing", "does not exist"),
    ]
    async with disk_worker(tmp_path / "home") as worker:
        for path, message in cases:
            error = await load_error(worker, path)
            assert error.code == "model_load_failed"
            assert re.search(message, error.message), error.message
        large = save(heavy(4 << 20), tmp_path / "large" / "model.onnx")
    async with disk_worker(tmp_path / "home", budget_bytes=8 << 20) as worker:
        error = await load_error(worker, large)
        assert (error.param, "8.4 MB" in error.message) == ("memory", True)


async def test_without_the_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(session, "importlib", SimpleNamespace(import_module=absent))
    async with disk_worker(tmp_path / "home") as worker:
        error = await load_error(worker, save(doubler(), tmp_path / "model.onnx"))
        assert "install naru[onnx]" in error.message
