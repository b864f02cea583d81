"""Vectors and scores through the real worker: encoders and cross-encoders loaded by the hub, and pooled decoders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_encoders import TinyEncoder, reference, write_encoder
from tiny_models import TinySpec
from tokenizers import Tokenizer
from worker_process import WorkerProcess, worker_process

from naru_proto.v1 import worker_pb2
from naru_worker.adapters.ops.protocol import FloatArray

torch = pytest.importorskip("torch", reason="the reference needs torch")

EMBED, SCORE = worker_pb2.POOLING_KIND_EMBED, worker_pb2.POOLING_KIND_SCORE


async def load(worker: WorkerProcess, name: str, folder: Path, **options: Any) -> None:
    request = worker_pb2.LoadRequest(
        model=name, uri=f"file://{folder}", generation=1, options=worker_pb2.EngineOptions(**options)
    )
    last = [progress async for progress in worker.stub.Load(request)][-1]
    assert last.state == worker_pb2.MODEL_STATE_READY, last


async def ask(worker: WorkerProcess, model: str, *texts: Any, **task: Any) -> list[worker_pb2.Delta]:
    """All deltas of one pooling task. A text is a string, a pair of strings, or a list of token ids."""
    inputs = []
    for text in texts:
        if isinstance(text, list):
            inputs.append(worker_pb2.PoolingInput(token_ids=worker_pb2.TokenIds(ids=text)))
        elif isinstance(text, tuple):
            inputs.append(worker_pb2.PoolingInput(text=text[0], pair=text[1]))
        else:
            inputs.append(worker_pb2.PoolingInput(text=text))
    pooling = worker_pb2.PoolingTask(inputs=inputs, **{"kind": EMBED, "add_special_tokens": True, **task})
    request = worker_pb2.GenerateRequest(request_id="r", model=model, pooling=pooling)
    return [delta async for delta in worker.stub.Generate(request)]


async def vectors(worker: WorkerProcess, model: str, *texts: Any, **task: Any) -> FloatArray:
    deltas = await ask(worker, model, *texts, **task)
    assert not deltas[-1].error.code, deltas[-1].error
    found = {vector.index: np.frombuffer(vector.values, "<f4") for delta in deltas for vector in delta.vectors}
    return np.stack([found[index] for index in range(len(texts))])


async def described(worker: WorkerProcess, name: str) -> worker_pb2.ModelInfo:
    reply = await worker.stub.Describe(worker_pb2.DescribeRequest())
    found: worker_pb2.ModelInfo = next(model for model in reply.models if model.model == name)
    return found


def length_1(rows: FloatArray) -> FloatArray:
    result: FloatArray = rows / np.linalg.norm(rows, axis=-1, keepdims=True)
    return result


async def test_an_encoder_is_loaded_asked_and_unloaded_like_any_model(tmp_path: Path) -> None:
    spec = TinyEncoder(normalize=True)
    folder = write_encoder(tmp_path, spec)
    async with worker_process() as worker:
        await load(worker, "enc", folder, max_model_len=32)
        info = await described(worker, "enc")
        assert list(info.tasks) == ["embed"]
        got = await vectors(worker, "enc", "the cat", "a", "", [2, 8, 9, 3])
        model = reference(spec)
        ids = [[2, 8, 9, 3], [2, 5, 3], [2, 3], [2, 8, 9, 3]]
        with torch.inference_mode():
            want = [model(input_ids=torch.tensor([each])).last_hidden_state[0].mean(0).numpy() for each in ids]
        np.testing.assert_allclose(got, length_1(np.stack(want)), atol=0.02)
        np.testing.assert_allclose(np.linalg.norm(got, axis=1), 1.0, atol=1e-5)
        np.testing.assert_array_equal(got[0], got[3])
        assert info.weight_bytes > 0 and info.kv_bytes == 0
        await worker.stub.Unload(worker_pb2.UnloadRequest(model="enc", generation=2))
        left = await worker.stub.Describe(worker_pb2.DescribeRequest())
        assert not left.models


async def test_a_cross_encoder_scores_pairs_as_the_reference_does(tmp_path: Path) -> None:
    spec = TinyEncoder(num_labels=1)
    folder = write_encoder(tmp_path, spec)
    async with worker_process() as worker:
        await load(worker, "ranker", folder, max_model_len=32)
        assert list((await described(worker, "ranker")).tasks) == ["score"]
        got = await vectors(worker, "ranker", ("the cat", "sat on a mat"), ("the cat", "b"), kind=SCORE)
        raw = await vectors(worker, "ranker", ("the cat", "b"), kind=SCORE, normalize=False)
        ids, types = [2, 8, 9, 3, 6, 3], [0, 0, 0, 0, 1, 1]
        with torch.inference_mode():
            logits = reference(spec)(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits
        assert got.shape == (2, 1)
        assert raw[0, 0] == pytest.approx(float(logits[0, 0]), abs=0.05)
        assert got[1, 0] == pytest.approx(1 / (1 + float(np.exp(-raw[0, 0]))), abs=1e-6)
        refused = await ask(worker, "ranker", "alone", kind=EMBED)
        assert refused[-1].error.code and not refused[-1].vectors


async def test_texts_that_are_too_long_are_refused_or_cut_as_asked(tmp_path: Path) -> None:
    async with worker_process() as worker:
        await load(worker, "enc", write_encoder(tmp_path, TinyEncoder()), max_model_len=8)
        deltas = await ask(worker, "enc", "a", "a b c the cat sat on")
        assert deltas[-1].error.code == "context_length_exceeded" and deltas[-1].error.param == "inputs[1]"
        cut = await vectors(worker, "enc", "a b c the cat sat on", truncate_tokens=-1)
        whole = await vectors(worker, "enc", "a b c the cat sat")
        np.testing.assert_array_equal(cut, whole)


async def test_what_is_no_encoder_that_can_be_served_is_refused_with_its_reason(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, TinyEncoder())
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_weightedmean_tokens": true}')
    async with worker_process() as worker:
        request = worker_pb2.LoadRequest(model="enc", uri=f"file://{folder}", generation=1)
        last = [progress async for progress in worker.stub.Load(request)][-1]
        assert last.state == worker_pb2.MODEL_STATE_FAILED
        assert "pooling_mode_weightedmean_tokens" in last.error.message


@pytest.mark.parametrize("backend", ["cpu", "ref"])
async def test_a_decoder_gives_its_last_tokens_hidden_state(
    tiny_model: Callable[[TinySpec], Path], backend: str
) -> None:
    transformers = pytest.importorskip("transformers", reason="the reference implementation")
    folder = tiny_model(TinySpec())
    async with worker_process("--backend", backend, "--max-num-batched-tokens", "16") as worker:
        await load(worker, "m", folder, max_num_seqs=8)
        assert list((await described(worker, "m")).tasks) == ["generate", "embed"]
        texts = ["once upon a time there was a long text", "b", "once upon a time there was a long text"]
        got = await vectors(worker, "m", *texts)
        raw = await vectors(worker, "m", *texts, normalize=False)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        rows = []
        for text in texts:
            ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
            with torch.inference_mode():
                rows.append(model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0, -1])
        want = np.stack([row.numpy() for row in rows])
        np.testing.assert_allclose(raw, want, atol=0.02 * float(np.abs(want).max()))
        np.testing.assert_allclose(got, length_1(raw), atol=1e-6)
        # Steps are as inputs arrive; the products of the reference depend on who else is in one.
        np.testing.assert_allclose(raw[0], raw[2], rtol=0, atol=0 if backend == "cpu" else 1e-5)
