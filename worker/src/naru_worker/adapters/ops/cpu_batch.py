"""The arrays of one step as the native code wants them: checked shapes, addresses in structures.

Called by the CPU runner. Types, shapes and lengths are checked here; the values behind them by the native code, before
it reads through any of them.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from naru_proto.errors import InternalError
from naru_worker.adapters.ops.native_lib import SamplingInputs, SamplingOutputs, StepInputs
from naru_worker.adapters.ops.protocol import BatchInputs, SampleOutput, SamplingBatch

BROKEN_RULES = {
    -1: "the number of tokens is outside [1, max_num_tokens]",
    -2: "the number of sequences is outside [1, max_num_seqs]",
    -3: "a token id is outside the vocabulary",
    -4: "positions are not the last ones of their sequence",
    -5: "a slot lies outside the KV cache",
    -6: "query_start does not cut the tokens into one run per sequence",
    -7: "a seq_len is shorter than its run or above max_model_len",
    -8: "block_table has too few columns for a sequence",
    -9: "a block number lies outside the KV cache",
    -10: "a slot is not where the sequence's block table puts the token",
    -11: "logits_rows are not ascending token indices",
    -12: "a block to copy lies outside the KV cache",
    -13: "num_generated_tokens is not the end of a sequence's run",
    -20: "vocab_limit is outside [1, vocab_size]",
    -21: "a target is outside the vocabulary",
    -22: "offsets of a ragged list fall or do not start at 0",
    -23: "a token id of a bias, penalty or ban is outside the vocabulary",
    -24: "num_logprobs is outside [-1, max_logprobs]",
    -25: "a sampling value is not finite or out of range",
    -26: "a row's mask is none of the masks, or they are shorter than vocab_limit",
}
"""What the negative results of a step mean; see `native/src/validate.cc`."""


class _Addresses:
    """Checks arrays and keeps the converted ones alive."""

    def __init__(self) -> None:
        self.alive: list[npt.NDArray[Any]] = []

    def take(self, name: str, array: npt.NDArray[Any], dtype: type, shape: tuple[int, ...]) -> int:
        if array.dtype != dtype or array.shape != shape:
            raise InternalError(
                f"{name} is {array.dtype!s} of shape {array.shape!r}; {np.dtype(dtype)!s} of shape {shape!r} is needed"
            )
        if not array.flags.c_contiguous:
            array = np.ascontiguousarray(array)
        self.alive.append(array)
        address: int = array.__array_interface__["data"][0]
        return address


def step_inputs(batch: BatchInputs) -> tuple[StepInputs, list[npt.NDArray[Any]]]:
    """The native form of a batch, and the arrays that must outlive it.

    Raises:
        InternalError: an array has the wrong type or shape.
    """
    a = _Addresses()
    num_tokens, num_seqs = len(batch.token_ids), len(batch.seq_lens)
    num_rows, num_copies = len(batch.logits_rows), len(batch.copies)
    if batch.block_table.ndim != 2:
        raise InternalError(f"block_table has shape {batch.block_table.shape!r}; (num_seqs, max_blocks) is needed")
    max_blocks = batch.block_table.shape[1]
    inputs = StepInputs(
        num_tokens,
        num_seqs,
        num_rows,
        num_copies,
        max_blocks,
        a.take("token_ids", batch.token_ids, np.int32, (num_tokens,)),
        a.take("positions", batch.positions, np.int32, (num_tokens,)),
        a.take("slots", batch.slots, np.int32, (num_tokens,)),
        a.take("query_start", batch.query_start, np.int32, (num_seqs + 1,)),
        a.take("seq_lens", batch.seq_lens, np.int32, (num_seqs,)),
        a.take("block_table", batch.block_table, np.int32, (num_seqs, max_blocks)),
        a.take("logits_rows", batch.logits_rows, np.int32, (num_rows,)),
        a.take("copies", batch.copies, np.int32, (num_copies, 2)),
        batch.num_generated_tokens,
    )
    return inputs, a.alive


def sampling_inputs(batch: SamplingBatch, num_rows: int) -> tuple[SamplingInputs, list[npt.NDArray[Any]]]:
    """The native form of how to sample `num_rows` rows, and the arrays that must outlive it.

    Raises:
        InternalError: an array has the wrong type or shape, or an offset points past a list.
    """
    a = _Addresses()
    rows = (num_rows,)
    starts = (num_rows + 1,)

    def ragged(name: str, start: npt.NDArray[np.int32], *lists: npt.NDArray[Any]) -> int:
        address = a.take(f"{name}_start", start, np.int32, starts)
        if any(start[-1] > len(values) for values in lists):
            raise InternalError(f"{name}_start ends at {int(start[-1])}, past its list")
        return address

    def whole(name: str, values: npt.NDArray[Any], dtype: type) -> int:
        return a.take(name, values, dtype, (len(values),))

    inputs = SamplingInputs(
        batch.vocab_limit,
        batch.max_logprobs,
        a.take("temperature", batch.temperature, np.float32, rows),
        a.take("top_k", batch.top_k, np.int32, rows),
        a.take("top_p", batch.top_p, np.float32, rows),
        a.take("min_p", batch.min_p, np.float32, rows),
        a.take("presence_penalty", batch.presence_penalty, np.float32, rows),
        a.take("frequency_penalty", batch.frequency_penalty, np.float32, rows),
        a.take("repetition_penalty", batch.repetition_penalty, np.float32, rows),
        a.take("seed", batch.seed, np.uint64, rows),
        a.take("counter", batch.counter, np.uint64, rows),
        a.take("target", batch.target, np.int32, rows),
        a.take("num_logprobs", batch.num_logprobs, np.int32, rows),
        ragged("bias", batch.bias_start, batch.bias_ids, batch.bias_values),
        whole("bias_ids", batch.bias_ids, np.int32),
        whole("bias_values", batch.bias_values, np.float32),
        ragged("penalty", batch.penalty_start, batch.penalty_ids, batch.penalty_output_counts),
        whole("penalty_ids", batch.penalty_ids, np.int32),
        whole("penalty_output_counts", batch.penalty_output_counts, np.int32),
        ragged("banned", batch.banned_start, batch.banned_ids),
        whole("banned_ids", batch.banned_ids, np.int32),
    )
    masks = batch.masks
    if masks is not None:
        if masks.words.ndim != 2 or not masks.words.flags.c_contiguous:
            raise InternalError(f"masks have shape {masks.words.shape!r}; contiguous (masks, words) are needed")
        inputs.num_masks, inputs.mask_words = masks.words.shape
        inputs.mask_wait_ms = int(masks.wait_s * 1000)
        inputs.mask_rows = a.take("mask_rows", masks.rows, np.int32, rows)
        inputs.masks = a.take("masks", masks.words, np.uint32, masks.words.shape)
        inputs.mask_gate = a.take("mask_gate", masks.gate, np.int32, (1,))
    return inputs, a.alive


def sampling_outputs(num_rows: int, width: int, hidden_size: int = 0) -> tuple[SampleOutput, SamplingOutputs]:
    """Fresh arrays for the results of `num_rows` rows, and their native form. `hidden_size` 0: no hidden states."""
    output = SampleOutput(
        token_ids=np.zeros(num_rows, np.int32),
        logprobs=np.zeros(num_rows, np.float32),
        ranks=np.zeros(num_rows, np.int32),
        top_ids=np.full((num_rows, width), -1, np.int32),
        top_logprobs=np.full((num_rows, width), -9999.0, np.float32),
        hidden=np.empty((num_rows, hidden_size), np.float32) if hidden_size else None,
    )
    arrays = (output.token_ids, output.logprobs, output.ranks, output.top_ids, output.top_logprobs)
    outputs = SamplingOutputs(*(array.__array_interface__["data"][0] for array in arrays))
    if output.hidden is not None:
        outputs.hidden = output.hidden.__array_interface__["data"][0]
    return output, outputs


class StepOutputs:
    """The results of a runner's last step. Those of plain rows, which are one token each, are kept for the next one."""

    def __init__(self) -> None:
        self._kept: tuple[SampleOutput, SamplingOutputs] | None = None

    def take(self, num_rows: int, width: int, hidden_size: int) -> tuple[SampleOutput, SamplingOutputs]:
        """Arrays for a step, and their native form; void the ones before. See `sampling_outputs`."""
        if width or hidden_size:
            return sampling_outputs(num_rows, width, hidden_size)
        if self._kept is None or len(self._kept[0].token_ids) != num_rows:
            self._kept = sampling_outputs(num_rows, 0)
        return self._kept


def broken_rule(code: int) -> InternalError:
    """The error for a negative result of a step."""
    return InternalError(f"the batch is broken: {BROKEN_RULES.get(code, f'rule {code}')}")


def address(array: npt.NDArray[Any]) -> ctypes.c_void_p:
    """Address of an array's first element."""
    return ctypes.c_void_p(array.__array_interface__["data"][0])
