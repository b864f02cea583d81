"""Bytes that are counted before a model is there, beside those that a runner really has of the device."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from batches import batch_of, lanes_for  # noqa: E402
from fake_cuda_streams import FakeStreams  # noqa: E402
from mapped_host import MappedHost, map_host  # noqa: E402
from memory_models import LEARNED, checkpoint_of, config_of  # noqa: E402
from sampling_batches import sampling_batch  # noqa: E402

from naru_worker.adapters.models.decoder import load_weights  # noqa: E402
from naru_worker.adapters.ops.cuda import backend, sizes  # noqa: E402
from naru_worker.adapters.ops.cuda.checkpoint_weights import Fp8Products, WeightSizer  # noqa: E402
from naru_worker.adapters.ops.cuda.device import GpuDevice, open_gpu, open_upload_slots  # noqa: E402
from naru_worker.adapters.ops.cuda.graphs import MAX_GRAPH_BYTES  # noqa: E402
from naru_worker.adapters.ops.cuda.runner import CudaRunner  # noqa: E402
from naru_worker.adapters.ops.protocol import RunnerOptions, TokenMasks  # noqa: E402

SMALL = config_of(num_layers=1, num_heads=2, num_kv_heads=1, head_dim=32, vocab_size=61)
OPTIONS = RunnerOptions(16, 24, 64, 4, 128, kv_format="f32")


class HostCounting(FakeStreams):
    """Knows which tensors are the host's."""

    def __init__(self) -> None:
        super().__init__(1)
        self.on_host: set[int] = set()

    def host_buffer(self, num_bytes: int) -> Any:
        buffer = super().host_buffer(num_bytes)
        self.on_host.add(buffer.untyped_storage().data_ptr())
        return buffer


def storages(runner: CudaRunner | None) -> dict[int, int]:
    """Memory of torch's allocator that is in use, by address: not what arenas have."""
    gc.collect()
    arenas: list[Any] = [] if runner is None else [runner._space.arena, runner._kv_blocks.arena]
    found: dict[int, int] = {}
    for each in gc.get_objects():
        if type(each) is torch.Tensor and each.device.type == "cpu":
            storage = each.untyped_storage()
            at = storage.data_ptr()
            if not any(arena.address <= at < arena.address + arena.reserved_bytes for arena in arenas):
                found[at] = storage.nbytes()
    return found


def worked(runner: CudaRunner, options: RunnerOptions, vocab_size: int) -> None:
    """Steps of every kind, as wide as they get: prompts, generated tokens in graphs, masks, draws and edits."""
    count = options.max_num_seqs
    lanes = lanes_for([[5, 6, 7]] * count, options.block_size, 8)
    rows: list[dict[str, Any]] = [
        {"temperature": 1.0, "seed": i, "counter": 0, "bias": [(3, 1.0)], "presence_penalty": 0.5} for i in range(count)
    ]
    words = np.full((count, -(-vocab_size // 32)), 0xFFFFFFFF, np.uint32)
    masks = TokenMasks(np.arange(count, dtype=np.int32), words, np.ones(1, np.int32), 1.0)
    for i in range(3):
        batch = batch_of([(lane, 3 if i == 0 else 1) for lane in lanes], options.block_size)
        sampling = sampling_batch(rows, vocab_size, 0)
        output = runner.run(batch, replace(sampling, masks=masks) if i % 2 else sampling)
        for lane, token in zip(lanes, output.token_ids.tolist(), strict=True):
            lane.num_computed = len(lane.token_ids)
            lane.token_ids.append(token)


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (SMALL, {"max_num_seqs": 5, "max_num_tokens": 96, "max_model_len": 256}),
        pytest.param(
            config_of(num_layers=1, num_heads=2, num_kv_heads=1, head_dim=32, vocab_size=5000),
            {"max_num_seqs": 2},
            marks=pytest.mark.gpu_offline,
        ),
        pytest.param(config_of(**LEARNED, num_layers=1), {}, marks=pytest.mark.gpu_offline),
    ],
    ids=["more rows and context", "many tokens", "learned positions"],
)
def test_what_a_model_has_of_the_device_was_counted(
    config: Any, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    map_host(monkeypatch, MappedHost())
    options, checkpoint, streams = replace(OPTIONS, **changes), checkpoint_of(config), HostCounting()
    open_upload_slots()
    before = storages(None)
    runner = CudaRunner(open_gpu(), checkpoint, options, backend.weight_bytes(checkpoint), streams)
    worked(runner, options, config.vocab_size)
    assert runner.graphs.num_graphs > 0
    streams.synchronize()
    ours = {at: size for at, size in storages(runner).items() if at not in before and at not in streams.on_host}
    counted = backend.runner_bytes(checkpoint, options).device_bytes - runner.graphs.limits.max_bytes
    results = 4096  # of the newest steps, which their handles hold
    assert counted / 2 <= sum(ours.values()) <= counted + results
    runner.close()


def gpu_of(total_bytes: int) -> GpuDevice:
    return GpuDevice(torch.device("cpu"), 80, "a GPU", total_bytes, False)


def test_graphs_take_a_small_part_of_a_gpu_and_no_more_than_a_model_may_need() -> None:
    options = RunnerOptions(16, 24, 2048, 64, 8192)
    large = config_of(
        num_layers=1, hidden_size=4096, intermediate_size=14336, num_heads=32, num_kv_heads=8, head_dim=128
    )

    def bound(config: Any, gib: int) -> int:
        return sizes.graph_limits(gpu_of(gib << 30), config, options, Fp8Products()).max_bytes

    assert bound(SMALL, 80) == 64 << 20
    assert 64 << 20 < bound(large, 80) <= MAX_GRAPH_BYTES
    assert bound(large, 4) <= (4 << 30) // 32
    assert sizes.graph_limits(gpu_of(80 << 30), large, options, Fp8Products()).max_rows == 64


def test_products_of_8_bit_floats_are_counted_as_wide_as_they_get() -> None:
    hopper = replace(gpu_of(80 << 30), capability=(9, 0))
    options = RunnerOptions(16, 24, 2048, 64, 8192)
    config = config_of(num_layers=1, hidden_size=256, intermediate_size=512, vocab_size=4096)
    checkpoint = checkpoint_of(config, {"embed": "bf16"}, "e4m3_row")

    def found(capability: tuple[int, int]) -> Fp8Products:
        sizer = WeightSizer(torch.bfloat16, capability)
        load_weights(sizer, checkpoint)  # type: ignore[arg-type]  # the weight half of the protocol
        return sizer.products

    assert found((8, 0)) == Fp8Products()
    assert found((9, 0)) == Fp8Products(layer_width=2 * 512, head_width=4096)

    def workspace(products: Fp8Products) -> int:
        return sizes.workspace_bytes(hopper, config, options, products)

    assert workspace(found((9, 0))) - workspace(found((8, 0))) == 2048 * 2 * 512 * 4
    # All tokens meet the layers, one of each sequence meets the head.
    assert workspace(Fp8Products(16, 4096)) - workspace(Fp8Products()) == 64 * 4096 * 4
    tall = Fp8Products(1 << 18)
    limits = [sizes.graph_limits(hopper, config, options, each).max_bytes for each in (Fp8Products(), tall)]
    assert limits[0] < limits[1]
