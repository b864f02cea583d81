"""Which errors mean that the device is gone, which that it has no room, and which concern one call alone."""

from __future__ import annotations

import weakref

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from naru_proto.errors import Unavailable  # noqa: E402
from naru_worker.adapters.ops.cuda.encoder import CudaEncoder  # noqa: E402
from naru_worker.adapters.ops.cuda.faults import is_device_fault, is_out_of_memory, told_apart  # noqa: E402
from naru_worker.adapters.ops.cuda.memory.errors import DeviceError  # noqa: E402
from naru_worker.adapters.ops.ref_encoder import RefEncoder  # noqa: E402

FAULTS = (
    RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with `TORCH_USE_CUDA_DSA`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(handle)`"),
    RuntimeError("CUDA driver error: unspecified launch failure"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError("Triton Error [CUDA]: misaligned address"),
    RuntimeError("Triton Error [CUDA]: operation not supported on global/shared address space"),
    torch.AcceleratorError("whatever the runtime says"),
    torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
)
NO_ROOM = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
)
OF_ONE_CALL = (
    RuntimeError("shapes do not fit"),
    RuntimeError("the CPU is out of memory"),
    RuntimeError("Triton Error [CUDA]: invalid argument"),
    torch.AcceleratorError("CUDA error: invalid configuration argument"),
    torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing"),
    torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmul(handle)`"),
)


@pytest.mark.parametrize("exc", [*FAULTS, *NO_ROOM, *OF_ONE_CALL], ids=str)
def test_an_error_is_a_failed_device_or_missing_room_or_its_own(exc: RuntimeError) -> None:
    assert (is_device_fault(exc), is_out_of_memory(exc)) == (exc in FAULTS, exc in NO_ROOM)
    expected = DeviceError if exc in FAULTS else Unavailable if exc in NO_ROOM else type(exc)
    with pytest.raises(expected) as caught, told_apart("a launch", "a step of 3 tokens"):
        raise exc
    assert type(caught.value) is expected
    if exc in NO_ROOM:
        assert str(caught.value).startswith("a step of 3 tokens has no room on the GPU: ")
    if exc not in OF_ONE_CALL:
        assert "\n" not in str(caught.value)
        assert caught.value.__cause__ is exc


def test_an_error_of_missing_room_keeps_nothing_of_the_step_alive() -> None:
    held: list[weakref.ref[object]] = []

    def compute() -> None:
        activations = torch.zeros(4)
        held.append(weakref.ref(activations))
        raise NO_ROOM[0]

    with pytest.raises(Unavailable) as caught, told_apart("a launch", "a step of 3 tokens"):
        compute()
    assert caught.value.__cause__ is NO_ROOM[0]
    assert [each() for each in held] == [None]


def test_an_encoder_tells_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = object.__new__(CudaEncoder)
    for exc, expected in ((FAULTS[0], DeviceError), (NO_ROOM[0], Unavailable)):

        def fail(self: object, inputs: object, exc: RuntimeError = exc) -> None:
            raise exc

        monkeypatch.setattr(RefEncoder, "encode", fail)
        with pytest.raises(expected):
            encoder.encode([])
