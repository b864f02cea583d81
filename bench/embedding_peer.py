"""Other makers of embeddings, in an environment of their own: answers lines of JSON. Started by `bench.api_embeddings`.

``python -P embedding_peer.py MODEL_FOLDER WORK_FOLDER THREADS``. The first line out has the peers' names. A line in,
{"peer": name, "texts": [...], "rounds": n}, gets a line out: {"best_s": seconds of the fastest round, "vectors": those
of the first texts}. Imports nothing of Naru.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NUM_VECTORS = 4
BATCH_SIZE = 64
Encode = Callable[[list[str]], Any]


def main(folder: Path, work: Path, threads: int) -> None:
    """Serves until standard input ends."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries talk on standard output
    peers = {"torch": torch_peer(folder, threads, ""), "torch bf16": torch_peer(folder, threads, "bfloat16")}
    peers["onnxruntime"] = onnx_peer(folder, work, threads)
    print(json.dumps(list(peers)), file=out, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        encode, texts = peers[asked["peer"]], asked["texts"]
        vectors = encode(texts)
        best_s = float("inf")
        for _ in range(asked["rounds"]):
            start_s = time.perf_counter()
            encode(texts)
            best_s = min(best_s, time.perf_counter() - start_s)
        print(json.dumps({"best_s": best_s, "vectors": vectors[:NUM_VECTORS].tolist()}), file=out, flush=True)


def torch_peer(folder: Path, threads: int, dtype: str) -> Encode:
    """sentence-transformers, which sorts texts by length itself."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    kwargs = {"torch_dtype": dtype} if dtype else {}
    model = SentenceTransformer(str(folder), device="cpu", model_kwargs=kwargs, local_files_only=True)

    def encode(texts: list[str]) -> Any:
        with torch.inference_mode():
            return model.encode(texts, batch_size=BATCH_SIZE, show_progress_bar=False).astype("float32")

    return encode


def onnx_peer(folder: Path, work: Path, threads: int) -> Encode:
    """Onnxruntime with the fused graph, batches sorted by length and padded to their longest."""
    import numpy as np
    import onnxruntime
    from tokenizers import Tokenizer

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(exported(folder, work)), options, providers=["CPUExecutionProvider"])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(max_length=256)
    tokenizer.enable_padding()
    names = {each.name for each in session.get_inputs()}

    def encode(texts: list[str]) -> Any:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        result = np.empty((len(texts), 384), np.float32)
        for start in range(0, len(texts), BATCH_SIZE):
            part = order[start : start + BATCH_SIZE]
            found = tokenizer.encode_batch([texts[i] for i in part])
            given = {
                "input_ids": np.array([each.ids for each in found], np.int64),
                "attention_mask": np.array([each.attention_mask for each in found], np.int64),
                "token_type_ids": np.array([each.type_ids for each in found], np.int64),
            }
            hidden = session.run(None, {name: value for name, value in given.items() if name in names})[0]
            mask = given["attention_mask"][:, :, None].astype(np.float32)
            pooled = (hidden * mask).sum(1) / mask.sum(1)
            result[part] = pooled / np.linalg.norm(pooled, axis=1, keepdims=True)
        return result

    return encode


def exported(folder: Path, work: Path) -> Path:
    """The model as ONNX, made once: exported, then fused by onnxruntime's own optimizer."""
    path = work / "encoder.onnx"
    if path.exists():
        return path
    import torch
    from onnxruntime.transformers import optimizer
    from transformers import AutoModel

    work.mkdir(parents=True, exist_ok=True)
    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    config = model.config

    class Hidden(torch.nn.Module):
        """The model with its inputs in order, and one output."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Any, mask: Any, types: Any) -> Any:
            return self.model(input_ids=ids, attention_mask=mask, token_type_ids=types).last_hidden_state

    ones = torch.ones((2, 16), dtype=torch.long)
    axes = {0: "batch", 1: "tokens"}
    names = ["input_ids", "attention_mask", "token_type_ids"]
    plain = work / "plain.onnx"
    torch.onnx.export(
        Hidden().eval(),
        (ones, ones, torch.zeros_like(ones)),
        str(plain),
        input_names=names,
        output_names=["last_hidden_state"],
        dynamic_axes={name: axes for name in [*names, "last_hidden_state"]},
        opset_version=17,
        dynamo=False,
    )
    fused = optimizer.optimize_model(
        str(plain), model_type="bert", num_heads=config.num_attention_heads, hidden_size=config.hidden_size
    )
    fused.save_model_to_file(str(path))
    return path


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
