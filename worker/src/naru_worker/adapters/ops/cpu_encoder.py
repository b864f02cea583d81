"""Encoders on the CPU: weights packed for the machine's instruction set, one native call for a batch.

Where there are AMX tiles, matrices and tables are bf16 and sums float32: cosine to float32 results is above 0.9999 on
the models tried, at several times the speed; elsewhere everything is float32. A result does not depend on its batch
mates nor on the number of threads, bit for bit. Runs on the process's one device, beside the decoders.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import numpy as np

from naru_proto.errors import InternalError, LoadError
from naru_worker.adapters.engine.batch_runner import EncoderInput
from naru_worker.adapters.ops.cpu_device import CpuDevice, effective_threads, open_device
from naru_worker.adapters.ops.encoder_options import EncoderOptions, check_inputs
from naru_worker.adapters.ops.native_lib import EncoderInputs, EncoderSpec, load_best, load_variant
from naru_worker.adapters.ops.protocol import FloatArray
from naru_worker.core.encoder_config import EncoderActivation, EncoderConfig, Pooling

# Numbers of `EncoderAct`, `Pooling` and `EncoderTensor` in native/src.
_ACTIVATIONS: dict[EncoderActivation | str, int] = {"gelu_tanh": 1, "gelu": 2, "relu": 3, "tanh": 4}
_POOLINGS: dict[Pooling, int] = {"mean": 0, "cls": 1, "max": 2, "mean_sqrt_len": 3, "last": 4}
_TENSORS = (
    "words",
    "positions",
    "types",
    "embed_norm",
    "embed_norm_bias",
    "head_dense",
    "head_dense_bias",
    "head_out",
    "head_out_bias",
)
_LAYER_TENSORS = (
    "qkv",
    "qkv_bias",
    "o",
    "o_bias",
    "attn_norm",
    "attn_norm_bias",
    "up",
    "up_bias",
    "down",
    "down_bias",
    "mlp_norm",
    "mlp_norm_bias",
)


def weight_bytes(config: EncoderConfig, variant: str | None = None) -> int:
    """Bytes of the packed weights.

    Raises:
        LoadError: the kernels cannot be built.
    """
    spec = _spec(config, EncoderOptions(config.max_tokens, config.max_tokens))
    return int(_library(variant).naru_encoder_weight_bytes(ctypes.byref(spec)))


def workspace_bytes(config: EncoderConfig, options: EncoderOptions, variant: str | None = None) -> int:
    """Bytes of the workspace that a batch of this model uses. All models share one: the largest counts.

    Raises:
        LoadError: the kernels cannot be built.
    """
    return int(_library(variant).naru_encoder_workspace_bytes(ctypes.byref(_spec(config, options))))


def load_encoder(
    config: EncoderConfig,
    tensors: Iterable[tuple[str, FloatArray]],
    options: EncoderOptions,
    variant: str | None = None,
) -> CpuEncoder:
    """Packs the weights, by name and in any order. `variant` picks an instruction set, for tests.

    Raises:
        LoadError: a tensor is broken, or there is not enough memory.
    """
    encoder = CpuEncoder(open_device(options.num_threads, variant), config, options)
    try:
        for name, values in tensors:
            encoder.put(name, values)
    except BaseException:
        encoder.close()
        raise
    return encoder


class CpuEncoder:
    """A loaded encoder. Not thread-safe: one engine thread calls it; exceptions say so."""

    def __init__(self, device: CpuDevice, config: EncoderConfig, options: EncoderOptions) -> None:
        """An empty one; `put` gives it weights.

        Raises:
            LoadError: there is not enough memory.
        """
        spec = _spec(config, options)
        self._library = device.library
        self._config = config
        self._options = options
        self.weight_bytes = int(self._library.naru_encoder_weight_bytes(ctypes.byref(spec)))
        self.workspace_bytes = int(self._library.naru_encoder_workspace_bytes(ctypes.byref(spec)))
        self.width = config.width
        self.max_num_tokens = options.max_num_tokens
        self._encoder: int | None = self._library.naru_encoder_new(device.handle, ctypes.byref(spec))
        if not self._encoder:
            raise LoadError(
                f"not enough memory for {self.weight_bytes} bytes of weights and {self.workspace_bytes} of workspace"
            )

    def put(self, name: str, values: FloatArray) -> None:
        """Takes one tensor over. A loading thread may call it, before the first `encode`."""
        assert values.flags.c_contiguous and values.dtype == np.float32
        if self._library.naru_encoder_put(self._alive(), _number(name), values.ctypes.data) != 0:
            raise InternalError(f"the encoder has no tensor {name!r}")

    def encode(self, inputs: Sequence[EncoderInput]) -> FloatArray:
        """(len(inputs), width), pooled, or scores.

        Raises:
            InternalError: the inputs break a rule of the runner, or the result holds numbers that are none.
        """
        encoder = self._alive()
        batch = list(inputs)
        check_inputs(self._config, batch, self._options)
        starts = np.zeros(len(batch) + 1, np.int32)
        np.cumsum([len(each.token_ids) for each in batch], out=starts[1:])
        token_ids = np.fromiter((i for each in batch for i in each.token_ids), np.int32, int(starts[-1]))
        types = None
        if any(each.token_types for each in batch):
            types = np.zeros(int(starts[-1]), np.int32)
            for each, start in zip(batch, starts.tolist(), strict=False):
                if each.token_types:
                    types[start : start + len(each.token_types)] = each.token_types
        out = np.empty((len(batch), self.width), np.float32)
        native = EncoderInputs(
            len(batch), starts.ctypes.data, token_ids.ctypes.data, None if types is None else types.ctypes.data
        )
        broken = self._library.naru_encode(encoder, ctypes.byref(native), out.ctypes.data)
        if broken != 0:
            raise InternalError(f"a batch of an encoder breaks rule {broken}")
        if not np.isfinite(out).all():
            raise InternalError("the encoder's result holds NaN or infinity")
        return out

    def close(self) -> None:
        """Gives back the weights."""
        encoder, self._encoder = self._encoder, None
        if encoder:
            self._library.naru_encoder_free(encoder)

    def _alive(self) -> int:
        if not self._encoder:
            raise InternalError("the encoder is closed")
        return self._encoder


def _library(variant: str | None) -> ctypes.CDLL:
    return load_best() if variant is None else load_variant(variant)


def _spec(config: EncoderConfig, options: EncoderOptions) -> EncoderSpec:
    return EncoderSpec(
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        vocab_size=config.vocab_size,
        num_positions=config.num_positions,
        first_position=config.first_position,
        num_types=config.num_token_types,
        act=_ACTIVATIONS[config.activation],
        pooling=_POOLINGS[config.pooling],
        num_labels=config.num_labels,
        head_act=_ACTIVATIONS[config.head_activation],
        max_len=options.max_tokens,
        num_threads=effective_threads(options.num_threads),
        eps=config.norm_eps,
    )


def _number(name: str) -> int:
    if not name.startswith("layers."):
        return _TENSORS.index(name)
    _, layer, part = name.split(".")
    return len(_TENSORS) + int(layer) * len(_LAYER_TENSORS) + _LAYER_TENSORS.index(part)
