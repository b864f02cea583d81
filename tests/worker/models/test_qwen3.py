"""A random Qwen 3 as transformers saves it: logits and greedy answers are its own, on `ref` and every CPU variant."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batches import all_logits, greedy
from gguf_builder import model_file
from tiny_models import TinySpec, write_model

from naru_worker.adapters.ops import cpu
from naru_worker.adapters.ops.protocol import Runner, RunnerOptions
from naru_worker.adapters.weights.opening import open_checkpoint
from naru_worker.native.isa import VARIANTS, cpu_flags, runnable

transformers = pytest.importorskip("transformers", reason="parity is measured against transformers")
torch = pytest.importorskip("torch", reason="transformers needs torch")

from naru_worker.adapters.ops import ref  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]  # the first use of a variant compiles it

OPTIONS = RunnerOptions(16, 64, 256, 8, 256, num_threads=2, kv_format="f32")
IDS = np.random.default_rng(3).integers(0, 199, 90).tolist()
SPEC = TinySpec("qwen3", head_dim=32)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder and the model that was saved there."""
    torch.manual_seed(5)
    config = transformers.Qwen3Config(
        vocab_size=199,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=24,
        initializer_range=0.15,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    model = transformers.Qwen3ForCausalLM(config).eval()
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):  # they are all ones
            torch.nn.init.uniform_(weight, 0.4, 1.6)
    folder = tmp_path_factory.mktemp("qwen3")
    model.save_pretrained(folder)
    return folder, model


def assert_answers_as(model: Any, runner: Runner) -> None:
    with torch.inference_mode():
        expected = model(torch.tensor([IDS])).logits[0].numpy()
        answer = model.generate(torch.tensor([IDS[:20]]), max_new_tokens=16, do_sample=False, eos_token_id=None)
    np.testing.assert_allclose(all_logits(runner, IDS), expected, atol=1e-4, rtol=0)
    np.testing.assert_allclose(all_logits(runner, IDS, 13), expected, atol=1e-4, rtol=0)
    assert greedy(runner, [IDS[:20]], 16)[0] == answer[:, 20:].tolist()
    runner.close()


def test_the_reference_backend_answers_as_transformers(saved: tuple[Path, Any]) -> None:
    folder, model = saved
    assert_answers_as(model, ref.load_runner(open_checkpoint(folder), OPTIONS))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_cpu_backend_answers_as_transformers(saved: tuple[Path, Any], variant: str) -> None:
    if not runnable(variant, cpu_flags()):
        pytest.skip(f"this CPU does not offer all that {variant} needs")
    folder, model = saved
    assert_answers_as(model, cpu.load_runner(open_checkpoint(folder), OPTIONS, variant))


def test_without_its_norms_it_would_answer_otherwise(saved: tuple[Path, Any]) -> None:
    """What the tests above see: norms that are left out move logits by more than they allow."""
    folder, model = saved
    checkpoint = open_checkpoint(folder)
    checkpoint.config = replace(checkpoint.config, qk_norm=False)
    runner = cpu.load_runner(checkpoint, OPTIONS)
    with torch.inference_mode():
        expected = model(torch.tensor([IDS])).logits[0].numpy()
    assert np.abs(all_logits(runner, IDS) - expected).max() > 0.1
    runner.close()


def test_gguf_and_folder_give_the_same_logits(tmp_path: Path) -> None:
    write_model(tmp_path, SPEC)
    path = tmp_path / "m.gguf"
    path.write_bytes(model_file(SPEC))
    for backend in (ref, cpu):
        folder, file = (backend.load_runner(open_checkpoint(each), OPTIONS) for each in (tmp_path, path))
        np.testing.assert_allclose(all_logits(file, IDS), all_logits(folder, IDS), atol=1e-5)
        folder.close()
        file.close()
