"""What each kernel of a step must move and compute at least: the work, whatever the GPU.

Bytes are those of a kernel by itself: weights and cached keys and values once, what it takes and gives once. Partial
results of a split attention and padding are not counted. What one kernel leaves in the cache for the next is counted
as if it went through memory, so small kernels may be faster than this; weights and long contexts fit in no cache.
"""

from __future__ import annotations

from collections.abc import Iterator

from naru_operator.core.roofline.experts import expert_work
from naru_operator.core.roofline.formats import Weights, kv_token_bytes
from naru_operator.core.roofline.models import Model
from naru_operator.core.roofline.work import ACTIVATION_BYTES, Step, Work
from naru_proto.shapes import ModelShape

_LOGIT_BYTES = 4


def step_work(model: Model, weights: Weights, kv: str, step: Step) -> Iterator[Work]:
    """Every kernel of a step, in order of its first launch; those of all layers in one.

    Raises:
        InvalidRequest: the KV format is not known.
    """
    shape = model.shape
    layers, hidden, inner = shape.num_layers, shape.hidden_size, shape.intermediate_size
    qkv, ups = shape.q_size + 2 * shape.kv_size, inner * (2 if shape.mlp == "gated" else 1)
    kv_bytes = kv_token_bytes(shape.num_kv_heads, shape.head_dim, kv)
    rows = layers * step.num_tokens
    # Behind its attention the last layer goes on with each sequence's last token alone. Where layers have experts, it
    # is one of these.
    late_rows = rows - step.num_tokens + step.num_sequences
    plain = layers - shape.num_expert_layers
    plain_rows = late_rows if plain == layers else plain * step.num_tokens

    def product(name: str, count: int, outputs: int, inputs: int, *, adds: int = 0, launches: int = layers) -> Work:
        taken = count * (inputs + outputs + adds) * ACTIVATION_BYTES
        moved = launches * weights.matrices.matrix_bytes(outputs, inputs) + taken
        return Work(name, launches, moved, 2 * count * outputs * inputs, weights.is_fp8)

    def pointwise(name: str, launches: int, elements: int) -> Work:
        return Work(name, launches, elements * ACTIVATION_BYTES, 0)

    yield pointwise("embed", 1, 2 * step.num_tokens * hidden)
    yield pointwise("norm", 2 * layers + 1, 2 * (rows + late_rows + step.num_sequences) * hidden)
    yield product("qkv", rows, qkv, hidden)
    written = rows * (shape.q_size * ACTIVATION_BYTES + kv_bytes)
    yield Work("rope, KV write", layers, rows * qkv * ACTIVATION_BYTES + written, 0)
    yield _attention(model, kv_bytes, step)
    yield product("o", late_rows, hidden, shape.q_size, adds=hidden)
    if plain:
        yield product("gate, up" if shape.mlp == "gated" else "up", plain_rows, ups, hidden, launches=plain)
        yield pointwise("activation", plain, plain_rows * (ups + inner))
        yield product("down", plain_rows, hidden, inner, adds=hidden, launches=plain)
    yield from expert_work(shape, weights, step)
    yield _head(shape, weights, step.num_sequences)
    yield Work("sample", 1, step.num_sequences * shape.vocab_size * _LOGIT_BYTES, 0)


def attended(new_tokens: int, cached_tokens: int, window: int = 0) -> int:
    """Pairs of a new token and one that it sees, itself among them; a window of 0 is none."""
    if not window:
        return new_tokens * cached_tokens + new_tokens * (new_tokens + 1) // 2
    # Tokens before the window is full see one more each; the others see the window.
    rising = min(new_tokens, max(window - cached_tokens, 0))
    return attended(rising, cached_tokens) + (new_tokens - rising) * window


def _attention(model: Model, kv_bytes: int, step: Step) -> Work:
    shape = model.shape
    total_bytes = operations = 0
    for window in model.windows or (0,) * shape.num_layers:
        seen = step.cached_tokens + step.new_tokens
        if window:
            seen = min(seen, window + step.new_tokens - 1)
        own = 2 * step.num_tokens * shape.q_size * ACTIVATION_BYTES
        total_bytes += step.num_sequences * seen * kv_bytes + own
        # A product with the keys and one with the values, a multiplication and an addition for each element.
        operations += 4 * shape.q_size * step.num_sequences * attended(step.new_tokens, step.cached_tokens, window)
    return Work("attention", shape.num_layers * (2 if step.new_tokens == 1 else 1), total_bytes, operations)


def _head(shape: ModelShape, weights: Weights, count: int) -> Work:
    taken = count * (shape.hidden_size * ACTIVATION_BYTES + shape.vocab_size * _LOGIT_BYTES)
    moved = weights.tables.matrix_bytes(shape.vocab_size, shape.hidden_size) + taken
    return Work("head", 1, moved, 2 * count * shape.vocab_size * shape.hidden_size)
