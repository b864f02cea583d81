"""What GPUs could reach at best: values reckoned by hand from shapes and data sheets, and what must hold for all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from naru_operator.core.roofline.experts import experts_hit
from naru_operator.core.roofline.formats import KV_FORMATS, WEIGHTS, Weights, kv_token_bytes, weights_named
from naru_operator.core.roofline.gpus import GPUS, Gpu, gpus_named
from naru_operator.core.roofline.kernels import attended, step_work
from naru_operator.core.roofline.models import MODELS, Model
from naru_operator.core.roofline.prediction import (
    StepTime,
    active_weight_bytes,
    decode_time,
    fit,
    prefill_time,
    step_time,
)
from naru_operator.core.roofline.work import Step
from naru_proto.errors import InvalidRequest
from naru_proto.shapes import num_parameters

LLAMA = MODELS["llama-3.1-8b"]
BF16, FP8, INT4 = WEIGHTS["bf16"], WEIGHTS["fp8"], WEIGHTS["int4"]
H100, H200, A100 = GPUS["h100"], GPUS["h200"], GPUS["a100-80"]

# 32 layers of (6144 + 4096) x 4096 and 3 x 14336 x 4096 weights; the head has 128256 x 4096. All of two bytes.
LAYER_WEIGHTS = 32 * 218_103_808
HEAD_WEIGHTS = 525_336_576
READ_BYTES = 2 * (LAYER_WEIGHTS + HEAD_WEIGHTS)
assert READ_BYTES == 15_009_316_864

models = st.sampled_from(list(MODELS.values()))
gpus = st.sampled_from(list(GPUS.values()))
weights_of = st.sampled_from(list(WEIGHTS.values()))
kvs = st.sampled_from(KV_FORMATS)


def by_name(step: StepTime) -> dict[str, float]:
    return {kernel.work.name: kernel.seconds for kernel in step.kernels}


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3.1-8b", 8.03),
        ("llama-3.1-70b", 70.55),
        ("llama-3.2-1b", 1.236),
        ("llama-3.2-3b", 3.213),
        ("mistral-7b-v0.3", 7.248),
        ("qwen2.5-0.5b", 0.494),
        ("qwen2.5-1.5b", 1.544),
        ("qwen2.5-3b", 3.086),
        ("qwen2.5-7b", 7.616),
        ("qwen2.5-14b", 14.770),
        ("qwen2.5-32b", 32.764),
        ("qwen2.5-72b", 72.706),
        ("smollm2-135m", 0.1345),
        ("mixtral-8x7b", 46.703),
        ("qwen3-0.6b", 0.596),
        ("qwen3-1.7b", 1.7206),
        ("qwen3-4b", 4.0225),
        ("qwen3-8b", 8.1907),
        ("qwen3-14b", 14.768),
        ("qwen3-32b", 32.762),
        ("qwen3-30b-a3b", 30.532),
        ("qwen3-235b-a22b", 235.094),
    ],
)
def test_known_models_have_their_published_number_of_parameters(name: str, billions: float) -> None:
    assert num_parameters(MODELS[name].shape) / 1e9 == pytest.approx(billions, rel=1e-3)


@pytest.mark.parametrize(("gpu", "milliseconds"), [(H100, 4.4804), (H200, 3.1269)])
def test_a_single_token_takes_as_long_as_reading_all_weights_once(gpu: Gpu, milliseconds: float) -> None:
    step = decode_time(LLAMA, BF16, "float16", gpu, batch=1, context=1)
    assert READ_BYTES / gpu.bandwidth * 1e3 == pytest.approx(milliseconds, rel=1e-4)
    assert milliseconds < step.kernel_s * 1e3 < 1.002 * milliseconds
    assert all(kernel.bound == "memory" for kernel in step.kernels)
    # 32 layers of two norms, four products, the cache's write, the activation, attention and its merging; four more.
    assert sum(kernel.work.launches for kernel in step.kernels) == 324
    assert step.launch_s == pytest.approx(324e-6)
    assert step.seconds == step.kernel_s + step.launch_s
    assert step.tokens_per_s == pytest.approx(1 / step.seconds)
    assert step.mbu == pytest.approx(step.kernel_s / step.seconds)


def test_each_kernel_of_a_single_token_takes_its_weights_bytes() -> None:
    times = by_name(decode_time(LLAMA, BF16, "float16", H100, batch=1, context=1))
    # Two of them add what they give to the stream, which they read.
    for name, rows, columns, added in (
        ("qkv", 6144, 4096, 0),
        ("o", 4096, 4096, 4096),
        ("gate, up", 28_672, 4096, 0),
        ("down", 4096, 14_336, 4096),
    ):
        weights, rest = 2 * rows * columns, 2 * (rows + columns + added)
        assert times[name] == pytest.approx(32 * (weights + rest) / 3.35e12)
    assert times["head"] == pytest.approx((2 * HEAD_WEIGHTS + 2 * 4096 + 4 * 128_256) / 3.35e12)


def test_attention_reads_every_cached_key_and_value_once() -> None:
    # 64 requests of 4096 tokens, each of 32 layers x 2 x 8 heads x 128 x 2 bytes: 34.4 GB.
    times = by_name(decode_time(LLAMA, BF16, "float16", H100, batch=64, context=4096))
    read = 64 * 4096 * 131_072
    assert times["attention"] == pytest.approx(read / 3.35e12, rel=0.002)
    assert times["attention"] >= read / 3.35e12
    assert kv_token_bytes(8, 128, "float16") == 4096
    assert kv_token_bytes(8, 128, "fp8") == 2048
    assert kv_token_bytes(8, 128, "int8") == 2 * 8 * (128 + 4)


def test_tokens_hit_as_many_experts_as_independent_choices_do() -> None:
    assert [experts_hit(8, 2, tokens) for tokens in (0, 1, 2, 3)] == [0.0, 2.0, 3.5, 4.625]
    # 1 - (15 / 16) ** 16 = 0.64393
    assert experts_hit(128, 8, 16) == pytest.approx(82.423, abs=1e-3)
    assert experts_hit(8, 8, 1) == 8.0 and experts_hit(128, 8, 4096) == pytest.approx(128.0)


@pytest.mark.parametrize(
    ("name", "active"),
    # All but 6 of 8 experts of 3 x 14336 x 4096 weights in 32 layers; but 120 of 128 of 3 x 768 x 2048 in 48.
    [("mixtral-8x7b", 46_702_792_704 - 33_822_867_456), ("qwen3-30b-a3b", 30_532_122_624 - 27_179_089_920)],
)
def test_a_token_meets_the_weights_of_its_experts_only(name: str, active: int) -> None:
    model = MODELS[name]
    assert active_weight_bytes(model, BF16) == 2 * active
    step = decode_time(model, BF16, "float16", H100, batch=1, context=1)
    # Of the embedding one row is read; activations and choices are little.
    read = 2 * (active - model.shape.vocab_size * model.shape.hidden_size)
    assert read < sum(kernel.work.bytes for kernel in step.kernels) < 1.01 * read
    assert fit(model, BF16, "float16", H100).weight_bytes == 2 * num_parameters(model.shape)
    assert active_weight_bytes(LLAMA, BF16) == fit(LLAMA, BF16, "float16", H100).weight_bytes


def test_two_tokens_of_a_mixture_read_what_they_are_expected_to_hit() -> None:
    times = by_name(decode_time(MODELS["mixtral-8x7b"], BF16, "float16", H100, batch=2, context=1))
    # 32 layers of 3.5 experts of 8; 2 tokens of 2 experts each, with 14336 columns coming and 4096 going.
    weights, rest = 3.5 * 2 * 4096 * 14_336, 2 * 2 * 2 * (4096 + 14_336)
    assert times["experts: down"] == pytest.approx(32 * (weights + rest) / 3.35e12)
    weights, rest = 2 * weights, 2 * 2 * 2 * (4096 + 2 * 14_336)
    assert times["experts: gate, up"] == pytest.approx(32 * (weights + rest) / 3.35e12)
    assert "gate, up" not in times and "down" not in times
    # The router has 8 x 4096 weights; each of two tokens is read, and leaves two choices of 8 bytes.
    assert times["router"] == pytest.approx(32 * (2 * 8 * 4096 + 2 * 2 * 4096 + 2 * 2 * 8) / 3.35e12)


def test_a_long_prompt_computes_its_experts_and_no_more() -> None:
    step = prefill_time(MODELS["mixtral-8x7b"], BF16, "float16", H100, prompt=8192)
    [down] = [kernel for kernel in step.kernels if kernel.work.name == "experts: down"]
    # The last layer goes on with one token. In all but it every expert is read.
    assert down.work.operations == 2 * (31 * 8192 + 1) * 2 * 4096 * 14_336
    assert down.bound == "compute" and down.seconds == pytest.approx(down.work.operations / 989.4e12)
    # FP8 weights of experts are widened on their way.
    small = prefill_time(MODELS["mixtral-8x7b"], FP8, "float16", H100, prompt=8192)
    assert by_name(small)["experts: down"] == down.seconds


def test_layers_with_a_plain_mlp_and_shared_experts_have_their_own_kernels() -> None:
    shape = replace(MODELS["qwen3-30b-a3b"].shape, num_plain_layers=8, shared_expert_size=512, intermediate_size=6144)
    model = Model("mixed", shape, 4096)
    works = {work.name: work for work in step_work(model, BF16, "float16", Step(1, 100, 0))}
    assert works["down"].launches == 8 and works["down"].operations == 2 * 8 * 100 * 6144 * 2048
    assert works["experts: down"].launches == works["shared: down"].launches == 40
    assert works["experts: down"].operations == 2 * (39 * 100 + 1) * 8 * 768 * 2048
    assert works["shared: down"].operations == 2 * (39 * 100 + 1) * 512 * 2048
    assert works["norm"].launches == 97


@pytest.mark.parametrize("gpu", [H100, H200])
def test_a_long_prompt_takes_as_long_as_its_operations(gpu: Gpu) -> None:
    step = prefill_time(LLAMA, BF16, "float16", gpu, prompt=8192)
    times = by_name(step)
    products = sum(times[name] for name in ("qkv", "o", "gate, up", "down"))
    # Behind the last layer's attention only the last token goes on: 8191 tokens do not meet its other products.
    skipped = 2 * 8191 * (218_103_808 - 6144 * 4096)
    assert products == pytest.approx((2 * 8192 * LAYER_WEIGHTS - skipped) / 989.4e12)
    # Each token sees itself and those before it: 8192 * 8193 / 2 pairs, 4 operations for each of 4096 elements.
    assert times["attention"] == pytest.approx(32 * 4 * 4096 * 33_558_528 / 989.4e12)
    assert {kernel.work.name for kernel in step.kernels if kernel.bound == "compute"} == {
        "qkv", "o", "gate, up", "down", "attention",
    }  # fmt: skip
    # Only the last token's logits are wanted.
    assert times["head"] == pytest.approx(by_name(decode_time(LLAMA, BF16, "float16", gpu, batch=1, context=1))["head"])
    operations = 2 * 8192 * LAYER_WEIGHTS - skipped + 32 * 4 * 4096 * 33_558_528 + 2 * HEAD_WEIGHTS
    assert step.mfu == pytest.approx(operations / (step.seconds * 989.4e12))


def test_fp8_doubles_the_operations_where_a_gpu_has_the_units_and_else_only_halves_the_bytes() -> None:
    on_h100 = by_name(prefill_time(LLAMA, FP8, "float16", H100, prompt=8192))
    assert on_h100["down"] == pytest.approx((31 * 8192 + 1) * 2 * 4096 * 14_336 / 1978.9e12)
    plain, small = (by_name(prefill_time(LLAMA, each, "float16", A100, prompt=8192)) for each in (BF16, FP8))
    assert small["down"] == plain["down"]
    decode = by_name(decode_time(LLAMA, FP8, "float16", A100, batch=1, context=1))
    assert decode["down"] == pytest.approx(32 * (4096 * 14_336 + 2 * (2 * 4096 + 14_336)) / 2.039e12)


def test_int4_has_a_scale_and_a_zero_for_128_weights_and_leaves_the_head_as_it_is() -> None:
    times = by_name(decode_time(LLAMA, INT4, "float16", H200, batch=1, context=1))
    assert times["o"] == pytest.approx(32 * (4096 * 4096 // 128 * 68 + 2 * 3 * 4096) / 4.8e12)
    assert times["head"] == by_name(decode_time(LLAMA, BF16, "float16", H200, batch=1, context=1))["head"]


def test_a_window_bounds_what_attention_reads_and_computes() -> None:
    windowed = replace(LLAMA, windows=(1024,) * 32)
    full = by_name(decode_time(windowed, BF16, "float16", H100, batch=8, context=1024))["attention"]
    assert by_name(decode_time(windowed, BF16, "float16", H100, batch=8, context=9000))["attention"] == full
    half = replace(LLAMA, windows=(1024, 0) * 16)
    open_ = by_name(decode_time(LLAMA, BF16, "float16", H100, batch=8, context=9000))["attention"]
    found = by_name(decode_time(half, BF16, "float16", H100, batch=8, context=9000))["attention"]
    assert found == pytest.approx((full + open_) / 2)


@given(new=st.integers(1, 40), cached=st.integers(0, 40), window=st.integers(0, 50))
def test_attended_pairs_are_what_counting_finds(new: int, cached: int, window: int) -> None:
    counted = sum(min(at + 1, window or 10**9) for at in range(cached, cached + new))
    assert attended(new, cached, window) == counted


@given(model=models, gpu=gpus, weights=weights_of, kv=kvs, batch=st.integers(1, 500), context=st.integers(1, 8000))
def test_no_step_is_faster_than_the_gpu(
    model: Model, gpu: Gpu, weights: Weights, kv: str, batch: int, context: int
) -> None:
    for step in (
        decode_time(model, weights, kv, gpu, batch=batch, context=context),
        prefill_time(model, weights, kv, gpu, prompt=context),
    ):
        assert 0 < step.mbu <= 1 and 0 < step.mfu <= max(gpu.flops_8, gpu.flops_16) / gpu.flops_16
        for kernel in step.kernels:
            assert kernel.seconds >= kernel.work.bytes / gpu.bandwidth
            assert kernel.work.launches > 0 and kernel.work.bytes > 0


@given(model=models, gpu=gpus, weights=weights_of, kv=kvs, batch=st.integers(1, 200), context=st.integers(1, 4000))
def test_more_work_takes_longer_and_a_larger_batch_gives_more_tokens_a_second(
    model: Model, gpu: Gpu, weights: Weights, kv: str, batch: int, context: int
) -> None:
    step = decode_time(model, weights, kv, gpu, batch=batch, context=context)
    longer = decode_time(model, weights, kv, gpu, batch=batch, context=context + 1)
    larger = decode_time(model, weights, kv, gpu, batch=batch + 1, context=context)
    assert longer.seconds > step.seconds and larger.seconds > step.seconds
    assert larger.tokens_per_s > step.tokens_per_s
    prompt = prefill_time(model, weights, kv, gpu, prompt=context + 1)
    assert prefill_time(model, weights, kv, gpu, prompt=context + 2).seconds > prompt.seconds


def test_smaller_formats_and_faster_gpus_take_less() -> None:
    def took(weights: str, kv: str, gpu: str) -> float:
        return decode_time(LLAMA, WEIGHTS[weights], kv, GPUS[gpu], batch=16, context=4096).seconds

    assert took("bf16", "float16", "h100") > took("fp8", "float16", "h100") > took("int4", "float16", "h100")
    assert took("bf16", "float16", "h100") > took("bf16", "int8", "h100") > took("bf16", "fp8", "h100")
    order = ["l40s", "a100-40", "h100-pcie", "a100-80", "h100", "h200"]
    assert sorted(GPUS, key=lambda gpu: -took("bf16", "float16", gpu)) == order


def test_a_prompt_in_two_chunks_computes_as_much_as_in_one() -> None:
    def operations(step: Step) -> int:
        return sum(work.operations for work in step_work(LLAMA, BF16, "float16", step))

    # The first chunk's last token goes through the last layer and the head, which it need not.
    extra = 2 * (218_103_808 - 6144 * 4096 + HEAD_WEIGHTS)
    assert operations(Step(1, 1000, 0)) + operations(Step(1, 3096, 1000)) - extra == operations(Step(1, 4096, 0))
    assert step_time(LLAMA, BF16, "float16", H100, Step(1, 3096, 1000)).num_tokens == 3096


def test_what_fits_is_nine_tenths_of_the_memory_less_the_weights() -> None:
    found = fit(LLAMA, BF16, "float16", H100)
    assert found.weight_bytes == 2 * 8_030_261_248
    assert found.kv_token_bytes == 131_072
    assert found.usable_bytes == 72 * 10**9
    assert found.kv_tokens == (72 * 10**9 - 16_060_522_496) // 131_072
    assert fit(MODELS["llama-3.1-70b"], BF16, "float16", H100).kv_tokens == 0
    # A tied head is read in a step, and is in memory once.
    tied = MODELS["qwen2.5-0.5b"]
    assert fit(tied, BF16, "float16", H100).weight_bytes == 2 * num_parameters(tied.shape)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": 0, "context": 1}, "batch is 0: it must be at least 1"),
        ({"batch": 1, "context": -3}, "context is -3: it must be at least 1"),
        (
            {"batch": 1, "context": 131_073},
            "context 131073 is above what llama-3.1-8b was made for, 131072 tokens: ask for less",
        ),
    ],
)
def test_a_number_that_cannot_be_is_named(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_time(LLAMA, BF16, "float16", H100, **arguments)
    assert caught.value.message == message


def test_names_that_are_not_known_are_answered_with_those_that_are() -> None:
    assert gpus_named(" H200 ,h100,h200") == [H200, H100]
    with pytest.raises(InvalidRequest, match="GPU 'v100' is not known: use one or more of a100-40, "):
        gpus_named("h100,v100")
    with pytest.raises(InvalidRequest, match="--gpu ',' names no GPU: use one or more of"):
        gpus_named(",")
    with pytest.raises(InvalidRequest, match="weight format 'q3' is not known: use one of bf16, "):
        weights_named("q3")
    with pytest.raises(InvalidRequest, match="KV format 'q4' is not known: use one of float16, fp8, int8"):
        kv_token_bytes(8, 128, "q4")
