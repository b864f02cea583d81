"""The words for a model on a worker: its states, and what is to be loaded under its name.

Used by the hub, which decides, by its shell, and by the server, which tells.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal, get_args

from naru_proto.errors import InvalidRequest


class ModelState(enum.Enum):
    """Where a model stands. The names are those of `naru.v1.ModelState`."""

    COLD = "cold"
    FETCHING = "fetching"
    HOST = "host"
    LOADING = "loading"
    READY = "ready"
    ACTIVE = "active"
    DRAINING = "draining"
    FAILED = "failed"

    @property
    def is_serving(self) -> bool:
        """Whether requests of the model go to its engine."""
        return self in (ModelState.READY, ModelState.ACTIVE)


MAX_BATCH_DELAY_S = 60.0
KVCacheDtype = Literal["auto", "float16", "int8"]
KV_CACHE_DTYPES: tuple[KVCacheDtype, ...] = get_args(KVCacheDtype)
_AT_LEAST_1 = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_bytes",
    "kv_cache_min_bytes",
    "max_batch_size",
    "max_draft_tokens",
    "tensor_parallel_size",
)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What a load may ask for; None takes the worker's setting."""

    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_bytes: int | None = None
    """The most the KV cache grows to."""
    enable_prefix_caching: bool | None = None
    kv_cache_min_bytes: int | None = None
    """What the KV cache starts with and keeps."""
    max_batch_size: int | None = None
    """Of models that do not generate: most inputs computed at once."""
    max_batch_delay_s: float | None = None
    """And how long the first of a batch waits for more."""
    speculation: str | None = None
    """``auto``: guessed tokens are computed where they pay; ``off``."""
    max_draft_tokens: int | None = None
    """Most guessed tokens of one sequence in one step."""
    kv_cache_dtype: KVCacheDtype | None = None
    """Element type of the KV cache; int8 halves it and rounds it to bytes with a scale per token and kv head."""
    tensor_parallel_size: int | None = None
    """Accelerators that the model is cut over."""

    def __post_init__(self) -> None:
        """Checks ranges.

        Raises:
            InvalidRequest: a number is out of range.
        """
        for name in _AT_LEAST_1:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequest(f"{name} is {value}; it must be at least 1", param=name)
        if self.max_batch_delay_s is not None and not 0.0 <= self.max_batch_delay_s <= MAX_BATCH_DELAY_S:
            raise InvalidRequest(
                f"max_batch_delay_s is {self.max_batch_delay_s}; it must be in [0, {MAX_BATCH_DELAY_S:g}]",
                param="max_batch_delay_s",
            )
        if self.speculation not in (None, "auto", "off"):
            raise InvalidRequest(
                f"speculation is {self.speculation[:40]!r}; it must be auto or off", param="speculation"
            )
        if self.kv_cache_dtype is not None and self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise InvalidRequest(
                f"kv_cache_dtype is {self.kv_cache_dtype[:40]!r}; use one of {', '.join(KV_CACHE_DTYPES)}",
                param="kv_cache_dtype",
            )
        if self.kv_cache_bytes is not None and (self.kv_cache_min_bytes or 0) > self.kv_cache_bytes:
            raise InvalidRequest(
                f"kv_cache_min_bytes is {self.kv_cache_min_bytes}, above kv_cache_bytes {self.kv_cache_bytes}",
                param="kv_cache_min_bytes",
            )


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What to load: where from, and how it runs."""

    uri: str
    revision: str = ""
    options: LoadOptions = LoadOptions()
    credentials: str = ""
    """Name of the credentials of its source on the worker; empty: what the worker's environment offers."""
