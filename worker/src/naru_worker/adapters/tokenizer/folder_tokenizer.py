"""Opens the tokenizer of a Hugging Face model folder: tokenizer.json and its settings.

Used when a model folder is loaded. `tokenizer_config.json` is optional and wins over what tokenizer.json adds by
itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from naru_proto.errors import LoadError
from naru_worker.adapters.tokenizer.model_tokenizer import ModelTokenizer
from naru_worker.adapters.tokenizer.typed_tokens import PROBE
from naru_worker.adapters.weights.hf_checkpoint import token_text
from naru_worker.adapters.weights.model_folder import (
    MAX_CONFIG_BYTES,
    MAX_TOKENIZER_BYTES,
    parse_json_object,
    read_small_file,
)
from naru_worker.core.fields import Fields


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What a folder's tokenizer is built from, read once."""

    folder: Path
    tokenizer: bytes
    config: bytes | None
    """None: there is no tokenizer_config.json."""


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Reads the files.

    Raises:
        LoadError: tokenizer.json is missing, or a file cannot be read.
    """
    path = folder / "tokenizer.json"
    raw = read_small_file(path, MAX_TOKENIZER_BYTES)
    if raw is None:
        raise LoadError(
            f"{path}: is missing; save the model's fast tokenizer beside its weights", param="tokenizer.json"
        )
    return TokenizerFiles(folder, raw, read_small_file(folder / "tokenizer_config.json", MAX_CONFIG_BYTES))


def folder_tokenizer(folder: Path, num_embeddings: int) -> ModelTokenizer:
    """The folder's tokenizer, for a model with that many embedding rows.

    Raises:
        LoadError: tokenizer.json is missing, broken or of a kind that cannot be streamed.
    """
    return tokenizer_of_files(read_tokenizer_files(folder), num_embeddings)


def tokenizer_of_files(files: TokenizerFiles, num_embeddings: int, *, generates: bool = True) -> ModelTokenizer:
    """The tokenizer of files that were read already. `generates` False: for a model that writes no text.

    Raises:
        LoadError: they are broken, or of a kind that cannot be streamed.
    """
    path = files.folder / "tokenizer.json"
    try:
        backend = Tokenizer.from_buffer(files.tokenizer)
        # Some files ask for both; what is put around a text could not be told from its padding.
        backend.no_truncation()
        backend.no_padding()
        prefix, suffix = _surroundings(backend)
    except Exception as e:  # The library raises no narrower class for any defect of the file.
        raise LoadError(f"{path}: is no tokenizer ({e})", param="tokenizer.json") from e
    config_path = str(files.folder / "tokenizer_config.json")
    settings = Fields(config_path, {} if files.config is None else parse_json_object(files.config, config_path))
    bos = _id_of(backend, settings, "bos_token")
    eos = _id_of(backend, settings, "eos_token")
    prefix = _forced(prefix, settings, "add_bos_token", bos)
    suffix = _forced(suffix, settings, "add_eos_token", eos)
    highest = max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
    return ModelTokenizer(
        backend,
        str(path),
        highest + 1,
        prefix=prefix,
        suffix=suffix,
        bos_token_id=bos,
        eos_token_id=eos,
        max_token_id=num_embeddings - 1,
        generates=generates,
    )


def _id_of(backend: Tokenizer, settings: Fields, name: str) -> int | None:
    text = token_text(settings.values.get(name))
    token_id: int | None = backend.token_to_id(text) if text else None
    return token_id


def _surroundings(backend: Tokenizer) -> tuple[list[int], list[int]]:
    """What the post-processor puts before and after a text."""
    plain: list[int] = backend.encode(PROBE, add_special_tokens=False).ids
    full: list[int] = backend.encode(PROBE, add_special_tokens=True).ids
    extra = len(full) - len(plain)
    for start in range(extra + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start], full[start + len(plain) :]
    return [], []


def _forced(added: list[int], settings: Fields, name: str, token_id: int | None) -> list[int]:
    """What is added, after the settings' own word on it; without one, as the post-processor has it."""
    if not settings.has(name):
        return added
    wanted = settings.boolean(name, False)
    if not wanted:
        return [i for i in added if i != token_id]
    return added if token_id is None or token_id in added else [token_id]
