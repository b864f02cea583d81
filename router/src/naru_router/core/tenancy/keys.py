"""From a request's headers to its tenant: which key it shows, and whose that is. Pure; the clock is the caller's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from naru_proto.errors import Unauthenticated
from naru_proto.tenants import PRIORITIES, Quotas, Tenant, key_digest
from naru_router.core.caller import Caller

KEY_HEADERS = ("authorization", "x-api-key", "api-key")
_BYTES_HEADERS = frozenset(name.encode() for name in KEY_HEADERS)
MAX_KEY_BYTES = 1024
_MESSAGE = (
    "the request shows no API key that is known here; "
    "send yours in the header 'Authorization: Bearer <key>' or 'x-api-key: <key>'"
)
_SALT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Holder:
    """Who has a key."""

    caller: Caller
    quotas: Quotas
    expires_s: float
    """Unix seconds; inf: never."""


class KeyRing:
    """All keys of one reading of the tenants file. Never changed after it is built."""

    def __init__(self, tenants: Iterable[Tenant], seed: bytes) -> None:
        """`seed`: the installation's secret; salts are made of it."""
        self._holders: dict[str, Holder] = {}
        self._quotas: dict[str, Quotas] = {}
        self._callers: dict[str, Caller] = {}
        for tenant in tenants:
            caller = _caller(tenant, seed)
            self._quotas[tenant.name] = tenant.quotas
            self._callers[tenant.name] = caller
            for key in tenant.keys:
                self._holders[key.sha256] = Holder(caller, tenant.quotas, key.expires_s)

    def holder(self, key: bytes, unix_s: float) -> Holder:
        """Who has the key. It is looked up by its hash, so that no time depends on how much of it is right.

        Raises:
            Unauthenticated: nobody, or not any more; in the same words as where there is none.
        """
        found = self._holders.get(key_digest(key[:MAX_KEY_BYTES]))
        if found is None or unix_s >= found.expires_s or len(key) > MAX_KEY_BYTES:
            raise Unauthenticated(_MESSAGE)
        return found

    def caller(self, tenant: str) -> Caller:
        """A tenant by its name, for what goes on in its name after its key was shown.

        Raises:
            Unauthenticated: it is gone.
        """
        found = self._callers.get(tenant)
        if found is None:
            raise Unauthenticated(f"the tenant {tenant!r} is not known here any more")
        return found

    def quotas(self, tenant: str) -> Quotas:
        """Of a tenant, as they are now; none for one that is gone."""
        return self._quotas.get(tenant, Quotas())


def read_key(headers: Iterable[tuple[bytes | str, bytes | str]]) -> bytes:
    """The key that a request shows; empty: none. A bearer token goes before the other two headers.

    Other headers say nothing about who asks, whatever they are called.
    """
    other = b""
    for raw_name, raw_value in headers:
        name = raw_name if isinstance(raw_name, bytes) else raw_name.encode("utf-8", "replace")
        if name not in _BYTES_HEADERS:
            continue
        value = raw_value if isinstance(raw_value, bytes) else raw_value.encode("utf-8", "replace")
        if name == b"authorization":
            scheme, _, token = value.strip().partition(b" ")
            if scheme.lower() == b"bearer" and token.strip():
                return token.strip()
        else:
            other = other or value.strip()
    return other


def _caller(tenant: Tenant, seed: bytes) -> Caller:
    salt = hashlib.blake2b(tenant.name.encode(), key=seed[:64], digest_size=_SALT_BYTES, person=b"naru-tenant").digest()
    low, high = PRIORITIES
    return Caller(tenant.name, tenant.weight, salt, max(low, min(high, tenant.top_priority)), tenant.models)
