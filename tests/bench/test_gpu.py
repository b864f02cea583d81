"""`python -m bench.gpu` where there is no GPU, and the parts of it that need none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from bench import gpu, gpu_end_to_end  # noqa: E402
from bench.peers import PeerError  # noqa: E402


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
