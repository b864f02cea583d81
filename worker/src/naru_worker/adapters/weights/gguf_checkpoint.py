"""Opens a GGUF file as a checkpoint.

Called by `open_checkpoint`. The tokenizer is read from the same file's metadata by the tokenizer adapter.
"""

from __future__ import annotations

import struct

from naru_proto.errors import LoadError
from naru_worker.adapters.ops.protocol import RawTensor
from naru_worker.adapters.weights.gguf_file import GgufFile
from naru_worker.adapters.weights.mapped_checkpoint import MappedCheckpoint
from naru_worker.core.fields import MAX_HEAD_DIM, Fields
from naru_worker.core.gguf_config import parse_gguf_config
from naru_worker.core.weight_names import gguf_place

FREQ_FACTORS = "rope_freqs.weight"


def gguf_checkpoint(file: GgufFile) -> MappedCheckpoint:
    """The checkpoint of an opened file, which it closes with itself.

    Raises:
        LoadError: unknown architecture, or a field or tensor that does not fit.
    """
    tensors = dict(file.tensors)
    fields = Fields(str(file.path), file.metadata)
    if fields.integer("split.count", 0, 2**16, 0) > 1:
        fields.fail("split.count", "is above 1; join the parts into one file first")
    freq_factors = _freq_factors(file, tensors.pop(FREQ_FACTORS, None))
    config = parse_gguf_config(fields, {name: t.shape for name, t in tensors.items()}, freq_factors)
    template = fields.text("tokenizer.chat_template", "")
    return MappedCheckpoint(config, template, [file], tensors, gguf_place)


def _freq_factors(file: GgufFile, tensor: RawTensor | None) -> tuple[float, ...]:
    if tensor is None:
        return ()
    if tensor.format != "f32" or len(tensor.shape) != 1 or tensor.shape[0] > MAX_HEAD_DIM:
        raise LoadError(
            f"{file.path}: tensor {FREQ_FACTORS!r} is {tensor.format} of shape {tensor.shape}; a short f32 vector is "
            "needed",
            param=FREQ_FACTORS,
        )
    return struct.unpack(f"<{tensor.shape[0]}f", tensor.data)
