"""Which part of a model's queue is a tenant's own: how long its next request waits where workers serve by turns.

Told by the dispatcher of this router's requests that have had no output yet, asked before a request is admitted. Else
one tenant's flood would have all others refused, whose turns would come soon.

    share = (own + request) × sum of the weights ÷ (own weight × (all + request)), at most 1

of the time that the whole queue takes, by tokens. What other routers have sent is somebody else's, of weight 1: so a
tenant that floods several routers has a little more at each, never more than half a limit.

Pure but for its own counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

REQUEST_TOKENS = 32
"""What a request weighs beside its tokens: its answer takes time as well."""


@dataclass(slots=True)
class _Tenant:
    weight: float
    num_requests: int = 0
    num_tokens: int = 0


@dataclass(slots=True)
class Place:
    """One request's; given up once, however often it is left."""

    model: str
    tenant: str
    num_tokens: int
    is_left: bool = field(default=False)


class TenantQueues:
    """All models' queues of one router. Mutable."""

    def __init__(self) -> None:
        self._models: dict[str, dict[str, _Tenant]] = {}

    def __len__(self) -> int:
        """Models that somebody waits for."""
        return len(self._models)

    def enter(self, model: str, tenant: str, weight: float, num_tokens: int) -> Place:
        """A request waits from now on, with so many tokens of its prompt to compute; `weight` is above 0."""
        tenants = self._models.setdefault(model, {})
        found = tenants.setdefault(tenant, _Tenant(weight))
        found.weight = weight
        found.num_requests += 1
        found.num_tokens += num_tokens + REQUEST_TOKENS
        return Place(model, tenant, num_tokens + REQUEST_TOKENS)

    def leave(self, place: Place) -> None:
        """It has had its turn, or has ended; again: nothing."""
        if place.is_left:
            return
        place.is_left = True
        tenants = self._models[place.model]
        found = tenants[place.tenant]
        found.num_requests -= 1
        found.num_tokens -= place.num_tokens
        if not found.num_requests:
            del tenants[place.tenant]
        if not tenants:
            del self._models[place.model]

    def share(self, model: str, tenant: str, weight: float, num_tokens: int, all_tokens: int) -> float:
        """The part of the queue's time that a further request of a tenant waits, in (0, 1].

        Args:
            model: that it is for.
            tenant: empty: nobody in particular, who waits for all.
            weight: of the tenant, above 0.
            num_tokens: of the request.
            all_tokens: that wait on the workers, those of other routers among them.
        """
        if not tenant:
            return 1.0
        tenants = self._models.get(model, {})
        here_tokens = sum(each.num_tokens for each in tenants.values())
        weights = weight + sum(each.weight for name, each in tenants.items() if name != tenant)
        others_tokens = max(0, all_tokens - here_tokens)
        if others_tokens:
            weights += 1.0
        request_tokens = max(0, num_tokens) + REQUEST_TOKENS
        own_tokens = request_tokens + (tenants[tenant].num_tokens if tenant in tenants else 0)
        return min(1.0, own_tokens * weights / (weight * (here_tokens + others_tokens + request_tokens)))
