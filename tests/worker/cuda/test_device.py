"""Which GPU is taken, and what is said where none can be."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from naru_proto.errors import LoadError  # noqa: E402
from naru_worker.adapters.model_memory import GPU_SHARE, MachineMemory, open_memory  # noqa: E402
from naru_worker.adapters.ops.cuda import device  # noqa: E402
from naru_worker.adapters.ops.cuda.device import open_gpu  # noqa: E402
from naru_worker.adapters.ops.cuda.judging import SHARED_LIMITS, read_snapshot  # noqa: E402


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine where Triton would compile."""
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(device, "open_gpu", open_gpu.__wrapped__)
    return monkeypatch


def give(machine: pytest.MonkeyPatch, name: str, capability: tuple[int, int], total_bytes: int = 80 << 30) -> None:
    """Has torch see a GPU."""
    facts = SimpleNamespace(name=name, major=capability[0], minor=capability[1], total_memory=total_bytes)
    machine.setattr(torch.cuda, "is_available", lambda: True)
    machine.setattr(torch.cuda, "current_device", lambda: 0)
    machine.setattr(torch.cuda, "get_device_properties", lambda index: facts)


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 0), 80), ((8, 6), 80), ((8, 9), 89), ((9, 0), 90), ((10, 0), 90), ((12, 0), 89), ((12, 1), 89)],
)
def test_a_gpu_runs_with_the_tiles_of_the_next_lower_architecture_that_it_has_the_memory_for(
    machine: pytest.MonkeyPatch, capability: tuple[int, int], arch: int
) -> None:
    give(machine, "some GPU", capability)
    gpu = device.open_gpu()
    assert (gpu.arch, gpu.activation_dtype, gpu.is_interpreted) == (arch, torch.bfloat16, False)
    assert open_memory("cuda").default_budget_bytes() == int(GPU_SHARE * (80 << 30))


@pytest.mark.parametrize("arch", [80, 89])
def test_tiles_that_smaller_gpus_borrow_fit_their_shared_memory(arch: int) -> None:
    # 8.6 (A10, RTX 30) runs those of 8.0, 12.x those of 8.9: both have as much as 8.9.
    kernels = read_snapshot(Path(__file__).parent / "kernels.json").kernels
    taken = {key: figures["shared_bytes"] for key, figures in kernels.items() if key.endswith(f"@{arch}")}
    assert taken
    assert {key: size for key, size in taken.items() if size > SHARED_LIMITS[89]} == {}


def test_an_old_gpu_is_named_with_what_would_do(machine: pytest.MonkeyPatch) -> None:
    give(machine, "Tesla T4", (7, 5))
    with pytest.raises(LoadError, match=r"Tesla T4: .* 7\.5 is too old; 8\.0 .* backend cpu"):
        device.open_gpu()


def test_a_machine_without_a_driver_is_told_what_to_look_at(machine: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system.\nPlease check")

    machine.setattr(torch.cuda, "is_available", lambda: False)
    machine.setattr(torch.cuda, "init", init)
    with pytest.raises(LoadError, match=r"Found no NVIDIA driver on your system\.; check `nvidia-smi`.*nvidia.com/gpu"):
        device.open_gpu()


def test_a_torch_without_cuda_is_told_from_a_machine_without_a_gpu(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(torch.version, "cuda", None)
    with pytest.raises(LoadError, match=r"built without CUDA; install the worker with naru\[cuda\]"):
        device.open_gpu()


def test_under_the_interpreter_the_gpu_is_the_machine() -> None:
    assert open_gpu().is_interpreted
    assert isinstance(open_memory("cuda"), MachineMemory)
    assert isinstance(open_memory("cpu"), MachineMemory)
    whole, half = (open_memory("ref", count).default_budget_bytes() for count in (1, 2))
    assert half == whole // 2, "ranks share the machine's memory"


def test_where_nothing_can_be_pinned_weights_go_up_through_ordinary_memory(
    machine: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Torch really refuses here: there is no driver."""
    give(machine, "some GPU", (9, 0))
    slots = device.open_upload_slots.__wrapped__()
    assert slots.slot_bytes == device.SLOT_BYTES and len(slots.take(2)) == 2
    assert "weights go up more slowly" in caplog.text and "ulimit -l" in caplog.text
