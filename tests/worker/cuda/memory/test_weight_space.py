"""Weights in an arena: placed through pinned slots, asleep and awake again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_cuda_memory import FakeCudaMemory

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from naru_proto.errors import LoadError  # noqa: E402
from naru_worker.adapters.ops.cuda.memory.arena import MappedArena  # noqa: E402
from naru_worker.adapters.ops.cuda.memory.chunk_pool import ChunkPool  # noqa: E402
from naru_worker.adapters.ops.cuda.memory.device_memory import DeviceMemory, open_device_memory  # noqa: E402
from naru_worker.adapters.ops.cuda.memory.errors import DeviceError, OutOfDeviceMemory  # noqa: E402
from naru_worker.adapters.ops.cuda.memory.pinned_pool import NoPinnedSlot, PinnedPool  # noqa: E402
from naru_worker.adapters.ops.cuda.memory.weight_space import WeightSpace, space_bytes  # noqa: E402

CHUNK = 256


class LateCopy:
    """A copy that is made when somebody waits for it."""

    def __init__(self, target: Any, source: Any) -> None:
        self.target, self.source, self.is_done = target, source, False

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        if not self.is_done:
            self.target.copy_(self.source)
            self.is_done = True


def test_tensors_arrive_whole_though_slots_are_smaller_and_copies_late() -> None:
    tensors = [torch.arange(n, dtype=dtype) for n, dtype in ((50, torch.float32), (7, torch.uint8), (33, torch.int64))]
    copies: list[LateCopy] = []

    def send(target: Any, source: Any) -> LateCopy:
        copies.append(LateCopy(target, source))
        return copies[-1]

    pool = PinnedPool(np.zeros(2 * 64, np.uint8), 64)
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    space = WeightSpace(open_device_memory("cpu", 0), num_bytes, 1, pool, send)
    placed = [space.place(tensor) for tensor in tensors]
    assert pool.num_taken == 0, "each slot is given back with the mark of its copy"
    assert not copies[-1].is_done
    space.finish()
    copies[-2].synchronize()
    for tensor, ours in zip(tensors, placed, strict=True):
        assert torch.equal(tensor, ours)
        assert (ours.data_ptr() - placed[0].data_ptr()) % 256 == 0
    assert len(copies) == 4 + 1 + 5, "as many as slots are filled"
    matrix = torch.arange(6.0).view(2, 3).T
    plain = WeightSpace(open_device_memory("cpu", 0), matrix.nbytes, 1)
    assert torch.equal(plain.place(matrix), matrix)
    plain.close()
    space.close()


def test_a_copy_that_fails_gives_its_slot_back() -> None:
    def send(*_: Any) -> LateCopy:
        raise RuntimeError("the device is gone")

    pool = PinnedPool(np.zeros(64, np.uint8), 64)
    space = WeightSpace(open_device_memory("cpu", 0), 64, 1, pool, send)
    with pytest.raises(RuntimeError, match="the device is gone"):
        space.place(torch.zeros(3))
    assert pool.num_taken == 0


def on_a_fake(num_chunks: int) -> tuple[FakeCudaMemory, DeviceMemory]:
    fake = FakeCudaMemory(granularity=CHUNK)
    return fake, DeviceMemory("cuda:0", ChunkPool(fake, num_chunks * CHUNK, chunk_bytes=CHUNK), "")


def test_memory_for_all_weights_is_taken_before_the_first_or_none() -> None:
    fake, memory = on_a_fake(3)
    with pytest.raises(OutOfDeviceMemory, match="1024 bytes"):
        WeightSpace(memory, 4 * CHUNK, 1)
    assert (fake.ranges, fake.mappings) == ({}, {})
    space = WeightSpace(memory, 2 * CHUNK + 1, 1)
    assert space.arena.mapped_bytes == 3 * CHUNK
    assert space.arena.reserved_bytes >= space_bytes(2 * CHUNK + 1, 1)


def test_weights_sleep_in_pinned_slots_and_wake_where_they_were() -> None:
    fake, memory = on_a_fake(3)
    space = WeightSpace(memory, 600, 1)
    assert isinstance(space.arena, MappedArena)
    fake.write(space.arena.address, bytes(range(200)) * 3)
    small, pool = PinnedPool(np.zeros(500, np.uint8), 100), PinnedPool(np.zeros(600, np.uint8), 100)
    with pytest.raises(ValueError, match="6 slots are asked for"):
        space.sleep(small)
    [busy] = pool.take()
    with pytest.raises(NoPinnedSlot):
        space.sleep(pool)
    pool.give_back(busy)
    fake.fails_in = 1
    with pytest.raises(DeviceError):
        space.sleep(pool)
    assert (space.arena.is_asleep, pool.num_taken) == (False, 0)
    assert (space.sleep(pool), space.sleep(pool)) == (3 * CHUNK, 0)
    assert pool.num_taken == 6
    other = WeightSpace(memory, 3 * CHUNK, 1)
    fake.write(other.arena.address, b"\xff" * 3 * CHUNK)  # type: ignore[attr-defined]
    with pytest.raises(OutOfDeviceMemory):
        space.wake()
    other.close()
    space.wake()
    assert fake.read(space.arena.address, 600) == bytes(range(200)) * 3
    assert pool.num_taken == 0
    assert space.sleep(None) == 3 * CHUNK
    space.close()
    assert (fake.ranges, fake.mappings) == ({}, {})


def test_a_models_weights_fit_the_space_that_is_reckoned_for_them() -> None:
    pytest.importorskip("triton")
    from memory_models import checkpoint_of, config_of

    from naru_worker.adapters.models.decoder import load_weights
    from naru_worker.adapters.ops.cuda import backend
    from naru_worker.adapters.ops.cuda.checkpoint_weights import DeviceWeights
    from naru_worker.adapters.ops.cuda.device import open_gpu

    checkpoint = checkpoint_of(config_of(qkv_bias=True, o_bias=True, mlp_bias=True), {"v": "q8_0", "o": "q4_0"})
    num_bytes = backend.weight_bytes(checkpoint)
    space = WeightSpace(open_device_memory("cpu", 0), num_bytes, checkpoint.config.num_layers)
    weights = load_weights(DeviceWeights(open_gpu(), space.place), checkpoint)  # type: ignore[arg-type]
    plain = load_weights(DeviceWeights(open_gpu()), checkpoint)  # type: ignore[arg-type]
    assert torch.equal(weights.final_norm, plain.final_norm)
    assert torch.equal(weights.layers[1].down.segments[0].values, plain.layers[1].down.segments[0].values)
    assert num_bytes <= space.arena.used_bytes <= space.arena.reserved_bytes

    class Full(WeightSpace):
        def place(self, tensor: Any) -> Any:
            raise OutOfDeviceMemory(tensor.nbytes, "full")

    with pytest.raises(LoadError, match="has no room for"):
        load_weights(
            DeviceWeights(open_gpu(), Full(open_device_memory("cpu", 0), 1, 1).place),  # type: ignore[arg-type]
            checkpoint,
        )
