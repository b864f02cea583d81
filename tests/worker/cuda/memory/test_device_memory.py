"""Which memory a device offers, fixed buffers where it cannot map, and the calls to CUDA's driver."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from fake_cuda_memory import FakeCudaMemory

from naru_worker.adapters.ops.cuda.memory.arena import MappedArena
from naru_worker.adapters.ops.cuda.memory.chunk_pool import CHUNK_BYTES
from naru_worker.adapters.ops.cuda.memory.errors import DeviceError, OutOfDeviceMemory, VirtualMemoryUnsupported

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from naru_worker.adapters.ops.cuda.memory.cuda_driver import CudaDriver  # noqa: E402
from naru_worker.adapters.ops.cuda.memory.device_memory import open_device_memory  # noqa: E402
from naru_worker.adapters.ops.cuda.memory.fixed_arena import FixedArena  # noqa: E402
from naru_worker.adapters.ops.cuda.memory.pinned_pool import make_pinned_pool  # noqa: E402


def refusing(error: Exception) -> Any:
    def make(_device: int) -> Any:
        raise error

    return make


def test_a_device_that_maps_has_one_pool_for_all_arenas() -> None:
    fake = FakeCudaMemory(granularity=CHUNK_BYTES, capacity_bytes=4 * CHUNK_BYTES)
    memory = open_device_memory("cuda:0", 3 * CHUNK_BYTES, lambda _device: fake)
    arenas = [memory.make_arena(2 * CHUNK_BYTES) for _ in range(2)]
    assert all(isinstance(arena, MappedArena) and arena.reason == "" for arena in arenas)
    arenas[0].ensure(0, 2 * CHUNK_BYTES)
    with pytest.raises(OutOfDeviceMemory):
        arenas[1].ensure(0, 2 * CHUNK_BYTES)
    arenas[0].sleep()
    arenas[1].ensure(0, 2 * CHUNK_BYTES)
    arenas[1].close()
    assert (memory.trim(), fake.used_bytes) == (2 * CHUNK_BYTES, 0)


def test_before_a_device_is_full_others_give_back_what_they_only_keep() -> None:
    fake = FakeCudaMemory(granularity=CHUNK_BYTES, capacity_bytes=3 * CHUNK_BYTES)
    kept = [fake.create(CHUNK_BYTES) for _ in range(2)]
    calls: list[int] = []

    def make_room() -> None:
        calls.append(len(kept))
        while kept:
            fake.destroy(kept.pop())

    memory = open_device_memory("cuda:0", 8 * CHUNK_BYTES, lambda _device: fake, make_room)
    arena = memory.make_arena(4 * CHUNK_BYTES)
    arena.ensure(0, 3 * CHUNK_BYTES)
    assert (calls, arena.mapped_bytes) == ([2], 3 * CHUNK_BYTES)
    with pytest.raises(OutOfDeviceMemory):
        arena.ensure(0, 4 * CHUNK_BYTES)
    assert (calls, arena.mapped_bytes) == ([2, 0], 3 * CHUNK_BYTES)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (VirtualMemoryUnsupported("GPU 1 does not support virtual memory management"), "does not support"),
        (DeviceError("cuInit", "CUDA_ERROR_NO_DEVICE"), "cuInit failed: CUDA_ERROR_NO_DEVICE"),
    ],
)
def test_a_device_that_does_not_map_has_fixed_buffers_and_says_why(error: Exception, reason: str) -> None:
    memory = open_device_memory("cuda:1", 1 << 20, refusing(error))
    assert (memory.device, memory.pool, memory.trim()) == ("cuda:1", None, 0)
    assert reason in memory.reason


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0"])
def test_a_name_of_no_device_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        open_device_memory(name, 0)


def test_a_fixed_arena_keeps_its_memory_and_content_through_release_and_sleep() -> None:
    memory = open_device_memory("cpu", 0)
    arena = memory.make_arena(64)
    assert isinstance(arena, FixedArena)
    assert "CPU" in arena.reason
    with pytest.raises(ValueError, match="byte 16 is not in use"):
        arena.tensor(16, (4, 2), torch.float32)
    arena.ensure(16, 32)
    assert (arena.reserved_bytes, arena.mapped_bytes, arena.used_bytes) == (64, 64, 32)
    tensor = arena.tensor(16, (4, 2), torch.float32)
    tensor.copy_(torch.arange(8.0).view(4, 2))
    assert (arena.release(40, 24), arena.used_bytes) == (0, 24)
    assert arena.sleep([]) == 0
    with pytest.raises(RuntimeError, match="asleep"):
        arena.ensure(0, 1)
    arena.wake()
    assert arena.tensor(16, (8,), torch.float32).tolist() == list(map(float, range(8))), "release zeroes nothing"
    assert arena.tensor(16, (2,), torch.bfloat16).data_ptr() == tensor.data_ptr()
    with pytest.raises(ValueError, match="outside"):
        arena.tensor(16, (13,), torch.float32)
    arena.close()
    arena.close()
    with pytest.raises(RuntimeError, match="closed"):
        arena.ensure(0, 1)


def test_ordinary_memory_stands_in_for_pinned_memory_where_there_is_no_gpu() -> None:
    pool = make_pinned_pool(2, 16, is_pinned=False)
    [slot] = pool.take()
    torch.from_numpy(slot.array).fill_(7)
    assert slot.array.tolist() == [7] * 16
    with pytest.raises(ValueError, match="num_slots is 0"):
        make_pinned_pool(0, 16)


class FakeApi:
    """The functions of the driver's module; its types and enums are the real ones."""

    def __init__(self, real: Any, failing: str = "", status: str = "CUDA_ERROR_ILLEGAL_ADDRESS") -> None:
        self._real, self._failing, self._status = real, failing, status
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.answers: dict[str, tuple[Any, ...]] = {
            "cuDeviceGet": (5,),
            "cuDeviceGetAttribute": (1,),
            "cuDevicePrimaryCtxRetain": ("context",),
            "cuMemGetAllocationGranularity": (CHUNK_BYTES,),
            "cuMemAddressReserve": (1 << 40,),
            "cuMemCreate": ("handle",),
            "cuMemGetInfo": (3, 8),
            "cuStreamCreate": ("copies",),
        }

    def __getattr__(self, name: str) -> Any:
        if not (name.startswith("cu") and callable(getattr(self._real, name))):
            return getattr(self._real, name)

        signature = str(getattr(self._real, name).__doc__).splitlines()[0]
        num_parameters = len([each for each in signature.partition("(")[2].split(",") if each.strip(" )")])

        def call(*args: Any) -> tuple[Any, ...]:
            assert len(args) == num_parameters, signature
            self.calls.append((name, args))
            if name == self._failing:
                return (getattr(self._real.CUresult, self._status), *(None for _ in self.answers.get(name, ())))
            return (self._real.CUresult.CUDA_SUCCESS, *self.answers.get(name, ()))

        return call


