"""Opens an encoder's folder: config.json, sentence-transformers' small files, and safetensors.

Called when such a model is prepared and when it is loaded. Reads no tokenizer. Tensors come out as float32 arrays,
stacked as backends take them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

import numpy as np

from naru_proto.errors import LoadError
from naru_worker.adapters.ops.protocol import FloatArray, RawTensor
from naru_worker.adapters.ops.ref_dequant import dequantize
from naru_worker.adapters.weights.hf_checkpoint import open_shards
from naru_worker.adapters.weights.mapped_checkpoint import content_revision
from naru_worker.adapters.weights.model_folder import MAX_CONFIG_BYTES, read_json_object, read_small_file
from naru_worker.adapters.weights.safetensors_file import SafetensorsFile, other_dtypes, plain_tensors
from naru_worker.core.encoder_config import EncoderConfig
from naru_worker.core.encoder_layout import PREFIXES, EncoderPart, encoder_parts
from naru_worker.core.encoder_parsing import EncoderFiles, parse_encoder
from naru_worker.core.fields import Fields, shown

_OLD_ENDINGS = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}
"""As files name them that began their life in TensorFlow."""
_POOLING_FOLDER = "1_Pooling"


class EncoderCheckpoint:
    """An opened encoder: every tensor that it reads is there, of the right shape and a known format."""

    def __init__(self, folder: Path) -> None:
        """Maps the weights.

        Raises:
            LoadError: unknown architecture, or a file, field or tensor that does not fit.
        """
        self.config = read_encoder_config(folder)
        self._folder = folder
        self._files: list[SafetensorsFile] = []
        try:
            stored = open_shards(folder, self._files)
            prefix = PREFIXES[self.config.family]
            self._tensors = {_plain_name(name, prefix): tensor for name, tensor in plain_tensors(stored).items()}
            others = {_plain_name(name, prefix): dtype for name, dtype in other_dtypes(stored).items()}
            self._parts = encoder_parts(self.config)
            for part in self._parts:
                self._check(part, others)
        except LoadError:
            self.close()
            raise

    @cached_property
    def revision(self) -> str:
        """Content identity over all bytes of the weights."""
        return content_revision(self._files)

    def tensors(self) -> Iterator[tuple[str, FloatArray]]:
        """Every part by name, one after the other, so that no more than one is in memory as a copy.

        Raises:
            LoadError: one holds numbers that are none.
        """
        for part in self._parts:
            arrays = [dequantize(self._tensors[source]) for source in part.sources]
            values = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
            if not np.isfinite(values).all():
                raise LoadError(
                    f"{self._folder}: tensor {part.sources[0]!r} holds NaN or infinity; fetch the model again",
                    param=part.sources[0],
                )
            yield part.name, np.ascontiguousarray(values)

    def close(self) -> None:
        """Unmaps the files."""
        self._tensors = {}
        for file in self._files:
            file.close()

    def _check(self, part: EncoderPart, others: Mapping[str, str]) -> None:
        for source in part.sources:
            tensor: RawTensor | None = self._tensors.get(source)
            if tensor is None:
                dtype = others.get(source)
                problem = "is missing" if dtype is None else f"is {dtype}; it must be F32, F16 or BF16"
                raise LoadError(f"{self._folder}: tensor {source!r} {problem} ({part.name})", param=source)
            if tensor.shape != part.shape:
                raise LoadError(
                    f"{self._folder}: tensor {source!r} has shape {tensor.shape}, but the config needs {part.shape}",
                    param=source,
                )


def read_encoder_config(folder: Path) -> EncoderConfig:
    """What a folder's small files say.

    Raises:
        LoadError: one is missing, broken, or says what cannot be served.
    """
    config = _fields(folder / "config.json")
    if config is None:
        raise LoadError(f"{folder / 'config.json'}: is missing", param="config.json")
    return parse_encoder(
        EncoderFiles(
            config,
            modules=_modules(folder / "modules.json"),
            modules_name=str(folder / "modules.json"),
            pooling=_fields(folder / _POOLING_FOLDER / "config.json"),
            transformer=_fields(folder / "sentence_bert_config.json"),
            sentence_transformers=_fields(folder / "config_sentence_transformers.json"),
        )
    )


def _fields(path: Path) -> Fields | None:
    values = read_json_object(path)
    return None if values is None else Fields(str(path), values)


def _modules(path: Path) -> list[object] | None:
    raw = read_small_file(path, MAX_CONFIG_BYTES)
    if raw is None:
        return None
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as e:
        raise LoadError(f"{path}: is not valid JSON ({e}); fetch the file again", param="modules.json") from e
    if not isinstance(value, list):
        raise LoadError(f"{path}: holds {shown(value)}; a list of modules is needed", param="modules.json")
    return value


def _plain_name(name: str, prefix: str) -> str:
    name = name.removeprefix(prefix)
    for old, new in _OLD_ENDINGS.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name
