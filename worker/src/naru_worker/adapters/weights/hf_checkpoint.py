"""Opens a Hugging Face model folder (config.json and safetensors) as a checkpoint.

Called by `open_checkpoint`. Reads no tokenizer beyond the ids that end an answer.
"""

from __future__ import annotations

from pathlib import Path

from naru_proto.errors import LoadError
from naru_worker.adapters.ops.protocol import RawTensor
from naru_worker.adapters.weights.mapped_checkpoint import MappedCheckpoint
from naru_worker.adapters.weights.model_folder import (
    MAX_TOKENIZER_BYTES,
    read_chat_template,
    read_json_object,
)
from naru_worker.adapters.weights.quantized_modules import QuantizedModules, is_part
from naru_worker.adapters.weights.safetensors_file import (
    SafetensorsFile,
    StoredTensor,
    other_dtypes,
    plain_tensors,
)
from naru_worker.core.fields import Fields, shown
from naru_worker.core.hf_config import parse_hf_config
from naru_worker.core.model_config import ModelConfig
from naru_worker.core.quantization import parse_quantization
from naru_worker.core.weight_layout import expected_shapes
from naru_worker.core.weight_names import hf_place

INDEX_NAME = "model.safetensors.index.json"
MAX_SHARDS = 4096
MAX_ID_DIGITS = 10
_WEIGHT = ".weight"


def hf_checkpoint(folder: Path) -> MappedCheckpoint:
    """The checkpoint of a folder.

    Raises:
        LoadError: unknown architecture, or a file, field or tensor that does not fit.
    """
    config_path = folder / "config.json"
    values = read_json_object(config_path)
    if values is None:
        raise LoadError(f"{config_path}: is missing", param="config.json")
    tokenizer_config = read_json_object(folder / "tokenizer_config.json") or {}
    fields = Fields(str(config_path), values)
    quantization = parse_quantization(fields)
    config = parse_hf_config(fields, _other_eos_ids(folder, tokenizer_config))
    if quantization is not None and config.architecture == "gpt2":
        fields.fail("quantization_config", "is set; GPT-2 models are served from plain safetensors, or from GGUF")
    template = read_chat_template(folder, tokenizer_config)
    files: list[SafetensorsFile] = []
    try:
        stored = open_shards(folder, files)
        quantized: dict[str, RawTensor] = {}
        if quantization is not None:
            quantized = _quantized_weights(config, QuantizedModules(str(folder), quantization, stored))
            stored = {name: tensor for name, tensor in stored.items() if not is_part(name)}
        tensors, unusable = plain_tensors(stored) | quantized, other_dtypes(stored)
        if config.architecture == "gpt2":
            tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
            unusable = {name.removeprefix("transformer."): dtype for name, dtype in unusable.items()}
        return MappedCheckpoint(config, template, files, tensors, hf_place, unusable)
    except LoadError:
        for file in files:
            file.close()
        raise


def token_text(value: object) -> str:
    """The text of a special token as tokenizer_config.json spells it: a string, or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _quantized_weights(config: ModelConfig, modules: QuantizedModules) -> dict[str, RawTensor]:
    """The quantized ones among the matrices that the model needs, by the names that plain ones have in files."""
    found: dict[str, RawTensor] = {}
    for name, shape in expected_shapes(config).items():
        source = hf_place(config, name).source
        # Rows of tables are looked up, which is done in plain ones alone.
        if len(shape) == 2 and source.endswith(_WEIGHT) and name != "embed":
            weight = modules.weight(source.removesuffix(_WEIGHT), (shape[0], shape[1]))
            if weight is not None:
                found[source] = weight
    return found


def open_shards(folder: Path, files: list[SafetensorsFile]) -> dict[str, StoredTensor]:
    """Opens every file into `files`; all tensors by name.

    Raises:
        LoadError: a file is missing or broken, or has not what the index says.
    """
    index_path = folder / INDEX_NAME
    index = read_json_object(index_path)
    if index is None:
        file = SafetensorsFile(_single_file(folder))
        files.append(file)
        return file.stored
    stored: dict[str, StoredTensor] = {}
    for shard, names in _shards(index_path, index).items():
        file = SafetensorsFile(folder / shard)
        files.append(file)
        for name in names:
            if name not in file.stored:
                raise LoadError(
                    f"{folder / shard}: tensor {name!r} is missing, though the index puts it here", param=name
                )
            stored[name] = file.stored[name]
    return stored


def _single_file(folder: Path) -> Path:
    found = sorted(folder.glob("*.safetensors"))
    if folder / "model.safetensors" in found:
        return folder / "model.safetensors"
    if len(found) != 1:
        raise LoadError(f"{folder}: has {len(found)} safetensors files and no {INDEX_NAME}; one of both is needed")
    return found[0]


def _shards(index_path: Path, index: dict[str, object]) -> dict[str, list[str]]:
    """File name to the tensors it holds. A name that leaves the folder is refused."""
    weight_map = Fields(str(index_path), index).table("weight_map")
    shards: dict[str, list[str]] = {}
    for name, shard in weight_map.items():
        if (
            not isinstance(shard, str)
            or not shard.endswith(".safetensors")
            or shard != Path(shard).name
            or "\0" in shard
        ):
            raise LoadError(
                f"{index_path}: weight_map puts {shown(name)} into {shown(shard)}; the plain name of a .safetensors "
                "file in the same folder is needed",
                param="weight_map",
            )
        shards.setdefault(shard, []).append(name)
    if not 1 <= len(shards) <= MAX_SHARDS:
        raise LoadError(f"{index_path}: weight_map names {len(shards)} files; 1 to {MAX_SHARDS} are allowed")
    return shards


def _other_eos_ids(folder: Path, tokenizer_config: dict[str, object]) -> frozenset[int]:
    """End-of-sequence ids from generation_config.json and the tokenizer."""
    path = folder / "generation_config.json"
    ids = Fields(str(path), read_json_object(path) or {}).token_ids("eos_token_id")
    text = token_text(tokenizer_config.get("eos_token"))
    if not text:
        return ids
    for source, table in (
        ("tokenizer_config.json", tokenizer_config.get("added_tokens_decoder")),
        ("tokenizer.json", _added_tokens(folder)),
    ):
        if isinstance(table, dict):
            for token_id, entry in table.items():
                if token_text(entry) == text and token_id.isdecimal() and len(token_id) < MAX_ID_DIGITS:
                    return ids | Fields(source, {"eos_token": int(token_id)}).token_ids("eos_token")
    return ids


def _added_tokens(folder: Path) -> dict[str, object]:
    """Id to entry of the tokens that tokenizer.json lists beside its vocabulary."""
    parsed = read_json_object(folder / "tokenizer.json", MAX_TOKENIZER_BYTES)
    listed = parsed.get("added_tokens") if parsed else None
    if not isinstance(listed, list):
        return {}
    return {str(entry.get("id")): entry for entry in listed if isinstance(entry, dict)}
