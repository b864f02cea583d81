"""Log-probabilities in OpenAI's two shapes: the chat list of tokens, and the older completions arrays.

Numbers are finite whatever the worker sends: JSON has no -inf.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from naru_proto.v1.inference_pb2 import PositionLogprobs, TokenLogprob

FLOOR = -9999.0
"""Stands for every probability too small to tell from zero; OpenAI's own floor."""


def finite(logprob: float) -> float:
    """The number within [FLOOR, 0]; NaN is FLOOR."""
    return min(logprob, 0.0) if logprob >= FLOOR else FLOOR


def chat_content(positions: Iterable[PositionLogprobs]) -> list[dict[str, object]]:
    """Entries of `logprobs.content`, one a position."""
    content = []
    for position in positions:
        entry = _chat_token(position.chosen)
        entry["top_logprobs"] = [_chat_token(token) for token in position.top]
        content.append(entry)
    return content


def _chat_token(token: TokenLogprob) -> dict[str, object]:
    return {"token": token.token, "logprob": finite(token.logprob), "bytes": list(token.bytes)}


class LegacyLogprobs:
    """Builds the arrays of `choices[].logprobs` of completions, chunk by chunk, keeping the text offset.

    `add_*` collect, `take` gives what was collected since the last take. Offsets count characters from the start of
    the choice's text, echoed prompt included.
    """

    def __init__(self) -> None:
        self._tokens: list[str] = []
        self._token_logprobs: list[float | None] = []
        self._top_logprobs: list[dict[str, float] | None] = []
        self._text_offset: list[int] = []
        self._num_chars = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, positions: Iterable[PositionLogprobs]) -> None:
        """Adds output positions."""
        for position in positions:
            self._add_position(position)

    def add_prompt(self, positions: Sequence[PositionLogprobs], prompt: str | None) -> None:
        """Adds an echoed prompt: the first position has no logprob, as nothing stands before it.

        Where the worker left out the first token's text, it is what of `prompt` the other tokens do not cover.
        """
        if not positions:
            return
        first = positions[0]
        rest_bytes = b"".join(p.chosen.bytes for p in positions[1:])
        if first.HasField("chosen"):
            first_bytes = first.chosen.bytes
        else:
            first_bytes = _uncovered(prompt, rest_bytes)
        self._append(_token_text(first_bytes), None, None)
        if prompt is None or (first_bytes + rest_bytes) == prompt.encode():
            self._advance(first_bytes)
        # else: a token the tokenizer put before the text; it takes no room in it
        for position in positions[1:]:
            self._add_position(position)

    def set_num_chars(self, num_chars: int) -> None:
        """Puts the offset where the echoed prompt's text ends."""
        self._num_chars = num_chars
        self._decoder.reset()

    def take(self) -> dict[str, object] | None:
        """The arrays collected since the last take, None when there is nothing."""
        if not self._tokens:
            return None
        result: dict[str, object] = {
            "tokens": self._tokens,
            "token_logprobs": self._token_logprobs,
            "top_logprobs": self._top_logprobs,
            "text_offset": self._text_offset,
        }
        self._tokens, self._token_logprobs, self._top_logprobs, self._text_offset = [], [], [], []
        return result

    def _add_position(self, position: PositionLogprobs) -> None:
        chosen = position.chosen
        top: dict[str, float] = {}
        for token in position.top:
            top.setdefault(_token_text(token.bytes), finite(token.logprob))
        top.setdefault(_token_text(chosen.bytes), finite(chosen.logprob))
        self._append(_token_text(chosen.bytes), finite(chosen.logprob), top)
        self._advance(chosen.bytes)

    def _append(self, token: str, logprob: float | None, top: dict[str, float] | None) -> None:
        self._tokens.append(token)
        self._token_logprobs.append(logprob)
        self._top_logprobs.append(top)
        self._text_offset.append(self._num_chars)

    def _advance(self, data: bytes) -> None:
        self._num_chars += len(self._decoder.decode(data))


def _token_text(data: bytes) -> str:
    """A token as a key: its text, or OpenAI's spelling of bytes that are no whole characters."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _uncovered(prompt: str | None, rest: bytes) -> bytes:
    whole = (prompt or "").encode()
    return whole[: len(whole) - len(rest)] if whole.endswith(rest) else b""


def prompt_text(positions: Sequence[PositionLogprobs]) -> str:
    """The text of a prompt given as token ids, from the worker's account of its positions."""
    return b"".join(position.chosen.bytes for position in positions).decode("utf-8", "replace")


def prompt_values(positions: Iterable[PositionLogprobs]) -> list[dict[str, dict[str, object]] | None]:
    """`prompt_logprobs` as vLLM's clients read them: by token id; the first position has none."""
    values: list[dict[str, dict[str, object]] | None] = []
    for position in positions:
        tokens = {str(token.token_id): _ranked(token) for token in position.top}
        tokens.setdefault(str(position.chosen.token_id), _ranked(position.chosen))
        values.append(tokens if values else None)
    return values


def _ranked(token: TokenLogprob) -> dict[str, object]:
    return {"logprob": finite(token.logprob), "rank": token.rank, "decoded_token": token.token}
