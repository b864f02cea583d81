"""`open_model`: weights and tokenizer of one model, opened and checked together.

Called by the worker when a model is loaded, before any memory is taken for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from naru_proto.errors import LoadError
from naru_worker.adapters.tokenizer.folder_tokenizer import TokenizerFiles, read_tokenizer_files, tokenizer_of_files
from naru_worker.adapters.tokenizer.gguf_tokenizer import gguf_tokenizer, tokenizer_metadata
from naru_worker.adapters.tokenizer.model_tokenizer import ModelTokenizer
from naru_worker.adapters.tokenizer.origin import folder_origin, gguf_origin
from naru_worker.adapters.weights.gguf_checkpoint import gguf_checkpoint
from naru_worker.adapters.weights.gguf_file import GgufFile
from naru_worker.adapters.weights.hf_checkpoint import hf_checkpoint
from naru_worker.adapters.weights.mapped_checkpoint import MappedCheckpoint
from naru_worker.adapters.weights.opening import find_gguf
from naru_worker.core.fields import Fields


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model ready to be loaded by a backend."""

    checkpoint: MappedCheckpoint
    """Its config's EOS ids include the tokenizer's."""
    tokenizer: ModelTokenizer
    vocab_limit: int
    """Ids at or above it are never drawn: the smaller of embedding and tokenizer."""

    def close(self) -> None:
        """Unmaps the weights; the tokenizer lives on."""
        self.checkpoint.close()


@dataclass(frozen=True, slots=True)
class OpenedFiles:
    """A model whose tokenizer is still to be built: it takes as long as packing the weights, and can run beside it."""

    checkpoint: MappedCheckpoint
    build_tokenizer: Callable[[], ModelTokenizer]
    """Raises LoadError; may be called in another thread, once."""
    tokenizer_origin: Callable[[], bytes]
    """Hash of everything that `build_tokenizer` builds from; called before it. Raises LoadError."""


def open_files(path: Path) -> OpenedFiles:
    """Opens a GGUF file, a folder with config.json and safetensors, or a folder with one GGUF file.

    Raises:
        LoadError: nothing servable is there, or a file is broken; names file and field.
    """
    gguf = find_gguf(path)
    if gguf is None:
        checkpoint = hf_checkpoint(path)
        tokenizer = _FolderTokenizer(path, checkpoint.config.vocab_size)
        return OpenedFiles(checkpoint, tokenizer.build, tokenizer.origin)
    file = GgufFile(gguf)
    try:
        checkpoint = gguf_checkpoint(file)
    except LoadError:
        file.close()
        raise
    num_embeddings = checkpoint.config.vocab_size
    return OpenedFiles(
        checkpoint,
        lambda: _tokenizer_of(file, num_embeddings),
        lambda: gguf_origin(tokenizer_metadata(file.metadata), num_embeddings),
    )


class _FolderTokenizer:
    """Builds from the very bytes whose hash was taken, though the files may change meanwhile."""

    def __init__(self, folder: Path, num_embeddings: int) -> None:
        self._folder = folder
        self._num_embeddings = num_embeddings
        self._files: TokenizerFiles | None = None

    def origin(self) -> bytes:
        self._files = read_tokenizer_files(self._folder)
        return folder_origin(self._files, self._num_embeddings)

    def build(self) -> ModelTokenizer:
        # Let go with the call: the model may be loaded for long.
        files, self._files = self._files or read_tokenizer_files(self._folder), None
        return tokenizer_of_files(files, self._num_embeddings)


def join_model(checkpoint: MappedCheckpoint, tokenizer: ModelTokenizer) -> OpenedModel:
    """Checkpoint and tokenizer as one model; adds the tokenizer's EOS to the config's."""
    vocab_limit = add_tokenizer_facts(checkpoint, tokenizer.eos_token_id, tokenizer.vocab_size)
    return OpenedModel(checkpoint, tokenizer, vocab_limit)


def add_tokenizer_facts(checkpoint: MappedCheckpoint, eos_token_id: int | None, vocab_size: int) -> int:
    """Adds the tokenizer's EOS to the config's; returns the model's `vocab_limit`."""
    if eos_token_id is not None:
        eos = {*checkpoint.config.eos_token_ids, eos_token_id}
        checkpoint.config = replace(checkpoint.config, eos_token_ids=tuple(sorted(eos)))
    return min(checkpoint.config.vocab_size, vocab_size)


def _tokenizer_of(file: GgufFile, num_embeddings: int) -> ModelTokenizer:
    tokenizer = gguf_tokenizer(Fields(str(file.path), tokenizer_metadata(file.metadata)), num_embeddings)
    # The vocabulary lives in the tokenizer now; the file's lists would stay as long as the weights.
    file.metadata.clear()
    return tokenizer


def open_model(path: Path) -> OpenedModel:
    """`open_files` and its tokenizer, one after the other.

    Raises:
        LoadError: nothing servable is there, or a file is broken; names file and field.
    """
    files = open_files(path)
    try:
        return join_model(files.checkpoint, files.build_tokenizer())
    except BaseException:
        files.checkpoint.close()
        raise
