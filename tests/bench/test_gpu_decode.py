"""Steps of a whole model as a GPU is measured with them, tiny and under Triton's interpreter."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from bench import gpu_decode  # noqa: E402
from bench.gpu_limits import Limits  # noqa: E402

from naru_operator.core.roofline.models import Model  # noqa: E402
from naru_proto.shapes import ModelShape  # noqa: E402
from naru_worker.adapters.ops.cuda import backend  # noqa: E402

TINY = Model("tiny", ModelShape(1, 32, 48, 2, 1, 16, 97, is_head_tied=True), 64)


def test_each_batch_has_its_step_s_time_and_roof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_decode, "WARM_UPS", 1)
    monkeypatch.setattr(gpu_decode, "STEPS", 3)
    monkeypatch.setattr(gpu_decode, "_kernel_s", lambda _: 0.25)
    runner = backend.load_runner(gpu_decode.random_model(TINY, 20), gpu_decode.options_for((1, 3), 20))
    late = iter([False, False, True])
    limits = Limits(bandwidth=1e9, flops_16=1e12, flops_8=0.0)
    first, second = gpu_decode.decode_results(runner, TINY, limits, (1, 3, 3), 20, lambda: next(late))
    runner.close()
    assert (first.batch, second.batch, first.context, first.kernel_s) == (1, 3, 20, 0.25)
    assert first.step_s > 0 and second.predicted_s > first.predicted_s
    # All weights are read once, a billion bytes a second.
    layer = 32 * (32 + 16 + 16 + 32) + 3 * 48 * 32
    assert first.predicted_s == pytest.approx(2 * (layer + 97 * 32) / 1e9, rel=0.25)


def test_only_what_ran_on_the_gpu_counts_as_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def event(device: str, microseconds: float) -> Any:
        return SimpleNamespace(device_type=SimpleNamespace(name=device), self_device_time_total=microseconds)

    events = [event("CUDA", 300.0), event("CPU", 300.0), event("CUDA", 200.0)]
    profile = SimpleNamespace(key_averages=lambda: events)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: contextlib.nullcontext(profile))
    assert gpu_decode._kernel_s(lambda: None) == pytest.approx(500e-6 / gpu_decode.WARM_UPS)
