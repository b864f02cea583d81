"""What callers of a model share of its prefix caches. Asked by the job maker."""

from __future__ import annotations

from collections.abc import Sequence

from naru_proto.registry import ModelRecord
from naru_router.core.caller import Caller
from naru_router.core.chat_request import ChatMessage

SYSTEM_ROLES = ("system", "developer")
_PROBES = ("a", "b")
"""Beginnings of two messages that have no character in common."""


def cache_scope(caller: Caller, entry: ModelRecord) -> tuple[bytes, bool]:
    """(salt, whether it counts only after the system prompt). A word that is not known isolates."""
    if entry.cache_isolation == "shared":
        return b"", False
    return caller.salt, entry.cache_isolation == "after_system"


def system_messages(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """The messages a chat begins with that are the application's, not its user's."""
    leading = []
    for message in messages:
        if message.role not in SYSTEM_ROLES:
            break
        leading.append(message)
    return tuple(leading)


def probes(system: Sequence[ChatMessage]) -> tuple[tuple[ChatMessage, ...], tuple[ChatMessage, ...]]:
    """Two chats with this system prompt and users who say nothing alike: what both begin with no user has said."""
    first, second = (((*system, ChatMessage("user", content))) for content in _PROBES)
    return first, second


def common_prefix(first: str, second: str) -> str:
    """What two texts begin with alike."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first.startswith(second[:middle]):
            low = middle
        else:
            high = middle - 1
    return first[:low]