def test_each_call_reaches_the_driver_with_its_arguments_in_the_context_of_its_gpu() -> None:
    api = FakeApi(pytest.importorskip("cuda.bindings.driver"))
    driver = CudaDriver(5, api)
    assert driver.granularity == CHUNK_BYTES
    # One that the streams of steps do not wait for, nor it for them.
    assert api.calls[-1] == ("cuStreamCreate", (api.CUstream_flags.CU_STREAM_NON_BLOCKING,))
    api.calls.clear()
    address, handle = driver.reserve(4 * CHUNK_BYTES), driver.create(CHUNK_BYTES)
    driver.map(address, CHUNK_BYTES, handle)
    driver.set_access(address, CHUNK_BYTES)
    driver.unmap(address, CHUNK_BYTES)
    driver.destroy(handle)
    driver.free_range(address, 4 * CHUNK_BYTES)
    driver.copy_to_host(77, address, 3)
    driver.copy_to_device(address, 77, 3)
    assert driver.memory_info() == (3, 8)
    [properties, access] = [api.calls[1][1][1], api.calls[3][1][2][0]]
    assert properties.location.id == access.location.id == 5
    assert access.flags == api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    assert api.calls == [
        ("cuMemAddressReserve", (4 * CHUNK_BYTES, 0, 0, 0)),
        ("cuMemCreate", (CHUNK_BYTES, properties, 0)),
        ("cuMemMap", (address, CHUNK_BYTES, 0, "handle", 0)),
        ("cuMemSetAccess", (address, CHUNK_BYTES, [access], 1)),
        ("cuMemUnmap", (address, CHUNK_BYTES)),
        ("cuMemRelease", ("handle",)),
        ("cuMemAddressFree", (address, 4 * CHUNK_BYTES)),
        ("cuMemcpyDtoHAsync", (77, address, 3, "copies")),
        ("cuStreamSynchronize", ("copies",)),
        ("cuMemcpyHtoDAsync", (address, 77, 3, "copies")),
        ("cuStreamSynchronize", ("copies",)),
        ("cuMemGetInfo", ()),
    ]
    api.calls.clear()
    thread = threading.Thread(target=driver.memory_info)
    thread.start()
    thread.join()
    assert api.calls == [("cuCtxSetCurrent", ("context",)), ("cuMemGetInfo", ())], "a new thread has no context"


def test_errors_of_the_driver_are_named() -> None:
    real = pytest.importorskip("cuda.bindings.driver")
    with pytest.raises(DeviceError, match=r"cuMemMap failed: CUDA_ERROR_ILLEGAL_ADDRESS \(GPU 0\)") as caught:
        CudaDriver(0, FakeApi(real, "cuMemMap")).map(0, CHUNK_BYTES, "handle")
    assert (caught.value.call, caught.value.name) == ("cuMemMap", "CUDA_ERROR_ILLEGAL_ADDRESS")
    with pytest.raises(OutOfDeviceMemory, match=f"{CHUNK_BYTES} bytes"):
        CudaDriver(0, FakeApi(real, "cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY")).create(CHUNK_BYTES)
    with pytest.raises(DeviceError, match="cuMemCreate failed: CUDA_ERROR_ECC_UNCORRECTABLE"):
        CudaDriver(0, FakeApi(real, "cuMemCreate", "CUDA_ERROR_ECC_UNCORRECTABLE")).create(CHUNK_BYTES)


def test_a_machine_that_cannot_map_says_what_is_missing() -> None:
    real = pytest.importorskip("cuda.bindings.driver")
    too_old = FakeApi(real)
    too_old.answers["cuDeviceGetAttribute"] = (0,)
    with pytest.raises(VirtualMemoryUnsupported, match="GPU 3 does not support virtual memory management"):
        CudaDriver(3, too_old)

    def no_library(_flags: int) -> Any:
        raise RuntimeError("libcuda is not found")

    with pytest.raises(VirtualMemoryUnsupported, match="no NVIDIA driver is installed: libcuda is not found"):
        CudaDriver(0, SimpleNamespace(cuInit=no_library))


def test_without_cuda_bindings_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr("naru_worker.adapters.ops.cuda.memory.cuda_driver.importlib.import_module", missing)
    with pytest.raises(VirtualMemoryUnsupported, match="cuda-bindings is not installed"):
        CudaDriver(0)
