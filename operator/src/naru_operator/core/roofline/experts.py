"""The work of mixtures of experts. How much of their weights is read depends on how many experts tokens hit."""

from __future__ import annotations

from collections.abc import Iterator

from naru_operator.core.roofline.formats import Weights
from naru_operator.core.roofline.work import ACTIVATION_BYTES, Step, Work
from naru_proto.shapes import ModelShape

_CHOICE_BYTES = 8
"""The number of an expert, and its weight."""
_ROUTING_LAUNCHES = 2
"""The router's product, and the choice."""
_SORTING_LAUNCHES = 3
"""Tables are cleared, experts are counted, and tokens are put in their order."""


def experts_hit(num_experts: int, num_chosen: int, num_tokens: int) -> float:
    """Experts that any of the tokens goes through, as is to be expected where each is as likely as the others.

    A token leaves one out with the odds 1 - num_chosen / num_experts, and all tokens do so independently.
    """
    return num_experts * (1.0 - (1.0 - num_chosen / num_experts) ** num_tokens)


def expert_work(shape: ModelShape, weights: Weights, step: Step) -> Iterator[Work]:
    """The kernels of all layers that have experts, of which the last layer is one; none where no layer has."""
    layers, hidden, inner = shape.num_expert_layers, shape.hidden_size, shape.expert_size
    if not layers:
        return
    # The last layer goes on with each sequence's last token alone.
    rows = (layers - 1) * step.num_tokens + step.num_sequences
    chosen = shape.num_chosen_experts
    hit = (layers - 1) * experts_hit(shape.num_experts, chosen, step.num_tokens)
    hit += experts_hit(shape.num_experts, chosen, step.num_sequences)

    def product(name: str, outputs: int, inputs: int) -> Work:
        taken = rows * chosen * (inputs + outputs) * ACTIVATION_BYTES
        moved = round(hit * weights.matrices.matrix_bytes(outputs, inputs)) + taken
        # In 16 bits, whatever the weights are.
        return Work(name, layers, moved, 2 * rows * chosen * outputs * inputs)

    def pointwise(name: str, elements: int) -> Work:
        return Work(name, layers, elements * ACTIVATION_BYTES, 0)

    if shape.shared_expert_size:
        yield from _shared_work(shape, weights, rows)
    router = (layers * shape.num_experts * hidden + rows * hidden) * ACTIVATION_BYTES + rows * chosen * _CHOICE_BYTES
    yield Work("router", _ROUTING_LAUNCHES * layers, router, 2 * rows * shape.num_experts * hidden)
    yield Work("sort by expert", _SORTING_LAUNCHES * layers, 2 * rows * chosen * _CHOICE_BYTES, 0)
    yield product("experts: gate, up", 2 * inner, hidden)
    yield pointwise("experts: activation", rows * chosen * 3 * inner)
    yield product("experts: down", hidden, inner)
    yield pointwise("experts: sum", rows * (chosen + 2) * hidden)


def _shared_work(shape: ModelShape, weights: Weights, rows: int) -> Iterator[Work]:
    layers, hidden, inner = shape.num_expert_layers, shape.hidden_size, shape.shared_expert_size
    for name, outputs, inputs in (("shared: gate, up", 2 * inner, hidden), ("shared: down", hidden, inner)):
        moved = layers * weights.matrices.matrix_bytes(outputs, inputs) + rows * (inputs + outputs) * ACTIVATION_BYTES
        yield Work(name, layers, moved, 2 * rows * outputs * inputs, weights.is_fp8)
    yield Work("shared: activation", layers, rows * 3 * inner * ACTIVATION_BYTES, 0)
    # The result, what the gate is of, the stream, and the stream again.
    yield Work("shared: gated sum", layers, (4 * rows + layers) * hidden * ACTIVATION_BYTES, 0)
