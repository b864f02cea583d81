"""Encoders against the reference implementation: each family, each way of pooling, each instruction set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_encoders import TinyEncoder, find_minilm, inputs_of, reference, write_encoder

from naru_worker.adapters.engine.batch_runner import EncoderInput, EncoderRunner
from naru_worker.adapters.ops import cpu_encoder
from naru_worker.adapters.ops.encoder_options import EncoderOptions
from naru_worker.adapters.ops.protocol import FloatArray
from naru_worker.adapters.weights.encoder_folder import EncoderCheckpoint
from naru_worker.native.isa import VARIANTS, runnable

pytestmark = pytest.mark.timeout(600)  # the first use of a variant compiles it

torch = pytest.importorskip("torch", reason="the reference needs torch")

BACKENDS = ("ref", *VARIANTS)
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 64, 78)
SPECS = {
    "bert": TinyEncoder(),
    "bert prefixed": TinyEncoder(is_prefixed=True, pooling="cls", activation="gelu_new"),
    "bert of odd sizes": TinyEncoder(hidden_size=52, inner_size=74, num_heads=2, num_layers=1),
    "bert of wide heads": TinyEncoder(hidden_size=160, num_heads=2, pooling="max", activation="relu"),
    "roberta": TinyEncoder("roberta", pooling="mean_sqrt_len"),
    "xlm-roberta prefixed": TinyEncoder("xlm-roberta", is_prefixed=True, pooling="last"),
    "distilbert": TinyEncoder("distilbert"),
    "bert scores": TinyEncoder(num_labels=1),
    "bert labels": TinyEncoder(num_labels=3),
    "roberta scores": TinyEncoder("roberta", num_labels=1),
    "distilbert scores": TinyEncoder("distilbert", num_labels=2),
}

Load = Callable[..., EncoderRunner]


@pytest.fixture
def load() -> Any:
    """Loads a folder on a backend; everything is closed at the end."""
    runners: list[EncoderRunner] = []

    def make(folder: Path, backend: str, num_threads: int = 2) -> EncoderRunner:
        checkpoint = EncoderCheckpoint(folder)
        config = checkpoint.config
        options = EncoderOptions(config.max_tokens, 4096, num_threads)
        if backend == "ref":
            from naru_worker.adapters.ops import ref_encoder

            runner: EncoderRunner = ref_encoder.load_encoder(config, checkpoint.tensors(), options)
        elif runnable(backend):
            runner = cpu_encoder.load_encoder(config, checkpoint.tensors(), options, backend)
        else:
            pytest.skip(f"this CPU does not offer all that {backend} needs")
        checkpoint.close()
        runners.append(runner)
        return runner

    yield make
    for runner in runners:
        runner.close()


def expected(model: Any, spec: TinyEncoder, each: EncoderInput) -> FloatArray:
    """One result by the reference, pooled by hand."""
    given = {"input_ids": torch.tensor([each.token_ids]), "attention_mask": torch.ones(1, len(each.token_ids))}
    if each.token_types:
        given["token_type_ids"] = torch.tensor([each.token_types])
    with torch.inference_mode():
        if spec.num_labels:
            scores: FloatArray = model(**given).logits[0].numpy()
            return scores
        base = getattr(model, model.base_model_prefix, model)
        hidden = base(**given).last_hidden_state[0]
    pooled = {
        "mean": lambda: hidden.mean(0),
        "cls": lambda: hidden[0],
        "max": lambda: hidden.max(0).values,
        "last": lambda: hidden[-1],
        "mean_sqrt_len": lambda: hidden.sum(0) / len(hidden) ** 0.5,
    }
    result: FloatArray = pooled[spec.pooling]().numpy()
    return result


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SPECS)
def test_every_family_gives_what_the_reference_gives(tmp_path: Path, load: Load, name: str, backend: str) -> None:
    spec = SPECS[name]
    runner = load(write_encoder(tmp_path, spec), backend)
    inputs = inputs_of(*(n for n in LENGTHS if n <= 78), types=spec.family == "bert")
    got = runner.encode(inputs)
    model = reference(spec)
    want = np.stack([expected(model, spec, each) for each in inputs])
    assert got.shape == want.shape == (len(inputs), runner.width)
    # Tiles round operands to eight bits of mantissa; all else is float32.
    tolerance = 0.04 if backend == "amx" else 2e-4
    np.testing.assert_allclose(got, want, atol=tolerance * float(np.abs(want).max()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_real_model_gives_what_the_reference_gives(load: Load, backend: str) -> None:
    transformers = pytest.importorskip("transformers", reason="the reference implementation")
    folder = find_minilm()
    runner = load(folder, backend)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    rng = np.random.default_rng(3)
    inputs = [
        EncoderInput((101, *(int(i) for i in rng.integers(1000, 30000, n)), 102)) for n in (0, 1, 7, 30, 100, 254)
    ]
    got = runner.encode(inputs)
    want = np.stack([expected(model, TinyEncoder(), each) for each in inputs])
    cosines = (got * want).sum(1) / np.linalg.norm(got, axis=1) / np.linalg.norm(want, axis=1)
    assert cosines.min() > (0.9999 if backend == "amx" else 0.999999)


@pytest.mark.parametrize("backend", VARIANTS)
def test_batch_mates_order_and_threads_change_no_bit(tmp_path: Path, load: Load, backend: str) -> None:
    folder = write_encoder(tmp_path, TinyEncoder(hidden_size=96, num_heads=3, max_positions=300))
    runner = load(folder, backend)
    inputs = inputs_of(*range(1, 40), 250, 3, 131, 300, 1, 128, types=True)
    together = runner.encode(inputs)
    np.testing.assert_array_equal(np.concatenate([runner.encode([each]) for each in inputs]), together)
    np.testing.assert_array_equal(runner.encode(inputs[::-1])[::-1], together)
    np.testing.assert_array_equal(load(folder, backend, num_threads=1).encode(inputs), together)


@pytest.mark.parametrize("backend", VARIANTS)
def test_a_batch_does_not_read_what_another_model_left_behind(tmp_path: Path, load: Load, backend: str) -> None:
    odd = load(write_encoder(tmp_path / "odd", TinyEncoder(hidden_size=52, inner_size=74, num_heads=2)), backend)
    inputs = inputs_of(1, 5, 33, 70)
    clean = odd.encode(inputs)
    library, device = odd._library, cpu_encoder.open_device(2, backend)  # type: ignore[attr-defined]
    import ctypes

    ctypes.memset(library.naru_workspace(device.handle), 0xFF, odd.workspace_bytes)  # every float and bf16 is NaN
    np.testing.assert_array_equal(odd.encode(inputs), clean)
