"""Credentials of model sources: a folder for each Secret, a file for each key. Called by the fetcher at every fetch.

They are read anew each time, so that a rotated Secret works without a restart. Nothing of them goes into messages: what
was read is blotted out of errors, whatever library wrote them.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from naru_proto.errors import LoadError

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_MAX_NAME_CHARS = 253
_MAX_FILE_BYTES = 1 << 20
"""What a Secret may hold."""
_MAX_FILES = 256

DOCKER_CONFIG_KEY = ".dockerconfigjson"
SERVICE_ACCOUNT_KEYS = (
    "GOOGLE_APPLICATION_CREDENTIALS_JSON",
    "gcloud-application-credentials.json",
    "service-account.json",
    "key.json",
    "credentials.json",
)
"""Names under which people keep a service account's key; the first one that is there counts."""

KEYS: dict[str, tuple[str, ...]] = {
    "s3": ("AWS_ACCESS_KEY_ID",),
    "gs": SERVICE_ACCOUNT_KEYS,
    "hf": ("HF_TOKEN", "HF_ENDPOINT"),
    "oci": (DOCKER_CONFIG_KEY, "username"),
    "pypi": ("PIP_INDEX_URL",),
}
"""Scheme to keys of which one must be there."""

_AMBIENT = re.compile(r"AWS_|GOOGLE_|HF_TOKEN|HUGGING_FACE_HUB_TOKEN|DOCKER_CONFIG|(PIP|UV)_.*INDEX|NETRC")
"""Variables of the process that do not mix with named credentials."""
_PLACES = ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_CA_BUNDLE",
           "GOOGLE_BASE_URL")  # fmt: skip
"""Where a store is, which is no secret: credentials need not repeat it."""
_PUBLIC_KEYS = (*_PLACES, "HF_ENDPOINT", "username")
_MIN_SECRET_CHARS = 4


@dataclass(frozen=True, slots=True)
class Credentials:
    """What one fetch may use; without a name it is what the process's environment offers."""

    name: str = ""
    values: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Key to content."""
    folder: Path | None = None

    def environ(self, ambient: Mapping[str, str]) -> dict[str, str]:
        """The variables for a fetch: the process's own, without its secrets where others were named."""
        if not self.name:
            return dict(ambient)
        kept = {key: value for key, value in ambient.items() if key in _PLACES or not _AMBIENT.match(key)}
        return {**kept, **self.values}

    def require(self, scheme: str) -> None:
        """Refuses named credentials that hold nothing for a scheme.

        Raises:
            LoadError: they do not; names the keys that would do.
        """
        wanted = KEYS.get(scheme, ())
        if self.name and wanted and not any(key in self.values for key in wanted):
            raise LoadError(
                f"credentials {self.name!r} have no key for {scheme}://; one of {', '.join(wanted)} must be in the "
                f"Secret, which has {', '.join(sorted(self.values)) or 'none'}",
                param="model.credentialsSecret",
            )

    def first_of(self, keys: tuple[str, ...]) -> tuple[str, str]:
        """Key and content of the first key that is there; two empty texts without any."""
        return next(((key, self.values[key]) for key in keys if key in self.values), ("", ""))

    def hint(self, scheme: str) -> str:
        """What to do when access was refused."""
        if self.name:
            return f"credentials {self.name!r} were used: check the Secret's keys, and what they may read"
        wanted = " or ".join(KEYS.get(scheme, ())) or "a token"
        return (
            f"no credentials were named: in a cluster set model.credentialsSecret to a Secret with {wanted} (one of "
            "the WorkerPool's credentialSecrets), elsewhere set them in the environment"
        )

    def scrubbed(self, text: str) -> str:
        """The text without any secret of these."""
        for secret in sorted(set(self._secrets()), key=len, reverse=True):
            if len(secret) >= _MIN_SECRET_CHARS:
                text = text.replace(secret, "***")
        return text

    def _secrets(self) -> Iterator[str]:
        for key, value in self.values.items():
            if key in _PUBLIC_KEYS:
                continue
            yield value
            yield urllib.parse.quote(value, safe="")
            if "://" in value:
                yield urllib.parse.urlsplit(value).password or ""
            yield from _inner_secrets(value)


def _inner_secrets(text: str) -> Iterator[str]:
    """Texts inside of JSON, such as a registry's password or a private key."""
    if not text.lstrip().startswith("{"):
        return
    try:
        todo: list[object] = [json.loads(text)]
    except (ValueError, RecursionError):
        return
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            todo += [inner for key, inner in value.items() if key not in ("type", "username", "email", "token_uri")]
        elif isinstance(value, list):
            todo += value
        elif isinstance(value, str):
            yield value
            if pair := decode_basic(value):
                yield pair[1]


def decode_basic(text: str) -> tuple[str, str] | None:
    """User and password of a registry's base64 ``auth`` text; None: it is none."""
    try:
        user, colon, password = base64.b64decode(text, validate=True).decode("utf-8").partition(":")
    except (binascii.Error, ValueError):
        return None
    return (user, password) if colon else None


def read_credentials(name: str, folder: Path) -> Credentials:
    """The credentials of that name below ``folder``; an empty name gives those of the environment.

    Raises:
        LoadError: no name of a Secret, not mounted, or not readable. No content is ever shown.
    """
    if not name:
        return Credentials()
    if len(name) > _MAX_NAME_CHARS or not _NAME.fullmatch(name):
        raise _bad(name[:80], "it is no name of a Secret", "write the name of one of the pool's credentialSecrets")
    place = folder / name
    try:
        files = sorted(path for path in place.iterdir() if not path.name.startswith("..") and path.is_file())
        if len(files) > _MAX_FILES:
            raise _bad(name, f"it has {len(files)} keys", "keep what one source needs")
        values = {path.name: _read(name, path) for path in files}
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise _bad(
            name,
            f"this worker has no such Secret below {str(folder)!r}",
            "make the Secret in the pool's namespace and list it in WorkerPool.spec.credentialSecrets",
        ) from exc
    except OSError as exc:
        raise _bad(name, f"cannot be read ({exc.strerror})", "check the Secret's file modes") from exc
    return Credentials(name, values, place)


def _read(name: str, path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(_MAX_FILE_BYTES + 1)
    try:
        if len(content) > _MAX_FILE_BYTES:
            raise ValueError
        return content.decode("utf-8").strip()
    except ValueError:
        raise _bad(name, f"key {path.name!r} is no text of at most {_MAX_FILE_BYTES} bytes", "write it anew") from None


def _bad(name: str, why: str, remedy: str) -> LoadError:
    return LoadError(f"credentials {name!r}: {why}; {remedy}", param="model.credentialsSecret")
