"""What a checkpoint offers the decoder, whatever file it comes from."""

from __future__ import annotations

from typing import Protocol

from naru_worker.adapters.ops.protocol import RawTensor
from naru_worker.core.model_config import ModelConfig


class Checkpoint(Protocol):
    """A validated, opened model: config plus tensors under canonical names.

    Canonical names (biases end in ``_bias``): ``embed``, ``pos_embed``, ``final_norm``, ``lm_head`` (absent when tied),
    ``layers.{i}.attn_norm``, ``.q``, ``.k``, ``.v``, ``.o``, ``.mlp_norm``, ``.gate``, ``.up``, ``.down``.
    For gelu MLPs ``up`` and ``down`` only. Matrices are (out_features, in_features); q and k rows are in the
    half-rotation (NeoX) order whatever the file used.
    """

    config: ModelConfig
    chat_template: str
    """Empty: the model has none."""

    @property
    def revision(self) -> str:
        """Content identity: changes when the weights do; computed at the first call."""

    def get(self, name: str) -> RawTensor:
        """One tensor.

        Raises:
            LoadError: the tensor is missing or does not fit the config; names file and field.
        """

    def has(self, name: str) -> bool:
        """Whether the tensor exists."""

    def close(self) -> None:
        """Unmaps the files; RawTensors of it are dead afterwards."""
