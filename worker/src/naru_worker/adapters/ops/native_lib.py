"""Loads the compiled kernels and declares their C interface to ctypes.

Called by the CPU backend. Structures mirror `native/src/model_spec.h` and `sampler.h` field by field. A call through
`ctypes.CDLL` holds no GIL, so other threads of the worker run during a step.
"""

from __future__ import annotations

import ctypes
import logging
import os
from ctypes import POINTER, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from functools import cache

from naru_proto.errors import LoadError
from naru_worker.adapters.ops.isa_trial import trial_failure
from naru_worker.native.build import BuildError, ensure_library
from naru_worker.native.isa import FORCE_VARIABLE, VARIANTS, detect_isa

_log = logging.getLogger(__name__)


class ModelSpec(ctypes.Structure):
    """Sizes of a model; see `native/src/model_spec.h`."""

    _fields_ = [
        ("weight_bytes", c_int64),
        ("num_layers", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("vocab_size", c_int32),
        ("block_size", c_int32),
        ("num_blocks", c_int32),
        ("kv_element_bytes", c_int32),
        ("max_num_tokens", c_int32),
        ("max_num_seqs", c_int32),
        ("max_model_len", c_int32),
        ("num_threads", c_int32),
        ("rotary_dim", c_int32),
        ("rope_factor", c_float),
    ]


class BufferSpec(ctypes.Structure):
    """Activations between operations."""

    _fields_ = [
        ("width", c_int32),
        ("wants_f", c_int32),
        ("wants_q", c_int32),
        ("gathered", c_int32),
        ("fed", c_int32),
    ]


class Instruction(ctypes.Structure):
    """One recorded operation; ids index the model's buffers, matrices and vectors."""

    _fields_ = [
        ("op", c_int32),
        ("dst", c_int32),
        ("src", c_int32),
        ("weight", c_int32),
        ("bias", c_int32),
        ("layer", c_int32),
        ("kind", c_int32),
        ("window", c_int32),
        ("value", c_float),
        ("tail", c_int32),
    ]


class StepInputs(ctypes.Structure):
    """Counts and array addresses of one step; the arrays stay alive until the call returns."""

    _fields_ = [
        ("num_tokens", c_int32),
        ("num_seqs", c_int32),
        ("num_rows", c_int32),
        ("num_copies", c_int32),
        ("max_blocks", c_int32),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("query_start", c_void_p),
        ("seq_lens", c_void_p),
        ("block_table", c_void_p),
        ("logits_rows", c_void_p),
        ("copies", c_void_p),
        ("num_generated_tokens", c_int32),
    ]


class SamplingInputs(ctypes.Structure):
    """How to sample each row; array addresses as in `StepInputs`."""

    _fields_ = [
        ("vocab_limit", c_int32),
        ("max_logprobs", c_int32),
        ("temperature", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("presence_penalty", c_void_p),
        ("frequency_penalty", c_void_p),
        ("repetition_penalty", c_void_p),
        ("seed", c_void_p),
        ("counter", c_void_p),
        ("target", c_void_p),
        ("num_logprobs", c_void_p),
        ("bias_start", c_void_p),
        ("bias_ids", c_void_p),
        ("bias_values", c_void_p),
        ("penalty_start", c_void_p),
        ("penalty_ids", c_void_p),
        ("penalty_counts", c_void_p),
        ("banned_start", c_void_p),
        ("banned_ids", c_void_p),
        ("mask_rows", c_void_p),
        ("masks", c_void_p),
        ("mask_gate", c_void_p),
        ("num_masks", c_int32),
        ("mask_words", c_int32),
        ("mask_wait_ms", c_int32),
    ]


class SamplingOutputs(ctypes.Structure):
    """Where a step's results go."""

    _fields_ = [
        ("token_ids", c_void_p),
        ("logprobs", c_void_p),
        ("ranks", c_void_p),
        ("top_ids", c_void_p),
        ("top_logprobs", c_void_p),
        ("hidden", c_void_p),
    ]


class EncoderSpec(ctypes.Structure):
    """Sizes of an encoder; see `native/src/encoder.h`."""

    _fields_ = [
        ("num_layers", c_int32),
        ("num_heads", c_int32),
        ("head_dim", c_int32),
        ("hidden", c_int32),
        ("inner", c_int32),
        ("vocab_size", c_int32),
        ("num_positions", c_int32),
        ("first_position", c_int32),
        ("num_types", c_int32),
        ("act", c_int32),
        ("pooling", c_int32),
        ("num_labels", c_int32),
        ("head_act", c_int32),
        ("max_len", c_int32),
        ("num_threads", c_int32),
        ("eps", c_float),
    ]


class EncoderInputs(ctypes.Structure):
    """A batch of token sequences; array addresses as in `StepInputs`."""

    _fields_ = [
        ("num_seqs", c_int32),
        ("starts", c_void_p),
        ("token_ids", c_void_p),
        ("token_types", c_void_p),
    ]


_SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "naru_tiles": (c_int32, ()),
    "naru_self_test": (c_int32, ()),
    "naru_segment_bytes": (c_int64, (c_int32, c_int32, c_int32)),
    "naru_pack_segment": (None, (c_int32, c_int32, c_int32, c_void_p, c_void_p)),
    "naru_fault_in": (c_int32, (c_void_p, c_int64, c_void_p, c_int64)),
    "naru_device_new": (c_void_p, (c_int32,)),
    "naru_device_spin": (None, (c_void_p, c_int64)),
    "naru_device_free": (None, (c_void_p,)),
    "naru_workspace": (c_void_p, (c_void_p,)),
    "naru_claimed_bytes": (c_int64, (c_void_p,)),
    "naru_workspace_bytes": (c_int64, (POINTER(ModelSpec), POINTER(BufferSpec), c_int32)),
    "naru_model_new": (c_void_p, (c_void_p, POINTER(ModelSpec), c_void_p)),
    "naru_model_free": (None, (c_void_p,)),
    "naru_add_vector": (c_int32, (c_void_p, c_void_p, c_int32)),
    "naru_add_vector_view": (c_int32, (c_void_p, c_void_p, c_uint64)),
    "naru_add_matrix": (c_int32, (c_void_p, c_int32, c_int32, c_void_p, c_void_p, c_void_p, c_void_p)),
    "naru_add_matrix_view": (
        c_int32,
        (c_void_p, c_int32, c_int32, c_void_p, c_void_p, c_void_p, c_void_p, c_uint64),
    ),
    "naru_finish": (c_int32, (c_void_p, POINTER(BufferSpec), c_int32, POINTER(Instruction), c_int32)),
    "naru_start_from": (None, (c_void_p, c_uint64)),
    "naru_set_ready": (None, (c_void_p, c_uint64)),
    "naru_fail": (None, (c_void_p,)),
    "naru_wake": (None, (c_void_p,)),
    "naru_step": (
        c_int32,
        (c_void_p, POINTER(StepInputs), POINTER(SamplingInputs), POINTER(SamplingOutputs), c_void_p, c_int64),
    ),
    "naru_claims": (c_int64, (c_void_p,)),
    "naru_release_blocks": (None, (c_void_p, c_int32, c_int32)),
    "naru_kv_base": (c_void_p, (c_void_p,)),
    "naru_kv_bytes": (c_int64, (c_void_p,)),
    "naru_uniform": (c_double, (c_uint64, c_uint64)),
    "naru_matrix_row": (None, (c_void_p, c_int32, c_int32, c_void_p)),
    "naru_linear": (c_int32, (c_void_p, c_int32, c_void_p, c_int32, c_void_p, c_int32)),
    "naru_attend_prompt": (
        c_int32,
        (c_void_p, c_void_p, c_int32, c_int32, c_int32, c_void_p, c_float, c_void_p, c_int32),
    ),
    "naru_encoder_weight_bytes": (c_int64, (POINTER(EncoderSpec),)),
    "naru_encoder_workspace_bytes": (c_int64, (POINTER(EncoderSpec),)),
    "naru_encoder_new": (c_void_p, (c_void_p, POINTER(EncoderSpec))),
    "naru_encoder_free": (None, (c_void_p,)),
    "naru_encoder_put": (c_int32, (c_void_p, c_int32, c_void_p)),
    "naru_encode": (c_int32, (c_void_p, POINTER(EncoderInputs), c_void_p)),
    "naru_sample": (None, (POINTER(SamplingInputs), POINTER(SamplingOutputs), c_int32, c_void_p, c_int32)),
}


@cache
def load_variant(isa: str) -> ctypes.CDLL:
    """The library for one instruction set, compiled when missing, loaded once per process.

    Raises:
        LoadError: it cannot be compiled or loaded; the message says what to do.
    """
    try:
        library = ctypes.CDLL(str(ensure_library(isa)))
    except BuildError as error:
        raise LoadError(f"the cpu backend has no kernels: {error}") from error
    except OSError as error:
        raise LoadError(f"the compiled CPU kernels cannot be loaded: {error}; delete the file to rebuild it") from error
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


def best_isa() -> str:
    """The instruction set to use: the best of this machine that passes its own test, or the one that is forced.

    Raises:
        LoadError: see `load_variant`; also when the forced variant is unknown, cannot run here or fails its test.
    """
    try:
        isa = detect_isa()
    except ValueError as error:
        raise LoadError(str(error)) from error
    forced = os.environ.get(FORCE_VARIABLE, "") != ""
    for variant in reversed(list(VARIANTS)[: list(VARIANTS).index(isa) + 1]):
        failure = _failure_of(variant)
        if not failure:
            return variant
        if forced:
            raise LoadError(f"{FORCE_VARIABLE} is {variant!r}, but {failure}; unset it or force a lower variant")
        _warn_once(variant, failure)
    raise LoadError(
        "no variant of the CPU kernels passes its own test on this machine; it cannot serve the cpu backend"
    )


@cache
def _warn_once(variant: str, failure: str) -> None:
    _log.warning("the CPU kernels for %s are not used: %s; a slower variant takes their place", variant, failure)


@cache
def _failure_of(variant: str) -> str:
    """Why a variant cannot be used here; empty when it can."""
    try:
        library = ensure_library(variant)
    except BuildError as error:
        raise LoadError(f"the cpu backend has no kernels: {error}") from error
    failure = trial_failure(library)
    # The CPU has tiles but the system may not grant them (containers with a strict seccomp profile).
    if not failure and load_variant(variant).naru_tiles() == 0:
        return "the system does not grant tiles"
    return failure


def load_best() -> ctypes.CDLL:
    """The library of `best_isa`.

    Raises:
        LoadError: see `best_isa`.
    """
    return load_variant(best_isa())
