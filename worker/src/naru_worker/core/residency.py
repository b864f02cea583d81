"""What a worker does when a model is to be loaded or unloaded: decisions over the last thing that was asked.

Called by the model host, which carries them out one at a time per model. The end state is the last one asked for;
what an older generation asks is refused.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from naru_proto.errors import InvalidRequest


class ModelState(enum.Enum):
    """Where a model stands. The names are those of `naru.v1.ModelState`."""

    COLD = "cold"
    FETCHING = "fetching"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What a load may ask for; None takes the worker's setting."""

    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_bytes: int | None = None
    enable_prefix_caching: bool | None = None

    def __post_init__(self) -> None:
        """Checks ranges.

        Raises:
            InvalidRequest: a number is not positive.
        """
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequest(f"{name} is {value}; it must be at least 1", param=name)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What to load: where from, and how it runs."""

    uri: str
    revision: str = ""
    options: LoadOptions = LoadOptions()


@dataclass(frozen=True, slots=True)
class Desired:
    """The last thing asked for of a model. `spec` None: not in memory."""

    generation: int
    spec: ModelSpec | None


def ask_load(model: str, last: Desired | None, generation: int, spec: ModelSpec) -> Desired:
    """What is desired after a load was asked for.

    Raises:
        InvalidRequest: the generation is older than one seen, or stands for something else already.
    """
    _refuse_older(model, last, generation)
    if last is not None and last.generation == generation and last.spec is not None and last.spec != spec:
        raise InvalidRequest(
            f"generation {generation} of model {model!r} stands for {last.spec.uri!r} with other files or options; "
            "raise the generation to replace it, or unload it first",
            param="generation",
        )
    return Desired(generation, spec)


def ask_unload(model: str, last: Desired | None, generation: int) -> Desired:
    """What is desired after an unload was asked for.

    Raises:
        InvalidRequest: the generation is older than one seen.
    """
    _refuse_older(model, last, generation)
    return Desired(generation, None)


def _refuse_older(model: str, last: Desired | None, generation: int) -> None:
    if last is not None and generation < last.generation:
        raise InvalidRequest(
            f"generation {generation} of model {model!r} is older than {last.generation}, which this worker has seen; "
            "ask with the newest one",
            param="generation",
        )
