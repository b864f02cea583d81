"""What a tokenizer is built from, as a hash: equal ones give the very same tokenizer.

Called when a model's files are opened, by who builds a family's tokenizer once. Builds nothing itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from naru_worker.adapters.tokenizer.folder_tokenizer import TokenizerFiles

_HASH_BYTES = 32


def gguf_origin(metadata: Mapping[str, object], num_embeddings: int) -> bytes:
    """Of the metadata that `gguf_tokenizer` is given. Values of different types differ, the order of keys does not."""
    return _hash(b"gguf", num_embeddings, json.dumps(metadata, sort_keys=True).encode())


def folder_origin(files: TokenizerFiles, num_embeddings: int) -> bytes:
    """Of the files that `folder_tokenizer` reads; a missing one is not the same as an empty one."""
    config = b"-" if files.config is None else b"+" + files.config
    return _hash(b"folder", num_embeddings, files.tokenizer, config)


def _hash(kind: bytes, num_embeddings: int, *parts: bytes) -> bytes:
    digest = hashlib.blake2b(kind, digest_size=_HASH_BYTES)
    for part in (str(num_embeddings).encode(), *parts):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
