"""Route keys: names of a prompt's beginnings, by which routers know which worker has one computed already.

Routers make them of the rendered prompt and send them along; workers treat them as opaque names, tie each to a block of
their prefix cache, and tell routers which they hold. A key stands for all bytes up to its boundary, so equal keys mean
equal beginnings for the same model, adapter and tenant salt. Boundaries lie at fixed offsets that grow: an error of one
chunk stays a small share of the prompt, and no prompt has more than 256 keys. A part chunk at the end has no key.

Not covered: who may share what is the worker's to hold, in the hashes of its blocks. A key only points.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_right
from collections.abc import Iterable, Sequence

from naru_proto.errors import InvalidRequest

KEY_BYTES = 16
CHUNKS = ((64, 64), (64, 256), (64, 1024), (64, 4096))
"""(number of chunks, bytes of each), in order. A token id counts four bytes."""
MAX_KEYS = sum(count for count, _ in CHUNKS)
ID_BYTES = 4


def _ends() -> tuple[int, ...]:
    ends, end = [], 0
    for count, size in CHUNKS:
        for _ in range(count):
            end += size
            ends.append(end)
    return tuple(ends)


BOUNDARIES = _ends()
"""Byte offset at which each chunk ends: 64, 128, … 348160."""


def boundaries(num_bytes: int) -> tuple[int, ...]:
    """Ends of the whole chunks of a prompt of so many bytes: as many as it has keys."""
    return BOUNDARIES[: bisect_right(BOUNDARIES, num_bytes)]


def key_root(salt: bytes, model: str, adapter: str = "") -> bytes:
    """What a tenant's chain of keys begins with; `model` is the registry's name, so that each revision has its own."""
    return _root(salt, model, adapter, b"naru.route.root")


def shared_key_root(model: str, adapter: str = "") -> bytes:
    """What the chain of a part that all tenants share begins with; no tenant's own chain begins so."""
    return _root(b"", model, adapter, b"naru.route.all")


def keys_of_text(
    text: bytes, root: bytes, *, shared_root: bytes = b"", shared_prefix_bytes: int = 0
) -> tuple[bytes, ...]:
    """Keys of a prompt's whole chunks, in order.

    Args:
        text: the rendered prompt in UTF-8.
        root: of `key_root`.
        shared_root: of `shared_key_root`; needed where something is shared.
        shared_prefix_bytes: chunks wholly inside so many first bytes are keyed alike for all tenants; `root` goes into
            the first chunk that reaches beyond, and so into all that follow.
    """
    ends = boundaries(len(text))
    num_shared = bisect_right(ends, shared_prefix_bytes) if shared_prefix_bytes > 0 else 0
    if not num_shared:
        return tuple(_chain(text, 0, ends, root))
    assert shared_root, "a shared part needs its root"
    keys = _chain(text, 0, ends[:num_shared], shared_root)
    if num_shared < len(ends):
        mixed = hashlib.blake2b(keys[-1], key=root, digest_size=KEY_BYTES, person=b"naru.route.mix").digest()
        keys += _chain(text, ends[num_shared - 1], ends[num_shared:], mixed)
    return tuple(keys)


def keys_of_ids(token_ids: Sequence[int], root: bytes) -> tuple[bytes, ...]:
    """Keys of a prompt of token ids in [0, 2**32), four bytes each; such a prompt shares no part with other tenants."""
    return keys_of_text(struct.pack(f"<{len(token_ids)}I", *token_ids), root)


def pack_keys(keys: Iterable[bytes]) -> bytes:
    """Keys as they travel: one after the other."""
    return b"".join(keys)


def unpack_keys(packed: bytes, *, max_keys: int | None = MAX_KEYS, param: str = "route_keys") -> tuple[bytes, ...]:
    """Reads packed keys; `max_keys` None sets no limit.

    Raises:
        InvalidRequest: no whole number of keys, or too many; names `param`.
    """
    num_bytes = len(packed)
    if num_bytes % KEY_BYTES:
        raise InvalidRequest(
            f"{param} has {num_bytes} bytes, which is no multiple of {KEY_BYTES}; send whole keys or none", param=param
        )
    if max_keys is not None and num_bytes > max_keys * KEY_BYTES:
        raise InvalidRequest(
            f"{param} has {num_bytes // KEY_BYTES} keys; a prompt has {max_keys} at most, send the first ones",
            param=param,
        )
    return tuple([packed[start : start + KEY_BYTES] for start in range(0, num_bytes, KEY_BYTES)])


def _root(salt: bytes, model: str, adapter: str, person: bytes) -> bytes:
    """Fields are length-prefixed, so no two tuples are spelled alike; the salt is the key, so roots do not tell it."""
    key = hashlib.blake2b(salt, digest_size=32, person=b"naru.route.salt").digest()
    digest = hashlib.blake2b(key=key, digest_size=KEY_BYTES, person=person)
    for field in (model.encode(), adapter.encode()):
        digest.update(struct.pack("<Q", len(field)))
        digest.update(field)
    return digest.digest()


def _chain(text: bytes, start: int, ends: Sequence[int], parent: bytes) -> list[bytes]:
    """Each chunk keyed by the key before it."""
    blake2b, keys = hashlib.blake2b, []
    for end in ends:
        parent = blake2b(text[start:end], key=parent, digest_size=KEY_BYTES).digest()
        keys.append(parent)
        start = end
    return keys
