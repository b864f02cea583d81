"""The tenants file: who may ask, with which keys, how much, and for which models. Checked here for all parts.

Routers admit requests by it, `naru tenants` writes it. It holds hashes of keys, never keys; no error quotes either.
Values come from `naru_proto.yaml_text`; reading and writing files is the callers'.
"""

from __future__ import annotations

import datetime
import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from naru_proto.errors import InvalidRequest

KEY_PREFIX = "nk-"
"""Of keys that `naru tenants` makes; others are taken as well."""
MAX_FILE_BYTES = 16 << 20
MAX_TENANTS = 10_000
MAX_KEYS = 100
MAX_PATTERNS = 256
PRIORITIES = (-100, 100)
MAX_WEIGHT = 1000.0
MAX_QUOTA = 10**12
_MAX_SHOWN = 10

_NAME = re.compile(r"[A-Za-z0-9]([-._A-Za-z0-9]{0,61}[A-Za-z0-9])?")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PATTERN = re.compile(r"[A-Za-z0-9*][-._/A-Za-z0-9*]{0,252}")
_PLAIN_KEY = (
    "it must be 64 hex digits, the SHA-256 of a key: a key itself has no place here; `naru tenants hash` gives it"
)


@dataclass(frozen=True, slots=True)
class TenantKey:
    """One API key of a tenant."""

    sha256: str
    """64 lower-case hex digits."""
    name: str = ""
    expires: str = ""
    """RFC 3339 with a zone; empty: never."""
    expires_s: float = math.inf
    """The same in Unix seconds."""


@dataclass(frozen=True, slots=True)
class Quotas:
    """What a tenant may use over all routers; 0: as much as it likes."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    """Of prompts and answers."""
    max_in_flight: int = 0


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant."""

    name: str
    keys: tuple[TenantKey, ...] = ()
    weight: float = 1.0
    """Its share beside other tenants where they compete; above 0."""
    top_priority: int = 0
    """The lowest number, which is the soonest turn, that it may ask for."""
    quotas: Quotas = Quotas()
    models: tuple[str, ...] = ()
    """Patterns of names, `*` for any characters; empty: all models."""


@dataclass(slots=True)
class _Reading:
    """Collects what is wrong."""

    problems: list[str] = field(default_factory=list)

    def refuse(self, path: str, message: str) -> None:
        self.problems.append(f"{path}: {message}")

    def mapping(self, value: object, path: str, allowed: Iterable[str]) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            self.refuse(path, f"it must be an object with {', '.join(allowed)}")
            return {}
        unknown = [name for name in value if name not in tuple(allowed)]
        if unknown:
            # A name is shown only where it cannot be a key that was put at the wrong place.
            shown = ", ".join(repr(name) if _is_field_like(name) else "…" for name in unknown[:3])
            self.refuse(path, f"unknown field {shown}; known are {', '.join(allowed)}")
        return value

    def items(self, value: object, path: str, limit: int) -> list[object]:
        if value is None:
            return []
        if not isinstance(value, list):
            self.refuse(path, "it must be a list")
            return []
        if len(value) > limit:
            self.refuse(path, f"it has {len(value)} items; at most {limit} are allowed")
        return value[:limit]

    def integer(self, value: object, path: str, low: int, high: int, default: int) -> int:
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.refuse(path, f"it must be a whole number in [{low}, {high}]")
            return default
        return value


def key_digest(key: str | bytes) -> str:
    """What stands in the file for a key. Keys of 256 random bits need no slow hash: nobody can try them all."""
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).hexdigest()


def is_tenant_name(name: object) -> bool:
    """Whether a tenant can be called so."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def read_tenants(documents: list[object]) -> tuple[Tenant, ...]:
    """The tenants of a file's documents, in its order.

    Raises:
        InvalidRequest: with every field that is at fault; no value of a key is quoted.
    """
    reading = _Reading()
    tenants: tuple[Tenant, ...] = ()
    if len(documents) != 1:
        reading.refuse("the file", f"it has {len(documents)} documents; write one, which begins with 'tenants:'")
    else:
        top = reading.mapping(documents[0], "the file", ("tenants",))
        if isinstance(documents[0], Mapping) and "tenants" not in top:
            reading.refuse("tenants", "it is missing; write 'tenants: []' to let nobody in")
        values = reading.items(top.get("tenants"), "tenants", MAX_TENANTS)
        tenants = tuple(_tenant(reading, value, f"tenants[{i}]") for i, value in enumerate(values))
        _refuse_twins(reading, tenants)
    if reading.problems:
        more = len(reading.problems) - _MAX_SHOWN
        shown = "; ".join(reading.problems[:_MAX_SHOWN]) + (f"; and {more} more" if more > 0 else "")
        raise InvalidRequest(shown, param="tenants")
    return tenants


def to_wire(tenants: Iterable[Tenant]) -> dict[str, Any]:
    """The file's content as plain values, defaults left out; `read_tenants` reads it back as equal tenants."""
    return {"tenants": [_tenant_to_wire(tenant) for tenant in tenants]}


