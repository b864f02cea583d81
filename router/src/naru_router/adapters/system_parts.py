"""How much of a rendered chat is its system prompt: what no user has said, and all tenants may share where they should.

Found by rendering: two chats that have the system prompt in common and nothing else begin alike exactly so far. Used by
the job maker; remembers the last ones, as system prompts come again and again.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from naru_proto.errors import InvalidRequest
from naru_proto.registry import ModelInfoRecord
from naru_router.adapters.templates import TemplateRenderer
from naru_router.core.chat_request import ChatMessage
from naru_router.core.tenancy.cache_scope import common_prefix, probes, system_messages

MAX_REMEMBERED = 256
MAX_REMEMBERED_CHARS = 65_536
"""Of one text; a longer one is rendered each time."""


class SystemParts:
    """Finds them. Mutable memory of bounded size."""

    def __init__(self, renderer: TemplateRenderer) -> None:
        self._renderer = renderer
        self._known: OrderedDict[bytes, str] = OrderedDict()
        """Digest of template and system prompt to what chats with it begin with."""

    async def of(
        self,
        model: str,
        info: ModelInfoRecord,
        messages: Sequence[ChatMessage],
        text: str,
        values: Mapping[str, object] | None = None,
    ) -> str:
        """The beginning of `text`, the rendered chat, that is its system prompt; empty where there is none.

        `values`: what it was rendered with beside the messages.
        """
        system = system_messages(messages)
        if not system:
            return ""
        key = _digest(info, system, values)
        begin = self._known.get(key)
        if begin is None:
            begin = await self._find(model, info, system, values)
            if len(begin) <= MAX_REMEMBERED_CHARS:
                self._known[key] = begin
            if len(self._known) > MAX_REMEMBERED:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(key)
        # All of it or nothing: where a template puts the system prompt elsewhere in a longer chat, what both begin with
        # may be a user's word that is like the system prompt's first.
        return begin if text.startswith(begin) else ""

    async def _find(
        self,
        model: str,
        info: ModelInfoRecord,
        system: Sequence[ChatMessage],
        values: Mapping[str, object] | None,
    ) -> str:
        first, second = probes(system)
        try:
            if values:
                texts = [await self._renderer.render(model, info, chat, values) for chat in (first, second)]
            else:
                texts = [await self._renderer.render(model, info, chat) for chat in (first, second)]
        except InvalidRequest:
            return ""  # a template that refuses such chats shares nothing
        return common_prefix(*texts)


def _digest(info: ModelInfoRecord, system: Sequence[ChatMessage], values: Mapping[str, object] | None) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    more = json.dumps(values, sort_keys=True) if values else ""
    for part in (info.digest(), more, *(field for message in system for field in (message.role, message.content))):
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.digest()
