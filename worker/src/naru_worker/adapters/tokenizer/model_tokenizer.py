"""A model's tokenizer: text to ids, ids to text, ids to exact bytes.

Built from a model folder or GGUF metadata; used by the server (prompts) and the detokenizer. Thread-safe: calls only
read. Does not render chat templates.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from tokenizers import Tokenizer

from naru_proto.errors import InvalidRequest
from naru_worker.adapters.tokenizer.token_bytes import token_decoder, token_text_decoder
from naru_worker.adapters.tokenizer.typed_tokens import (
    PLAIN,
    PLAIN_PAIR,
    InputForm,
    TypedTokens,
    join,
    pair_form,
)


class ModelTokenizer:
    """Wraps a `tokenizers.Tokenizer` so that special tokens are added by one rule, and never twice."""

    def __init__(
        self,
        backend: Tokenizer,
        where: str,
        vocab_size: int,
        *,
        prefix: Sequence[int] = (),
        suffix: Sequence[int] = (),
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        max_token_id: int | None = None,
        generates: bool = True,
    ) -> None:
        """`prefix` and `suffix` are what `add_special_tokens` adds; `where` names the file in errors.

        `vocab_size` is one above the highest id. Ids above `max_token_id` (the last embedding row) are refused.
        `generates` False: no text grows token by token, so that any decoder will do.

        Raises:
            LoadError: the decoder's output cannot be told token by token.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._prefix, self._suffix = list(prefix), list(suffix)
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self._max_token_id = max_token_id
        decoder = backend.decoder
        self._decoder = (
            token_decoder(None if decoder is None else decoder.__getstate__().decode(), where)
            if generates
            else token_text_decoder()
        )
        added = backend.get_added_tokens_decoder()
        self._special = {token_id: token.content for token_id, token in added.items() if token.special}
        self.vocab_size = vocab_size

    @property
    def backend(self) -> Tokenizer:
        """The library's tokenizer, to be written down; nobody changes it."""
        return self._backend

    @property
    def prefix(self) -> list[int]:
        """What goes before plain text."""
        return list(self._prefix)

    @property
    def suffix(self) -> list[int]:
        """What goes behind plain text."""
        return list(self._suffix)

    @property
    def max_token_id(self) -> int | None:
        """The last id that prompts may hold; None: any."""
        return self._max_token_id

    @property
    def bos_token(self) -> str:
        """Text of the token that begins a sequence; empty when there is none."""
        return self._text(self.bos_token_id)

    @property
    def eos_token(self) -> str:
        """Text of the token that ends a sequence; empty when there is none."""
        return self._text(self.eos_token_id)

    @property
    def strips_leading_space(self) -> bool:
        """Whether `decode` drops the first space of a text, which `piece` keeps."""
        return self._decoder.strips_leading_space

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids; special tokens spelt in the text are recognised.

        With `add_special_tokens`, what the model wants around plain text is added, but no BOS before a text that
        already begins with it. Chat prompts say False: their template has written everything.

        Raises:
            InvalidRequest: the text has lone surrogates, or a token the model has no embedding for.
        """
        ids = self._plain_ids(text)
        if not add_special_tokens:
            return ids
        prefix = self._prefix
        if prefix and ids[: len(prefix)] == prefix:
            prefix = []
        return prefix + ids + self._suffix

    def encode_input(
        self, text: str, pair: str | None = None, *, add_special_tokens: bool, max_tokens: int | None = None
    ) -> TypedTokens:
        """An encoder's input, of one text or of two; cut to `max_tokens` where that is given, the longer text first.

        Raises:
            InvalidRequest: see `encode`; or `max_tokens` leaves no room for text.
        """
        first = self._plain_ids(text)
        if pair is not None:
            form = self._pair_form if add_special_tokens else PLAIN_PAIR
            return join(first, self._plain_ids(pair), form, max_tokens)
        form = PLAIN
        if add_special_tokens:
            prefix = () if self._prefix and first[: len(self._prefix)] == self._prefix else tuple(self._prefix)
            form = InputForm(prefix, (), tuple(self._suffix), PLAIN.types)
        return join(first, None, form, max_tokens)

    @cached_property
    def _pair_form(self) -> InputForm:
        return pair_form(self._backend)

    def _plain_ids(self, text: str) -> list[int]:
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        except TypeError as e:
            # The library's way of saying that a string cannot be UTF-8.
            raise InvalidRequest("the prompt has a lone surrogate; send valid Unicode", param="prompt") from e
        except Exception as e:  # The library raises no narrower class: a vocabulary that lacks a character, say.
            raise InvalidRequest(f"the prompt cannot be tokenized ({e})", param="prompt") from e
        if self._max_token_id is not None and ids and max(ids) > self._max_token_id:
            raise InvalidRequest(
                f"the prompt holds token {max(ids)}, but the model has embeddings up to {self._max_token_id} only",
                param="prompt",
            )
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of a whole run of tokens; unknown ids give nothing."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def piece(self, token_id: int) -> bytes | None:
        """The bytes the token adds to an output; None for special tokens and ids without a token: no text."""
        if token_id in self._special:
            return None
        return self._plain_bytes(token_id)

    def special_text(self, token_id: int) -> str | None:
        """How a special token is written; None for all other ids."""
        return self._special.get(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The token's own bytes for listings, special tokens spelt out; empty for ids without a token."""
        text = self._special.get(token_id)
        return text.encode() if text is not None else self._plain_bytes(token_id) or b""

    def token_id(self, text: str) -> int | None:
        """The id of one token by its exact text."""
        token_id: int | None = self._backend.token_to_id(text)
        return token_id

    def _plain_bytes(self, token_id: int) -> bytes | None:
        token = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        return None if token is None else self._decoder.decode(token)

    def _text(self, token_id: int | None) -> str:
        return "" if token_id is None else self._backend.id_to_token(token_id) or ""
