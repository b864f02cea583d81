"""Names and labels of what belongs to a pool's slots. Called by the manifests, the plan and the status.

A name that is kept as it is never meets one that was cut, but for a pool called like another's cut name; the plan tells
such a clash by the owner.
"""

from __future__ import annotations

import hashlib
import re

from naru_proto import names

MAX_LABEL_LENGTH = 63
"""Of a label's value, and of a name that becomes a host name."""
_MAX_BASE_LENGTH = 48
"""Leaves room for "-", a slot of up to 8 digits, and "-cache"."""
_DIGEST_LENGTH = 10
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


def pool_label(pool: str) -> str:
    """The value of LABEL_POOL: the pool's name, cut with a digest of the whole where it is too long for a label."""
    return pool if len(pool) <= MAX_LABEL_LENGTH else _cut(pool, MAX_LABEL_LENGTH)


def pool_selector(pool: str) -> str:
    """Selects the pool's pods, in the form of `kubectl get --selector`."""
    return f"{names.LABEL_POOL}={pool_label(pool)}"


def member_name(pool: str, slot: int) -> str:
    """The pod of a slot, and its worker's id: a DNS label, as the name is the pod's host name too."""
    return f"{_base(pool)}-{slot}"


def claim_name(pool: str, slot: int, storage_class: str) -> str:
    """The cache volume of a slot.

    Another class makes another claim: the class of one that exists can never be changed.
    """
    return f"{_base(pool)}-{slot}-cache-{_digest(storage_class)[:5]}"


def budget_name(pool: str) -> str:
    """The pool's disruption budget."""
    return f"{_base(pool)}-workers"


def _base(pool: str) -> str:
    is_kept = len(pool) <= _MAX_BASE_LENGTH and _DNS_LABEL.fullmatch(pool)
    return pool if is_kept else _cut(pool.replace(".", "-"), _MAX_BASE_LENGTH, _digest(pool))


def _cut(text: str, max_length: int, digest: str = "") -> str:
    """Begins with a letter or digit as `text` does, and ends with the digest."""
    digest = (digest or _digest(text))[:_DIGEST_LENGTH]
    return f"{text[: max_length - _DIGEST_LENGTH - 1].rstrip('-._')}-{digest}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
