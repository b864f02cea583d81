"""Where a model's files come from: the URI grammar all parts share.

Called by the custom resources (validation), the `naru` command and the workers (fetching). Fetches nothing itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from naru_proto.errors import InvalidRequest

_SEGMENT = r"[^/\x00-\x20\x7f]+"
_BUCKET = r"[A-Za-z0-9][-._A-Za-z0-9]*"
_REST = r"(/[^\x00-\x1f\x7f]*)?"

_FORMS: dict[str, tuple[str, str]] = {
    "file": (r"/[^\x00-\x1f\x7f]+", "file:///absolute/path"),
    "gs": (rf"{_BUCKET}{_REST}", "gs://bucket/path"),
    "hf": (rf"{_SEGMENT}/{_SEGMENT}{_REST}", "hf://owner/name or hf://owner/name/file.gguf"),
    "oci": (rf"{_SEGMENT}/{_SEGMENT}{_REST}", "oci://registry/repository:tag"),
    "pvc": (rf"[a-z0-9][-.a-z0-9]*{_REST}", "pvc://claim/path"),
    "pypi": (rf"[A-Za-z0-9][-._A-Za-z0-9]*((==|@)[^/\x00-\x20\x7f]+)?{_REST}", "pypi://package or pypi://package==1.2"),
    "s3": (rf"{_BUCKET}{_REST}", "s3://bucket/path"),
}

SCHEMES = tuple(sorted(_FORMS))
"""Schemes a model URI may have."""

MAX_URI_LENGTH = 2048

URI_PATTERN = "^(" + "|".join(f"{scheme}://{form}" for scheme, (form, _) in sorted(_FORMS.items())) + ")$"
"""All forms as one RE2 expression, for the API server."""


@dataclass(frozen=True, slots=True)
class ModelUri:
    """A parsed model URI; `str()` gives back the text."""

    scheme: str
    location: str
    """All after ``://``."""

    def __str__(self) -> str:
        """The URI's text."""
        return f"{self.scheme}://{self.location}"


def parse_model_uri(text: str) -> ModelUri:
    """Checks a model URI against its scheme's form.

    Raises:
        InvalidRequest: no scheme, an unknown one, a wrong form, or a path that climbs with ``..``.
    """
    scheme, separator, location = text.partition("://")
    shown = repr(re.sub(r"//[^/@]*:[^/@]*@", "//***@", text)[:200])  # people put passwords before the @
    if not separator or scheme not in _FORMS:
        raise InvalidRequest(
            f"{shown} does not start with a known scheme: write one of " + ", ".join(f"{name}://" for name in SCHEMES),
            param="uri",
        )
    form, example = _FORMS[scheme]
    if len(text) > MAX_URI_LENGTH or not re.fullmatch(form, location):
        raise InvalidRequest(
            f"{shown} is not a valid {scheme} URI: write it like {example}, "
            f"at most {MAX_URI_LENGTH} characters, no control characters",
            param="uri",
        )
    if ".." in location.split("/"):
        raise InvalidRequest(f"{shown} climbs with '..': write the path out", param="uri")
    return ModelUri(scheme, location)
