"""Prompts of a simulated fleet: real text, its blocks as a worker caches them, and its route keys as Naru makes them.

Called by the traces. Blocks are numbered by content: two prompts share a number where they share the text up to there.
Every token is four bytes, so that sixteen tokens are a block of 64 bytes. Nothing here reads a clock.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from naru_proto.route_keys import boundaries, key_root, keys_of_text

TOKEN_BYTES = 4
BLOCK_TOKENS = 16
BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES
RouteKey = tuple[str, bytes]
"""With the model it belongs to."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat."""

    role: str
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A request's prompt: computed once, read by every policy."""

    model: str
    messages: tuple[Message, ...]
    text: bytes
    """The chat as it is rendered."""
    blocks: tuple[int, ...]
    """Numbers of its full blocks."""
    tail: int
    """Number of the last, partly filled block; 0: none."""
    keys: tuple[bytes, ...]
    key_tokens: tuple[int, ...]
    """Tokens up to the end of each key."""
    key_blocks: tuple[int, ...]
    """The block that completes each key."""
    joined: str
    """The messages' texts alone, a line each."""

    @property
    def num_tokens(self) -> int:
        """Of the whole prompt."""
        return -(-len(self.text) // TOKEN_BYTES)

    @property
    def first_user_text(self) -> str:
        """Of the first message of a user; empty: there is none."""
        return next((message.text for message in self.messages if message.role == "user"), "")


class PromptPress:
    """Makes prompts. Mutable: the numbers of the blocks it has seen."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, bytes], int] = {}
        self.key_of_block: dict[int, RouteKey] = {}
        """The route key that a block completes."""
        self._roots: dict[str, tuple[int, bytes]] = {}

    def make(self, model: str, messages: Sequence[Message]) -> Prompt:
        """A prompt from its messages, the answer's opening included."""
        text = render(messages)
        blocks, tail = self._number(model, text)
        root = self._root(model)[1]
        keys, ends = keys_of_text(text, root), boundaries(len(text))
        # On the last block wholly inside the boundary, as a worker does.
        key_blocks = tuple(blocks[max(0, end // BLOCK_BYTES - 1)] for end in ends)
        self.key_of_block.update((block, (model, key)) for block, key in zip(key_blocks, keys, strict=True))
        joined = "\n".join(message.text for message in messages)
        tokens = tuple(-(-end // TOKEN_BYTES) for end in ends)
        return Prompt(model, tuple(messages), text, blocks, tail, keys, tokens, key_blocks, joined)

    def blocks_with_answer(self, prompt: Prompt, answer: str) -> tuple[int, ...]:
        """Full blocks of a prompt and what was said to it: they are cached when the answer ends."""
        return self._number(prompt.model, prompt.text + answer.encode())[0]

    def _root(self, model: str) -> tuple[int, bytes]:
        if model not in self._roots:
            self._roots[model] = (-1 - len(self._roots), key_root(b"", model))
        return self._roots[model]

    def _number(self, model: str, text: bytes) -> tuple[tuple[int, ...], int]:
        numbers = self._numbers
        parent, chain = self._root(model)[0], []
        num_full = len(text) // BLOCK_BYTES
        for start in range(0, num_full * BLOCK_BYTES, BLOCK_BYTES):
            parent = numbers.setdefault((parent, text[start : start + BLOCK_BYTES]), len(numbers) + 1)
            chain.append(parent)
        rest = text[num_full * BLOCK_BYTES :]
        return tuple(chain), numbers.setdefault((parent, rest), len(numbers) + 1) if rest else 0


def render(messages: Sequence[Message]) -> bytes:
    """The text a worker gets: a simple chat template."""
    parts = [f"<|{message.role}|>\n{message.text}\n" for message in messages]
    return ("".join(parts) + "<|assistant|>\n").encode()


def words(rng: random.Random, num_tokens: int) -> str:
    """Text of so many tokens that nothing else begins like."""
    return rng.randbytes(num_tokens * TOKEN_BYTES // 2).hex()
