"""A runner that slept, under Triton's interpreter: the same answers, and nothing runs meanwhile."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.torch
pytest.importorskip("torch")
pytest.importorskip("triton")

from batches import batch_of, lanes_for  # noqa: E402
from memory_models import checkpoint_of, config_of  # noqa: E402

from naru_proto.errors import InternalError, LoadError  # noqa: E402
from naru_worker.adapters.ops.cuda import backend  # noqa: E402
from naru_worker.adapters.ops.cuda.memory.device_memory import DeviceMemory  # noqa: E402
from naru_worker.adapters.ops.cuda.memory.errors import OutOfDeviceMemory  # noqa: E402
from naru_worker.adapters.ops.cuda.memory.pinned_pool import make_pinned_pool  # noqa: E402
from naru_worker.adapters.ops.protocol import RunnerOptions  # noqa: E402

OPTIONS = RunnerOptions(16, 8, 64, 4, 128, kv_format="f32")
CHECKPOINT = checkpoint_of(config_of(num_layers=1))


def test_a_runner_that_slept_gives_the_answers_it_gave() -> None:
    runner = backend.load_runner(CHECKPOINT, OPTIONS)
    [lane] = lanes_for([[5, 6, 7]], 16, 0)
    batch = batch_of([(lane, 3)], 16)
    expected = runner.logits(batch).copy()
    with pytest.raises(ValueError, match="slots are asked for"):
        runner.sleep(make_pinned_pool(1, 64, is_pinned=False))
    pool = make_pinned_pool(64, 4096, is_pinned=False)
    runner.sleep(pool)
    with pytest.raises(InternalError, match="asleep"):
        runner.logits(batch)
    runner.wake()
    assert pool.num_taken == 0
    assert np.array_equal(runner.logits(batch), expected)
    runner.close()


def test_a_gpu_without_room_for_the_weights_says_so_before_any_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_memory: DeviceMemory, num_bytes: int) -> None:
        raise OutOfDeviceMemory(num_bytes, "full")

    monkeypatch.setattr(DeviceMemory, "make_arena", full)
    with pytest.raises(LoadError, match=r"no room for .* bytes of weights; lower memory_budget_bytes"):
        backend.load_runner(CHECKPOINT, OPTIONS)
