"""`python -m bench.gpu` where there is no GPU, and the parts of it that need none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from bench import gpu, gpu_attention_cases, gpu_cases, gpu_decode, gpu_end_to_end, gpu_timing  # noqa: E402
from bench.gpu_cases import Setup  # noqa: E402
from bench.gpu_place import Place  # noqa: E402
from bench.peers import PeerError  # noqa: E402

from naru_operator.core.roofline.models import Model  # noqa: E402
from naru_proto.errors import LoadError  # noqa: E402
from naru_proto.shapes import ModelShape  # noqa: E402


class Ticking:
    """A GPU's clock that is a millisecond later at each mark."""

    def __init__(self) -> None:
        self._num_marks = 0

    def hold(self) -> None: ...

    def flush(self) -> None: ...

    def wait(self) -> None: ...

    def mark(self) -> Any:
        self._num_marks += 1
        return self._num_marks

    def elapsed_s(self, start: Any, end: Any) -> float:
        return float(end - start) * 1e-3


MEASURED = ("place", "limits", "cases", "attention_cases", "sampler_cases", "run", "decode", "report")


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Place:
    """The CPU under Triton's interpreter, with the smallest sizes that all cases take."""
    monkeypatch.setattr(gpu_decode, "WARM_UPS", 1)
    monkeypatch.setattr(gpu_decode, "STEPS", 1)
    for name in ("WARM_UPS", "MIN_RUNS", "MAX_RUNS"):
        monkeypatch.setattr(gpu_timing, name, int(name != "WARM_UPS"))
    sizes: dict[str, Any] = {"inner": 64, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "vocab": 100, "batch": 2}
    setup = Setup(torch.device("cpu"), 80, torch.float32, hidden=256, context=4, prompt=18, **sizes)
    model = Model("tiny", ModelShape(1, 32, 48, 2, 1, 16, 97, is_head_tied=True), 64)
    return Place("NVIDIA Test", setup, Ticking(), 1 << 12, 16, model, (1,), 20)


def test_kernels_and_steps_are_measured_without_what_only_tests_and_servers_need() -> None:
    # Whoever lends a GPU for an hour has torch and Triton there, and not the rest.
    absent = ("gguf", "pydantic", "grpc", "httpx", "psutil", "tokenizers", "transformers", "safetensors", "yaml")
    modules = ", ".join(f"bench.gpu_{name}" for name in MEASURED)
    script = f"import sys; sys.modules.update(dict.fromkeys({absent!r})); import {modules}"
    root = Path(gpu.__file__).parents[1]
    subprocess.run([sys.executable, "-c", script], cwd=root, check=True)


def test_a_whole_run_writes_both_files_and_says_what_it_left_out(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main(["--output", str(tmp_path), "--seconds", "100000"], place) == 1
    stored = json.loads((tmp_path / "gpu-nvidia-test.json").read_text())
    assert len(stored["kernels"]) == 6 + 7 + 2 + 12
    assert [kernel["name"] for kernel in stored["kernels"] if not kernel["is_right"]] == []
    assert [step["batch"] for step in stored["decode"]] == [1]
    assert stored["failures"] == [] and stored["notes"] == ["end to end: give a Hugging Face folder with --model"]
    assert stored["misses"], "the interpreter is slower than wanted"
    assert capsys.readouterr().out.endswith((tmp_path / "gpu-nvidia-test.md").read_text() + "\n")


def test_a_part_that_fails_is_a_miss_and_the_others_are_measured(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_cache(*args: object) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.\nmore")

    def no_model(*args: object) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(gpu_attention_cases, "made_cache", no_cache)
    monkeypatch.setattr(gpu_cases, "product_cases", lambda setup: iter(()))
    monkeypatch.setattr(gpu_decode, "random_model", no_model)
    argv = ["--output", str(tmp_path), "--seconds", "100000", "--model", str(tmp_path / "absent")]
    assert gpu.main(argv, place) == 1
    stored = json.loads((tmp_path / "gpu-nvidia-test.json").read_text())
    assert len(stored["kernels"]) == 7 + 2
    assert stored["failures"][:2] == [
        "kernels of cache_cases: OutOfMemoryError: CUDA out of memory.",
        "steps of a whole model: RuntimeError: no such kernel",
    ]
    assert stored["failures"][2].startswith("end to end, naru: PeerError: ")
    assert set(stored["failures"]) <= set(stored["misses"])


def test_a_gpu_that_the_backend_does_not_take_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def too_old() -> Place:
        raise LoadError("Tesla T4: too old")

    monkeypatch.setattr(gpu, "why_no_gpu", lambda: "")
    monkeypatch.setattr("bench.gpu_place.gpu_place", too_old)
    assert gpu.main(["--output", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "bench.gpu: Tesla T4: too old\n"


def test_without_a_gpu_it_says_why_and_what_can_be_done_instead(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert gpu.main(["--output", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "finds no NVIDIA GPU: see `nvidia-smi` and its driver's version." in said
    assert "make test-gpu-offline" in said and "naru plan --roofline" in said
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA: pip install 'naru[cuda]'" in gpu.why_no_gpu()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "TRITON_INTERPRET is set, so kernels would run on the CPU: unset it" in gpu.why_no_gpu()
    assert list(tmp_path.iterdir()) == []


def test_a_gpus_name_makes_a_files_name() -> None:
    assert gpu.slug("NVIDIA A100-SXM4-80GB") == "nvidia-a100-sxm4-80gb"


def test_a_deadline_is_over_earlier_for_what_has_to_leave_time_to_others() -> None:
    times = iter([0.0, 50.0, 50.0, 100.0])
    deadline = gpu.Deadline(100.0, lambda: next(times))
    assert [deadline.is_over(), deadline.is_over(60.0), deadline.is_over()] == [False, True, True]


def test_words_come_from_a_folders_tokenizer_in_the_order_of_their_ids(tmp_path: Path) -> None:
    words = [f"word{first}{second}" for first in "abcdefgh" for second in "abcdefgh"]
    vocabulary = {token: 1000 - at for at, word in enumerate(words) for token in (word, f"Ġ{word}")}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    assert list(gpu_end_to_end.words_of(tmp_path)) == words[::-1]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    with pytest.raises(PeerError, match=r"has 0 plain one-token words.*; give another model"):
        gpu_end_to_end.words_of(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(PeerError, match=r"tokenizer\.json has no vocabulary \(KeyError\); give a Hugging Face folder"):
        gpu_end_to_end.words_of(tmp_path)


def test_vllm_is_asked_for_where_it_is_installed_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_end_to_end.vllm_spec(tmp_path, tmp_path) is None
    program = tmp_path / "vllm"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    spec = gpu_end_to_end.vllm_spec(tmp_path, tmp_path)
    assert spec is not None and spec.argv[:3] == (str(program), "serve", str(tmp_path))


def test_naru_serves_the_same_folder_with_the_backend_cuda(tmp_path: Path) -> None:
    spec = gpu_end_to_end.naru_spec(tmp_path, tmp_path)
    assert spec.environment["NARU_WORKER_BACKEND"] == "cuda"
    manifest = json.loads((tmp_path / "naru-model.yaml").read_text())
    assert manifest["spec"]["model"]["uri"] == tmp_path.as_uri()
