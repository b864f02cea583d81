"""Reads what a model's metadata say of its experts: config.json's keys and GGUF's.

Called by the config parsers. Follows the reference implementations' defaults where a key is absent.
"""

from __future__ import annotations

from naru_worker.core.fields import MAX_INTERMEDIATE_SIZE, MAX_LAYERS, Fields, shown
from naru_worker.core.model_config import ExpertsConfig

MAX_EXPERTS = 1024
MAX_CHOSEN = 32
MAX_EXPERTS_OF_ALL_LAYERS = 2**16
"""Several times what published models have; each expert is three tensors whose names are kept."""


def read_hf_experts(fields: Fields, model_type: str, num_layers: int) -> ExpertsConfig | None:
    """Of config.json: all layers of a Mixtral have experts, those of Qwen where its config says so.

    Raises:
        LoadError: a field is missing, of the wrong type or out of range.
    """
    if model_type == "mixtral":
        return _experts(
            fields,
            num_experts=fields.integer("num_local_experts", 1, MAX_EXPERTS, 8),
            num_chosen=fields.integer("num_experts_per_tok", 1, MAX_CHOSEN, 2),
            chosen_name="num_experts_per_tok",
            inner_size=fields.integer("intermediate_size", 1, MAX_INTERMEDIATE_SIZE),
            renormalizes=True,
            layers=tuple(range(num_layers)),
        )
    if fields.boolean("use_sliding_window", False):
        fields.fail("use_sliding_window", f"is true; windows are not supported for {model_type}")
    is_qwen2 = model_type == "qwen2_moe"
    # Newer writers call it as Mixtral does.
    name = "num_experts" if fields.has("num_experts") or not fields.has("num_local_experts") else "num_local_experts"
    num_experts = fields.integer(name, 0, MAX_EXPERTS, 60 if is_qwen2 else 128)
    layers = _sparse_layers(fields, num_layers) if num_experts else ()
    if not layers:
        return None
    return _experts(
        fields,
        num_experts=num_experts,
        num_chosen=fields.integer("num_experts_per_tok", 1, MAX_CHOSEN, 4 if is_qwen2 else 8),
        chosen_name="num_experts_per_tok",
        inner_size=fields.integer("moe_intermediate_size", 1, MAX_INTERMEDIATE_SIZE),
        renormalizes=fields.boolean("norm_topk_prob", False),
        layers=layers,
        shared_size=fields.integer("shared_expert_intermediate_size", 1, MAX_INTERMEDIATE_SIZE) if is_qwen2 else 0,
    )


def read_gguf_experts(fields: Fields, arch: str, num_layers: int) -> ExpertsConfig | None:
    """Of a GGUF file, in all of whose layers are experts, or in none.

    Raises:
        LoadError: a field is missing, of the wrong type or out of range, or the experts are of another kind.
    """
    num_experts = fields.integer(f"{arch}.expert_count", 0, MAX_EXPERTS, 0)
    if not num_experts:
        if arch.endswith("moe"):
            fields.fail(f"{arch}.expert_count", "is missing; a number of experts is needed")
        return None
    if arch not in ("llama", "qwen2moe", "qwen3moe"):
        fields.fail(f"{arch}.expert_count", f"is set; mixtures of experts of {arch} are not supported")
    for name, usual in (("expert_gating_func", 1), ("expert_group_count", 1), ("leading_dense_block_count", 0)):
        value = fields.integer(f"{arch}.{name}", 0, 2**16, usual)
        if value not in (0, usual):
            fields.fail(f"{arch}.{name}", f"is {value}; only {usual} is supported")
    if fields.number(f"{arch}.expert_weights_scale", 0.0, 1e6, 1.0) not in (0.0, 1.0):
        fields.fail(f"{arch}.expert_weights_scale", "is set; only weights of a plain softmax are supported")
    if arch != "qwen2moe" and fields.integer(f"{arch}.expert_shared_count", 0, MAX_EXPERTS, 0):
        fields.fail(f"{arch}.expert_shared_count", "is set; shared experts are supported of qwen2moe only")
    own = f"{arch}.expert_feed_forward_length"
    return _experts(
        fields,
        num_experts=num_experts,
        num_chosen=fields.integer(f"{arch}.expert_used_count", 1, MAX_CHOSEN),
        chosen_name=f"{arch}.expert_used_count",
        inner_size=fields.integer(
            own if arch != "llama" or fields.has(own) else f"{arch}.feed_forward_length", 1, MAX_INTERMEDIATE_SIZE
        ),
        renormalizes=fields.boolean(f"{arch}.expert_weights_norm", arch != "qwen2moe"),
        layers=tuple(range(num_layers)),
        shared_size=(
            fields.integer(f"{arch}.expert_shared_feed_forward_length", 1, MAX_INTERMEDIATE_SIZE)
            if arch == "qwen2moe"
            else 0
        ),
    )


def _experts(
    fields: Fields,
    *,
    num_experts: int,
    num_chosen: int,
    chosen_name: str,
    inner_size: int,
    renormalizes: bool,
    layers: tuple[int, ...],
    shared_size: int = 0,
) -> ExpertsConfig:
    if num_chosen > num_experts:
        fields.fail(chosen_name, f"is {num_chosen}; there are {num_experts} experts to choose from")
    if num_experts * len(layers) > MAX_EXPERTS_OF_ALL_LAYERS:
        fields.fail(
            "experts",
            f"are {num_experts} in each of {len(layers)} layers; at most {MAX_EXPERTS_OF_ALL_LAYERS} in all are served",
        )
    return ExpertsConfig(num_experts, num_chosen, inner_size, renormalizes, layers, shared_size)


def _sparse_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Every `decoder_sparse_step`-th layer, but those of `mlp_only_layers`."""
    step = fields.integer("decoder_sparse_step", 1, MAX_LAYERS, 1)
    plain = fields.values["mlp_only_layers"] if fields.has("mlp_only_layers") else []
    if not isinstance(plain, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in plain):
        fields.fail("mlp_only_layers", f"is {shown(plain)}; a list of layers' numbers is needed")
    return tuple(i for i in range(num_layers) if (i + 1) % step == 0 and i not in plain)
