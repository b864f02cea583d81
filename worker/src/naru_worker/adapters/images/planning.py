"""Decides what an image of an opened model will hold, and under which digest. Runs in the packing process.

Reads the whole source once, to know its content by a hash. Writes nothing.
"""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor

from naru_worker.adapters.images.config_record import config_to_json
from naru_worker.adapters.images.header import HASH_BYTES, VERSION, digest_of
from naru_worker.adapters.images.image_index import ImageIndex
from naru_worker.adapters.images.tokenizer_sections import TokenizerSection, TokenizerSections
from naru_worker.adapters.images.weight_plan import plan_weights
from naru_worker.adapters.images.writer import PlannedImage
from naru_worker.adapters.models.opening import OpenedFiles, add_tokenizer_facts
from naru_worker.adapters.ops.native_lib import load_best
from naru_worker.adapters.tokenizer.model_tokenizer import ModelTokenizer
from naru_worker.adapters.weights.mapped_checkpoint import MappedCheckpoint
from naru_worker.core.weight_layout import expected_shapes


def plan_image(files: OpenedFiles, sections: TokenizerSections) -> PlannedImage:
    """Builds the tokenizer unless it is in `sections`, hashes the tensors, and says where everything goes.

    Raises:
        LoadError: the model cannot be served.
    """
    with ThreadPoolExecutor(1) as beside:
        content = beside.submit(_content_hash, files.checkpoint)

        def build() -> ModelTokenizer:
            tokenizer = files.build_tokenizer()
            # What is done with it next is measured: nobody else may allocate.
            content.result()
            return tokenizer

        section = sections.get(files.tokenizer_origin(), build)
        vocab_limit = add_tokenizer_facts(files.checkpoint, section.eos_token_id, section.vocab_size)
        return _plan(files.checkpoint, section, vocab_limit, content.result())


def _plan(checkpoint: MappedCheckpoint, section: TokenizerSection, vocab_limit: int, content: bytes) -> PlannedImage:
    config = checkpoint.config
    weights = plan_weights(checkpoint, load_best().naru_segment_bytes)
    decides = [
        VERSION, content.hex(), checkpoint.revision, config_to_json(config), checkpoint.chat_template, section.key,
        vocab_limit,
    ]  # fmt: skip
    index = ImageIndex(
        digest=digest_of(json.dumps(decides, sort_keys=True).encode()).hex(),
        revision=checkpoint.revision,
        config=config,
        chat_template=checkpoint.chat_template,
        vocab_limit=vocab_limit,
        tokenizer_key=section.key,
        tokenizer_resident_bytes=section.resident_bytes,
        stage_ends=weights.stage_ends,
        matrices=weights.matrices,
        vectors=weights.vectors,
    )
    return PlannedImage(index, index.to_json(), section.raw)


def _content_hash(checkpoint: MappedCheckpoint) -> bytes:
    """Of every tensor the model uses. Not the revision, which is sums: a name that others share must not be forged."""
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    for name in expected_shapes(checkpoint.config):
        tensor = checkpoint.get(name)
        digest.update(f"{name} {tensor.format} {tensor.shape} {tensor.num_bytes}\n".encode())
        digest.update(tensor.data)
    return digest.digest()
