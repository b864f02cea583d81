"""Whether a sequence ends with its newest token: EOS, stop tokens, and lengths. Stop strings are the output stream's.

Called by the scheduler at commit.
"""

from __future__ import annotations

from naru_worker.core.request import FinishReason, Sequence


def check_stop(
    sequence: Sequence, eos_token_ids: frozenset[int], max_model_len: int
) -> tuple[FinishReason | None, str]:
    """(finish reason or None, stop reason) after a token was appended. Stopping wins over length.

    A stop is obeyed when at least `min_tokens` output tokens came before it. The stop reason is empty for EOS.
    """
    params = sequence.request.params
    token_id = sequence.token_ids[-1]
    num_output = sequence.num_output_tokens
    if num_output > params.min_tokens:
        if not params.ignore_eos and token_id in eos_token_ids:
            return FinishReason.STOP, ""
        if token_id in params.stop_token_ids:
            return FinishReason.STOP, f"token:{token_id}"
    if num_output == params.max_tokens or len(sequence.token_ids) >= max_model_len:
        return FinishReason.LENGTH, ""
    return None, ""
