"""Which models a caller may know of. Asked by the route map for every name.

A hidden model is nowhere told apart from one that does not exist.
"""

from __future__ import annotations

from naru_proto.registry import ModelRecord
from naru_proto.tenants import matches
from naru_router.core.caller import Caller


def may_use(caller: Caller, entry: ModelRecord) -> bool:
    """Whether an entry is there for a caller: by the model's own list and by the tenant's."""
    if entry.allow and caller.tenant not in entry.allow:
        return False
    return matches(caller.models, entry.name) or any(matches(caller.models, alias) for alias in entry.aliases)