def _tenant(reading: _Reading, value: object, path: str) -> Tenant:
    data = reading.mapping(value, path, ("name", "keys", "weight", "topPriority", "quotas", "models"))
    name = data.get("name")
    if not is_tenant_name(name):
        reading.refuse(
            f"{path}.name", "it must be 1 to 63 letters, digits, '-', '_' or '.', the first and the last no sign"
        )
        name = ""
    weight = data.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0.001 <= weight <= MAX_WEIGHT:
        reading.refuse(f"{path}.weight", f"it must be a number in [0.001, {MAX_WEIGHT:g}]")
        weight = 1.0
    keys = reading.items(data.get("keys"), f"{path}.keys", MAX_KEYS)
    return Tenant(
        name=str(name),
        keys=tuple(_key(reading, key, f"{path}.keys[{i}]") for i, key in enumerate(keys)),
        weight=float(weight),
        top_priority=reading.integer(data.get("topPriority"), f"{path}.topPriority", *PRIORITIES, 0),
        quotas=_quotas(reading, data.get("quotas"), f"{path}.quotas"),
        models=_patterns(reading, data.get("models"), f"{path}.models"),
    )


def _key(reading: _Reading, value: object, path: str) -> TenantKey:
    if isinstance(value, str):
        value, path = {"sha256": value}, path.removesuffix(".sha256")
    data = reading.mapping(value, path, ("sha256", "name", "expires"))
    digest, name, expires = data.get("sha256"), data.get("name", ""), data.get("expires")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest.lower()):
        reading.refuse(path, _PLAIN_KEY)
        digest = ""
    if not isinstance(name, str) or (name and not is_tenant_name(name)):
        reading.refuse(f"{path}.name", "it must be at most 63 letters, digits, '-', '_' or '.'")
        name = ""
    expires_s, text = math.inf, ""
    if expires is not None:
        moment = _moment(expires)
        if moment is None:
            reading.refuse(f"{path}.expires", 'it must be a time with its zone, such as "2030-01-31T12:00:00Z"')
        else:
            expires_s, text = moment.timestamp(), moment.isoformat(timespec="seconds").replace("+00:00", "Z")
    return TenantKey(digest.lower(), name, text, expires_s)


def _moment(value: object) -> datetime.datetime | None:
    """A moment in UTC; YAML has made one of a text that is not quoted."""
    if isinstance(value, str):
        try:
            value = datetime.datetime.fromisoformat(value)
        except ValueError:
            return None
    if not isinstance(value, datetime.datetime) or value.tzinfo is None:
        return None
    try:
        return value.astimezone(datetime.UTC)
    except OverflowError:
        return None


def _quotas(reading: _Reading, value: object, path: str) -> Quotas:
    if value is None:
        return Quotas()
    names = ("requestsPerMinute", "tokensPerMinute", "maxInFlight")
    data = reading.mapping(value, path, names)
    return Quotas(*(reading.integer(data.get(name), f"{path}.{name}", 1, MAX_QUOTA, 0) for name in names))


def _patterns(reading: _Reading, value: object, path: str) -> tuple[str, ...]:
    if value == []:
        reading.refuse(path, "it is empty, which would hide all models; leave it out to allow all, or name some")
    patterns = reading.items(value, path, MAX_PATTERNS)
    for index, pattern in enumerate(patterns):
        if not isinstance(pattern, str) or not _PATTERN.fullmatch(pattern):
            reading.refuse(f"{path}[{index}]", "it must be a model's name, where '*' stands for any characters")
    return tuple(pattern for pattern in patterns if isinstance(pattern, str))


def _refuse_twins(reading: _Reading, tenants: tuple[Tenant, ...]) -> None:
    names: set[str] = set()
    holders: dict[str, str] = {}
    for index, tenant in enumerate(tenants):
        if tenant.name in names and tenant.name:
            reading.refuse(f"tenants[{index}].name", f"{tenant.name!r} stands twice; merge the two")
        names.add(tenant.name)
        for key_index, key in enumerate(tenant.keys):
            if key.sha256 and key.sha256 in holders:
                path = f"tenants[{index}].keys[{key_index}]"
                reading.refuse(path, f"the same key stands at {holders[key.sha256]}: a key has one owner")
            holders[key.sha256] = f"tenants[{index}].keys[{key_index}]"


def _tenant_to_wire(tenant: Tenant) -> dict[str, Any]:
    data: dict[str, Any] = {"name": tenant.name}
    if tenant.keys:
        data["keys"] = [
            {"sha256": key.sha256}
            | ({"name": key.name} if key.name else {})
            | ({"expires": key.expires} if key.expires else {})
            for key in tenant.keys
        ]
    if tenant.weight != 1.0:
        data["weight"] = int(tenant.weight) if tenant.weight.is_integer() else tenant.weight
    if tenant.top_priority:
        data["topPriority"] = tenant.top_priority
    quotas = {
        "requestsPerMinute": tenant.quotas.requests_per_minute,
        "tokensPerMinute": tenant.quotas.tokens_per_minute,
        "maxInFlight": tenant.quotas.max_in_flight,
    }
    if any(quotas.values()):
        data["quotas"] = {name: value for name, value in quotas.items() if value}
    if tenant.models:
        data["models"] = list(tenant.models)
    return data


def matches(patterns: tuple[str, ...], name: str) -> bool:
    """Whether a tenant with these patterns may use a model of that name; no patterns: any."""
    return not patterns or any(_fits(pattern, name) for pattern in patterns)


def _fits(pattern: str, name: str) -> bool:
    """Whether a name is what the pattern says; in time linear in the name for each '*'."""
    first, *rest = pattern.split("*")
    if not rest:
        return name == pattern
    if not name.startswith(first):
        return False
    at = len(first)
    for part in rest[:-1]:
        at = name.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return len(name) - at >= len(rest[-1]) and name.endswith(rest[-1])


def _is_field_like(name: object) -> bool:
    return isinstance(name, str) and name.isalpha() and len(name) <= 24
