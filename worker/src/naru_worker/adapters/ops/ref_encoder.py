"""Encoders in plain torch, float32, one text after the other: the oracle of the fast ones.

Loaded by name like the CPU backend's. Not meant to be fast.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from naru_proto.errors import InternalError
from naru_worker.adapters.engine.batch_runner import EncoderInput
from naru_worker.adapters.ops.encoder_options import EncoderOptions, check_inputs
from naru_worker.adapters.ops.protocol import FloatArray
from naru_worker.core.encoder_config import EncoderConfig
from naru_worker.core.encoder_layout import encoder_parts

__all__ = ["RefEncoder", "load_encoder", "weight_bytes", "workspace_bytes"]


def weight_bytes(config: EncoderConfig) -> int:
    """Bytes of the float32 weights."""
    return sum(4 * len(part.sources) * math.prod(part.shape) for part in encoder_parts(config))


def workspace_bytes(config: EncoderConfig, options: EncoderOptions) -> int:
    """About the activations of one text: torch takes and gives them back by itself."""
    rows = options.max_tokens
    return 4 * rows * (6 * config.hidden_size + config.intermediate_size + config.num_heads * rows)


def load_encoder(
    config: EncoderConfig, tensors: Iterable[tuple[str, FloatArray]], options: EncoderOptions
) -> RefEncoder:
    """Takes the weights over. Sets torch's thread count, which is the process's.

    Raises:
        LoadError: a tensor is broken.
    """
    torch.set_num_threads(options.num_threads)
    return RefEncoder(config, {name: torch.from_numpy(values) for name, values in tensors}, options)


class RefEncoder:
    """A loaded encoder. Not thread-safe."""

    def __init__(self, config: EncoderConfig, weights: dict[str, Tensor], options: EncoderOptions) -> None:
        self.weight_bytes = weight_bytes(config)
        self.workspace_bytes = workspace_bytes(config, options)
        self.width = config.width
        self.max_num_tokens = options.max_num_tokens
        self._config = config
        self._options = options
        self._weights = weights

    def encode(self, inputs: Sequence[EncoderInput]) -> FloatArray:
        """(len(inputs), width), pooled, or scores.

        Raises:
            InternalError: the inputs break a rule of the runner.
        """
        if not self._weights:
            raise InternalError("the encoder is closed")
        batch = list(inputs)
        check_inputs(self._config, batch, self._options)
        with torch.inference_mode():
            rows: list[FloatArray] = [self._result(self._hidden(each)).cpu().numpy() for each in batch]
        return np.stack(rows)

    def close(self) -> None:
        """Gives back all memory."""
        self._weights = {}

    def _hidden(self, each: EncoderInput) -> Tensor:
        """(tokens, hidden) after the last layer."""
        config, weights = self._config, self._weights
        first = config.first_position
        x = weights["words"][list(each.token_ids)] + weights["positions"][first : first + len(each.token_ids)]
        if config.num_token_types:
            x = x + weights["types"][list(each.token_types or (0,) * len(each.token_ids))]
        x = self._norm(x, "embed_norm")
        for i in range(config.num_layers):
            x = self._norm(x + self._linear(self._attention(x, i), f"layers.{i}.o"), f"layers.{i}.attn_norm")
            inner = self._act(self._linear(x, f"layers.{i}.up"))
            x = self._norm(x + self._linear(inner, f"layers.{i}.down"), f"layers.{i}.mlp_norm")
        return x

    def _attention(self, x: Tensor, i: int) -> Tensor:
        heads = (3, self._config.num_heads, self._config.head_dim)
        q, k, v = self._linear(x, f"layers.{i}.qkv").view(len(x), *heads).permute(1, 2, 0, 3)
        scores = q @ k.transpose(-1, -2) / math.sqrt(self._config.head_dim)
        mixed: Tensor = scores.softmax(-1) @ v
        return mixed.transpose(0, 1).reshape(len(x), -1)

    def _act(self, x: Tensor) -> Tensor:
        if self._config.activation == "relu":
            return functional.relu(x)
        return functional.gelu(x, approximate="tanh" if self._config.activation == "gelu_tanh" else "none")

    def _result(self, hidden: Tensor) -> Tensor:
        config = self._config
        if config.num_labels:
            dense = self._linear(hidden[0], "head_dense")
            dense = dense.tanh() if config.head_activation == "tanh" else functional.relu(dense)
            return self._linear(dense, "head_out")
        if config.pooling == "cls":
            return hidden[0]
        if config.pooling == "last":
            return hidden[-1]
        if config.pooling == "max":
            return hidden.max(0).values
        return hidden.sum(0) / (len(hidden) if config.pooling == "mean" else math.sqrt(len(hidden)))

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self._weights[name], self._weights[f"{name}_bias"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self._weights[name], self._weights[f"{name}_bias"]
        return functional.layer_norm(x, x.shape[-1:], weight, bias, self._config.norm_eps)
