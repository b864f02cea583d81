"""Many models on one device: threads and workspace are shared, results are not touched by what others leave there."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from batches import Lane, all_logits, batch_of
from memory_image import image_of
from memory_models import checkpoint_of, config_of
from sampling_batches import sampling_batch

from naru_proto.errors import LoadError
from naru_worker.adapters.ops import cpu
from naru_worker.adapters.ops.cpu import CpuRunner
from naru_worker.adapters.ops.cpu_device import CpuDevice, open_device
from naru_worker.adapters.ops.protocol import RunnerOptions, TensorFormat
from naru_worker.core.model_config import ModelConfig

pytestmark = pytest.mark.timeout(600)  # the first use of a variant compiles it

SIZE = 16
OPTIONS = RunnerOptions(SIZE, 400, 700, 32, 1200, num_threads=2, kv_format="f16")
LEARNED: dict[str, Any] = {
    "architecture": "gpt2",
    "norm": "layer",
    "activation": "gelu_tanh",
    "rope": None,
    "tie_word_embeddings": True,
    "num_kv_heads": 4,
    "qkv_bias": True,
    "o_bias": True,
    "mlp_bias": True,
}
MODELS: dict[str, tuple[ModelConfig, dict[str, TensorFormat], TensorFormat]] = {
    "nibbles": (config_of(num_heads=6, num_kv_heads=2, head_dim=32), {"lm_head": "q8_0", "k": "f16"}, "q4_1"),
    "windows": (config_of(num_heads=8, head_dim=20, sliding_windows=(70, 200)), {"down": "q8_0"}, "q4_0"),
    "super-blocks": (
        config_of(hidden_size=256, intermediate_size=256, head_dim=64, num_layers=1),
        {"v": "q6_k", "down": "q6_k", "lm_head": "q6_k"},
        "q4_k",
    ),
    "learned": (config_of(**LEARNED), {}, "bf16"),
    "odd": (config_of(hidden_size=50, intermediate_size=33, vocab_size=61, num_heads=40, num_kv_heads=1), {}, "f32"),
}


def nothing() -> None:
    """Before a step."""


def fill_workspace(device: CpuDevice, value: int) -> None:
    library = device.library
    ctypes.memset(library.naru_workspace(device.handle), value, library.naru_claimed_bytes(device.handle))


def compute(runner: CpuRunner, token_ids: Sequence[int]) -> None:
    all_logits(runner, token_ids)


def script(runner: CpuRunner, vocab: int, before: Callable[[], None]) -> list[npt.NDArray[Any]]:
    """Results of steps of every kind, `before` called ahead of each: prompts, one token, few, many, both kinds."""
    rng = np.random.default_rng(5)
    blocks = iter(range(1, 400))
    results: list[npt.NDArray[Any]] = []

    def lane(length: int) -> Lane:
        return Lane(rng.integers(0, vocab, length).tolist(), [next(blocks) for _ in range((length + 9) // SIZE + 1)])

    def step(rows: Sequence[tuple[Lane, int]], every_logit: bool = False) -> None:
        batch = batch_of(rows, SIZE, every_logit=every_logit)
        before()
        results.append(runner.logits(batch).copy())
        kinds: list[dict[str, Any]] = [
            {"num_logprobs": 3, "seed": 7},
            {"temperature": 0.0, "penalties": [(1, 2), (5, 0)], "banned": [3]},
            {"top_k": 9, "top_p": 0.8, "min_p": 0.01, "bias": [(2, 1.5)]},
        ]
        num_rows = len(batch.logits_rows)
        sampling = sampling_batch([kinds[i % 3] for i in range(num_rows)], vocab - 3, 3)
        before()
        output = runner.run(batch, sampling)
        is_told = np.arange(num_rows) % 3 == 0
        results.extend([output.token_ids, *(column[is_told] for column in astuple(output)[1:] if column is not None)])

    long, short = lane(600), [lane(n) for n in (1, 5, 45, 130)]
    step([(long, 600)])
    step([(one, len(one.token_ids)) for one in short], every_logit=True)
    for one in (long, *short):
        one.num_computed = len(one.token_ids)
        one.token_ids.extend(rng.integers(0, vocab, 8).tolist())
    step([(long, 1)])
    step([(one, 1) for one in (long, *short)])
    step([(one, 8) for one in (long, *short)], every_logit=True)
    step([(long, 1), (short[2], 3), (lane(70), 33)])
    return results


@pytest.mark.parametrize("name", MODELS)
def test_what_others_left_in_the_workspace_changes_nothing(variant: str, name: str) -> None:
    config, formats, default = MODELS[name]
    device = open_device(2, variant)
    for kv_format in ("f16", "f32"):
        results = []
        for value in (0x00, 0xFF, 0x7F):  # zeros, NaN, the largest numbers
            options = replace(OPTIONS, kv_format=kv_format)
            runner = cpu.load_runner(checkpoint_of(config, formats, default), options, variant)
            library = device.library
            ctypes.memset(library.naru_kv_base(runner._model), value, library.naru_kv_bytes(runner._model))
            results.append(script(runner, config.vocab_size, partial(fill_workspace, device, value)))
            runner.close()
        for other in results[1:]:
            for expected, actual in zip(results[0], other, strict=True):
                np.testing.assert_array_equal(actual, expected)


def test_models_that_take_turns_answer_as_if_alone(variant: str) -> None:
    pairs = [(checkpoint_of(*MODELS[name]), MODELS[name][0].vocab_size) for name in ("nibbles", "odd")]

    def alone(index: int) -> list[npt.NDArray[Any]]:
        runner = cpu.load_runner(pairs[index][0], OPTIONS, variant)
        results = script(runner, pairs[index][1], nothing)
        runner.close()
        return results

    expected = [alone(0), alone(1)]
    first, second = (cpu.load_runner(checkpoint, OPTIONS, variant) for checkpoint, _ in pairs)
    ids = list(range(40))
    interrupted = script(first, pairs[0][1], partial(compute, second, ids))
    again = script(second, pairs[1][1], partial(compute, first, ids))
    first.close()
    after = script(second, pairs[1][1], nothing)
    second.close()
    for results, wanted in ((interrupted, expected[0]), (again, expected[1]), (after, expected[1])):
        for actual, one in zip(results, wanted, strict=True):
            np.testing.assert_array_equal(actual, one)


def test_steps_of_two_threads_take_turns(variant: str) -> None:
    checkpoints = [checkpoint_of(*MODELS[name]) for name in ("nibbles", "windows")]
    runners = [cpu.load_runner(checkpoint, OPTIONS, variant) for checkpoint in checkpoints]
    ids = np.random.default_rng(3).integers(0, 97, 90).tolist()
    expected = [all_logits(runner, ids) for runner in runners]
    actual: dict[int, list[npt.NDArray[np.float32]]] = {0: [], 1: []}
    start = threading.Barrier(2)

    def work(index: int) -> None:
        start.wait()
        for _ in range(25):
            actual[index].append(all_logits(runners[index], ids))

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, runner in enumerate(runners):
        runner.close()
        assert len(actual[index]) == 25
        for one in actual[index]:
            np.testing.assert_array_equal(one, expected[index])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("changes", [{}, {"max_num_tokens": 17, "num_threads": 3}, {"kv_format": "f32"}])
def test_the_workspace_a_model_claims_is_known_before_loading(variant: str, name: str, changes: dict[str, Any]) -> None:
    config, formats, default = MODELS[name]
    options = replace(OPTIONS, **changes)
    checkpoint = checkpoint_of(config, formats, default)
    runner = cpu.load_runner(checkpoint, options, variant)
    claimed = runner._library.naru_claims(runner._model)
    runner.close()
    assert cpu.workspace_bytes(checkpoint.config, options, variant=variant) == claimed
    device = open_device(options.num_threads, variant)
    assert device.library.naru_claimed_bytes(device.handle) >= claimed


def test_a_step_stays_inside_the_workspace_its_model_claims(variant: str) -> None:
    config, formats, default = MODELS["nibbles"]
    device = open_device(2, variant)
    bytes_before = cpu.workspace_bytes(config, OPTIONS, variant=variant)
    # A larger model makes room behind; what lies there is not the small one's.
    large = replace(OPTIONS, max_model_len=60_000)
    cpu.load_runner(checkpoint_of(config, formats, default), large, variant).close()
    runner = cpu.load_runner(checkpoint_of(config, formats, default), OPTIONS, variant)
    behind = device.library.naru_claimed_bytes(device.handle) - bytes_before
    assert behind > 0
    start = device.library.naru_workspace(device.handle) + bytes_before
    ctypes.memset(start, 0xA5, behind)
    script(runner, config.vocab_size, nothing)
    runner.close()
    assert ctypes.string_at(start, behind) == b"\xa5" * behind


def test_there_is_one_device_for_all_models_of_as_many_threads(variant: str) -> None:
    found: list[CpuDevice] = []
    threads = [threading.Thread(target=lambda: found.append(open_device(5, variant))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(device is found[0] for device in found)
    assert open_device(3, variant) is not found[0]


@pytest.mark.parametrize("num_threads", [0, -1, 1025])
def test_a_number_of_threads_out_of_range_is_a_load_error(num_threads: int) -> None:
    with pytest.raises(LoadError, match=f"num_threads is {num_threads}"):
        open_device(num_threads)


def mappings() -> list[str]:
    return Path("/proc/self/maps").read_text().splitlines()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.fixture
def cycle() -> Iterator[Callable[[int], None]]:
    """Makes, steps and closes so many models, ten alive at a time."""
    config, formats, default = MODELS["nibbles"]
    checkpoint = checkpoint_of(config, formats, default)
    image = image_of(checkpoint)
    batch = batch_of([(Lane([1, 2, 3], [1]), 3)], SIZE)

    def run(count: int) -> None:
        alive: list[CpuRunner] = []
        for i in range(count):
            alive.append(cpu.load_image_runner(image, OPTIONS) if i % 3 else cpu.load_runner(checkpoint, OPTIONS))
            alive[-1].logits(batch)
            if len(alive) == 10:
                alive.pop(0).close()
        for runner in alive:
            runner.close()

    yield run


def test_hundreds_of_models_leave_no_threads_mappings_or_memory(cycle: Callable[[int], None]) -> None:
    cycle(30)
    threads, maps, resident = len(list(Path("/proc/self/task").iterdir())), len(mappings()), resident_bytes()
    cycle(300)
    assert len(list(Path("/proc/self/task").iterdir())) == threads
    assert len(mappings()) <= maps + 3  # the allocator's own
    assert resident_bytes() < resident + 4 * 2**20
