"""A mixture of experts: routing, the two grouped products with the activation between them, the weighted sum.

Called for each layer that has experts. Launches kernels only, as many for any choice of experts: no sync, and fit for a
CUDA graph.
"""

from __future__ import annotations

from torch import Tensor

from naru_worker.adapters.ops.cuda.expert_weights import ExpertRows
from naru_worker.adapters.ops.cuda.kernels.act import act
from naru_worker.adapters.ops.cuda.kernels.compile_case import ARCHITECTURES
from naru_worker.adapters.ops.cuda.kernels.expert_schedule import max_tiles, schedule_experts
from naru_worker.adapters.ops.cuda.kernels.gemm_groups import Regime
from naru_worker.adapters.ops.cuda.kernels.grouped_gemm import combine_experts, grouped_gemm, tile_tokens
from naru_worker.adapters.ops.cuda.kernels.route import route
from naru_worker.core.model_config import ExpertsConfig, ModelConfig

_REGIMES: tuple[Regime, ...] = ("generated", "prompt")


def mix_experts(
    x: Tensor, router: Tensor, up: ExpertRows, down: ExpertRows, config: ExpertsConfig, *,
    regime: Regime, residual: Tensor | None, out: Tensor, arch: int = 80,
) -> None:  # fmt: skip
    """Residual + the weighted sum of each row's experts.

    Args:
        x: (M, hidden), the type of the activations.
        router: (num_experts, hidden), the type of x.
        up: Of each expert (2 inner_size, hidden): gate over up.
        down: Of each expert (hidden, inner_size).
        config: How experts are chosen.
        regime: The kind of all these rows.
        residual: (M, hidden), the type of x. May be `out`.
        out: (M, hidden), the type of x, mutated; rows may be strided.
        arch: One of `ARCHITECTURES`.
    """
    experts, routing = route(x, router, config.num_chosen, renormalizes=config.renormalizes, regime=regime)
    schedule = schedule_experts(experts, config.num_experts, tile_tokens=tile_tokens(regime, arch))
    count = config.num_experts
    h = grouped_gemm(x, up.operand, count, schedule, regime=regime, is_sorted=False, arch=arch)
    h = act(h, "swiglu", used=schedule.pairs)
    y = grouped_gemm(h, down.operand, count, schedule, regime=regime, is_sorted=True, arch=arch)
    combine_experts(y, schedule, routing, residual=residual, out=out)


def mixing_bytes(num_tokens: int, config: ModelConfig, item_bytes: int) -> int:
    """Of a layer's products for so many tokens: both results, and what the activation makes; 0 without experts.

    Each expert's last tile may be nearly empty, so there are more rows than choices. `item_bytes`: of an activation.
    """
    experts = config.experts
    if experts is None:
        return 0
    pairs = num_tokens * experts.num_chosen
    tiles = [tile_tokens(regime, arch) for regime in _REGIMES for arch in ARCHITECTURES]
    slots = max(tile * max_tiles(pairs, experts.num_experts, tile) for tile in tiles)
    return slots * (3 * experts.inner_size + config.hidden_size) * item_bytes
