"""A model whose image is still being read in: steps wait for the weights they need, and may be run again."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from batches import Lane, batch_of
from memory_image import MemoryImage, image_of
from memory_models import checkpoint_of, config_of
from sampling_batches import greedy_batch, sampling_batch

from naru_proto.errors import InternalError, LoadError
from naru_worker.adapters.ops import cpu
from naru_worker.adapters.ops.cpu import CpuRunner
from naru_worker.adapters.ops.protocol import BatchInputs, RunnerOptions, WeightsPending

pytestmark = pytest.mark.timeout(600)  # the first use of a variant compiles it

OPTIONS = RunnerOptions(16, 64, 700, 8, 800, num_threads=2, kv_format="f16")
CONFIG = config_of(num_layers=3, qkv_bias=True)
VOCAB = CONFIG.vocab_size
NEVER_S = 0.0
LONG_S = 120.0


class Arriving:
    """An image whose bytes come in piece by piece; what has not come yet is NaN."""

    def __init__(self) -> None:
        self.image: MemoryImage = image_of(checkpoint_of(CONFIG, {"lm_head": "q8_0"}, "q4_1"))
        self._whole = self.image.data.copy()
        self._arrived = 0
        self.image.data[:] = 0xFF

    def ends(self) -> list[int]:
        """Where each weight ends, in order, and the end of the image."""
        ends = [s.offset + s.num_bytes for place in self.image.matrices.values() for s in place.segments]
        ends += [offset + 4 * length for offset, length in self.image.vectors.values()]
        return [*sorted(ends), self.image.num_bytes]

    def bring(self, num_bytes: int) -> int:
        self.image.data[self._arrived : num_bytes] = self._whole[self._arrived : num_bytes]
        self._arrived = num_bytes
        return num_bytes


@pytest.fixture
def arriving() -> Arriving:
    return Arriving()


@pytest.fixture
def expected(variant: str) -> Iterator[CpuRunner]:
    """The same model, loaded whole."""
    runner = cpu.load_runner(checkpoint_of(CONFIG, {"lm_head": "q8_0"}, "q4_1"), OPTIONS, variant)
    yield runner
    runner.close()


def prompt_batch(length: int = 600) -> BatchInputs:
    ids = np.random.default_rng(4).integers(0, VOCAB, length).tolist()
    return batch_of([(Lane(ids, list(range(1, length // 16 + 2))), length)], 16)


def cache(runner: CpuRunner) -> npt.NDArray[np.uint8]:
    """A view of the whole KV cache."""
    library = runner._library
    size = library.naru_kv_bytes(runner._model)
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(library.naru_kv_base(runner._model)))


def test_a_step_is_pending_until_the_last_weight_is_there_and_then_right(
    variant: str, arriving: Arriving, expected: CpuRunner
) -> None:
    runner = cpu.load_image_runner(arriving.image, OPTIONS, ready_bytes=0, variant=variant, max_wait_s=NEVER_S)
    batch, sampling = prompt_batch(), sampling_batch([{"seed": 5, "num_logprobs": 2}], VOCAB, 2)
    ends = arriving.ends()
    for end in ends[:-1]:
        with pytest.raises(WeightsPending):
            runner.run(batch, sampling)
        # One byte short of a weight is not the weight.
        runner.set_ready_bytes(end - 1)
        with pytest.raises(WeightsPending):
            runner.run(batch, sampling)
        runner.set_ready_bytes(arriving.bring(end))
    output, wanted = runner.run(batch, sampling), expected.run(batch, sampling)
    np.testing.assert_array_equal(output.token_ids, wanted.token_ids)
    np.testing.assert_array_equal(output.top_logprobs, wanted.top_logprobs)
    np.testing.assert_array_equal(runner.logits(batch), expected.logits(batch))
    np.testing.assert_array_equal(cache(runner), cache(expected))
    runner.close()


def test_a_waiting_step_goes_on_layer_by_layer_as_weights_arrive(
    variant: str, arriving: Arriving, expected: CpuRunner
) -> None:
    runner = cpu.load_image_runner(arriving.image, OPTIONS, ready_bytes=0, variant=variant, max_wait_s=LONG_S)
    batch, results = prompt_batch(), []
    thread = threading.Thread(target=lambda: results.append(runner.logits(batch)))
    thread.start()
    bytes_per_layer = cpu.kv_block_bytes(CONFIG, OPTIONS) // CONFIG.num_layers
    blocks = cache(runner).reshape(OPTIONS.num_blocks, CONFIG.num_layers, bytes_per_layer)
    for layer in range(CONFIG.num_layers):
        place = arriving.image.matrices[(f"layers.{layer}.q", f"layers.{layer}.k", f"layers.{layer}.v")]
        assert not blocks[1, layer].any(), "nothing is computed from weights that are not there"
        runner.set_ready_bytes(arriving.bring(place.bias_offset + 4 * (128 + 16)))
        while not blocks[1, layer].any():
            assert thread.is_alive(), results
            thread.join(0.001)
    assert thread.is_alive()
    runner.set_ready_bytes(arriving.bring(arriving.image.num_bytes))
    thread.join()
    np.testing.assert_array_equal(results[0], expected.logits(batch))
    runner.close()


def test_a_failed_load_ends_the_step_that_waits_and_those_after_it(variant: str, arriving: Arriving) -> None:
    runner = cpu.load_image_runner(arriving.image, OPTIONS, ready_bytes=0, variant=variant, max_wait_s=LONG_S)
    errors: list[Exception] = []

    def step() -> None:
        try:
            runner.run(prompt_batch(), greedy_batch(1, VOCAB))
        except LoadError as error:
            errors.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    runner.fail(LoadError("the disk is gone"))
    thread.join()
    step()
    assert [str(error) for error in errors] == ["the disk is gone"] * 2
    runner.close()


def test_a_failed_load_without_a_reason_says_what_to_do(arriving: Arriving) -> None:
    runner = cpu.load_image_runner(arriving.image, OPTIONS, ready_bytes=0, max_wait_s=LONG_S)
    runner.fail()
    with pytest.raises(LoadError, match="load the model again"):
        runner.logits(prompt_batch())
    runner.close()


def test_a_model_that_is_all_there_outlives_a_failed_load(arriving: Arriving) -> None:
    arriving.bring(arriving.image.num_bytes)
    runner = cpu.load_image_runner(arriving.image, OPTIONS)
    before = runner.logits(prompt_batch())
    runner.fail()
    np.testing.assert_array_equal(runner.logits(prompt_batch()), before)
    runner.close()


def test_copies_of_a_pending_step_are_made_once(variant: str, arriving: Arriving, expected: CpuRunner) -> None:
    """Blocks that are passed on to a block and then overwritten would differ when copied twice."""
    runner = cpu.load_image_runner(arriving.image, OPTIONS, ready_bytes=0, variant=variant, max_wait_s=NEVER_S)
    rng = np.random.default_rng(8)
    content = rng.integers(0, 60, cache(runner).shape, dtype=np.uint8)
    cache(runner)[:] = content
    cache(expected)[:] = content
    copies = np.array([(20, 21), (22, 20), (23, 22)], np.int32)
    batch = replace(prompt_batch(40), copies=copies)
    for end in (0, *arriving.ends()[:-2]):
        runner.set_ready_bytes(arriving.bring(end))
        with pytest.raises(WeightsPending):
            runner.logits(batch)
        np.testing.assert_array_equal(cache(runner).reshape(64, -1)[20:24], content.reshape(64, -1)[20:24])
    runner.set_ready_bytes(arriving.bring(arriving.image.num_bytes))
    np.testing.assert_array_equal(runner.logits(batch), expected.logits(batch))
    np.testing.assert_array_equal(cache(runner), cache(expected))
    runner.close()


def test_what_is_ready_never_becomes_fewer(arriving: Arriving) -> None:
    arriving.bring(arriving.image.num_bytes)
    runner = cpu.load_image_runner(arriving.image, OPTIONS, ready_bytes=0, max_wait_s=NEVER_S)
    runner.set_ready_bytes(arriving.image.num_bytes)
    runner.set_ready_bytes(-1)
    runner.set_ready_bytes(64)
    assert np.isfinite(runner.logits(prompt_batch())).all()
    runner.close()


def test_a_broken_batch_is_refused_even_while_weights_are_missing(arriving: Arriving) -> None:
    runner = cpu.load_image_runner(arriving.image, OPTIONS, ready_bytes=0, max_wait_s=NEVER_S)
    broken: dict[str, Any] = {"token_ids": np.full(600, VOCAB, np.int32)}
    with pytest.raises(InternalError, match="token id"):
        runner.logits(replace(prompt_batch(), **broken))
    runner.close()


def test_news_for_a_closed_runner_are_ignored(arriving: Arriving) -> None:
    runner = cpu.load_image_runner(arriving.image, OPTIONS, ready_bytes=0)
    runner.close()
    runner.set_ready_bytes(64)
    runner.fail()
    with pytest.raises(InternalError, match="closed"):
        runner.logits(prompt_batch())
