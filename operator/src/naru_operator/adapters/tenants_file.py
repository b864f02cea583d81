"""Reads and writes the tenants file for `naru tenants`. Routers read it by themselves.

A write replaces the whole file at once, so that a router never sees half of one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import yaml

from naru_proto.errors import InvalidRequest, Unavailable
from naru_proto.tenants import MAX_FILE_BYTES, Tenant, read_tenants, to_wire
from naru_proto.yaml_text import BadYaml, load_yaml

_NEW_MODE = 0o600
_HEAD = "# Tenants of Naru's routers. Holds hashes of API keys, no keys. `naru tenants --help` says what changes it.\n"


def read_tenants_file(path: Path) -> tuple[Tenant, ...]:
    """The tenants of a file.

    Raises:
        InvalidRequest: it is not there, or not such a file; names each field at fault and quotes no key.
    """
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise InvalidRequest(f"{str(path)!r} is larger than {MAX_FILE_BYTES} bytes: it is no tenants file")
        return read_tenants(load_yaml(data))
    except OSError as exc:
        raise InvalidRequest(f"{str(path)!r} cannot be read: {exc.strerror}") from exc
    except BadYaml as exc:
        raise InvalidRequest(f"{str(path)!r} {exc}") from exc
    except InvalidRequest as exc:
        raise InvalidRequest(f"{str(path)!r} is no tenants file: {exc.message}") from exc


def change_tenants_file(path: Path, change: Callable[[tuple[Tenant, ...]], tuple[Tenant, ...]]) -> None:
    """Replaces a file by what `change` makes of it; one that is not there has no tenants. One change at a time.

    Raises:
        InvalidRequest: as `read_tenants_file`, or as `change` does; nothing was written.
        Unavailable: it cannot be written.
    """
    target = Path(os.path.realpath(path))  # a link stays one
    with _locked(target.parent):
        tenants = change(read_tenants_file(target) if target.exists() else ())
        content = to_wire(tenants)
        read_tenants([content])
        if target.suffix == ".json":
            text = json.dumps(content, indent=2) + "\n"
        else:
            text = _HEAD + yaml.safe_dump(content, sort_keys=False, width=120)
        _replace(target, text)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as exc:
        raise InvalidRequest(f"the folder {str(folder)!r} cannot be opened: {exc.strerror}") from exc
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _replace(target: Path, text: str) -> None:
    staged = ""
    try:
        fd, staged = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with os.fdopen(fd, "w", encoding="utf-8") as out:
            out.write(text)
            if target.exists():
                before = target.stat()
                os.fchmod(out.fileno(), before.st_mode & 0o777)
                with contextlib.suppress(PermissionError):
                    os.fchown(out.fileno(), before.st_uid, before.st_gid)
            else:
                os.fchmod(out.fileno(), _NEW_MODE)
            out.flush()
            os.fsync(out.fileno())
        os.replace(staged, target)
    except OSError as exc:
        if staged:
            with contextlib.suppress(OSError):
                os.unlink(staged)
        raise Unavailable(f"{str(target)!r} cannot be written: {exc.strerror}") from exc
