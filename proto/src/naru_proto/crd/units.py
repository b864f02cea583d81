"""Quantities as Kubernetes writes them: durations ("5m"), bytes ("8Gi"), timestamps, names and URIs.

Each is an annotated type: text in a manifest, a plain number with its unit in Python, text again when dumped. The
schema beside each parser is what the API server checks; both accept the same texts.
"""

from __future__ import annotations

import datetime
import re
from fractions import Fraction
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, PlainSerializer, StringConstraints, WithJsonSchema
from pydantic_core import PydanticCustomError

from naru_proto.errors import InvalidRequest
from naru_proto.model_uri import MAX_URI_LENGTH, SCHEMES, URI_PATTERN, parse_model_uri

URI_ERROR = "bad_uri"
"""Pydantic error type of a bad model URI; its context's `text` says all, the value included."""

MAX_DURATION_S = 8760 * 3600
MAX_BYTES = 2**60

_DURATION_PATTERN = r"^([0-9]{1,9}(\.[0-9]{1,3})?(ms|s|m|h))+$"
_DURATION_MAX_LENGTH = 32
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)")
_SECONDS = {"ms": Fraction(1, 1000), "s": Fraction(1), "m": Fraction(60), "h": Fraction(3600)}

_BYTES_PATTERN = r"^[0-9]{1,15}(\.[0-9]{1,3})?(Ki|Mi|Gi|Ti|k|M|G|T)?$"
_BYTES_PARTS = re.compile(r"([0-9.]+)([A-Za-z]*)")
_BYTE_UNITS = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}

_RESOURCE_PATTERN = r"^[0-9]{1,15}(\.[0-9]{1,3})?(m|Ki|Mi|Gi|Ti|k|M|G|T)?$"


def parse_duration_s(value: object) -> float:
    """Seconds of a text such as "90s", "1h30m" or "250ms"; numbers are refused, as their unit is unknown."""
    if not isinstance(value, str) or len(value) > _DURATION_MAX_LENGTH or not re.fullmatch(_DURATION_PATTERN, value):
        raise ValueError('must be a duration with its unit, such as "30s", "5m" or "1h30m"')
    seconds = sum(Fraction(number) * _SECONDS[unit] for number, unit in _DURATION_PART.findall(value))
    if seconds > MAX_DURATION_S:
        raise ValueError("must be at most 8760h (one year)")
    return float(seconds)


def format_duration(seconds: float) -> str:
    """The shortest text that `parse_duration_s` reads back as the same number of milliseconds."""
    milliseconds = round(seconds * 1000)
    whole = milliseconds // 1000
    parts = ((whole // 3600, "h"), (whole % 3600 // 60, "m"), (whole % 60, "s"), (milliseconds % 1000, "ms"))
    return "".join(f"{number}{unit}" for number, unit in parts if number) or "0s"


def parse_bytes(value: object) -> int:
    """Bytes of a whole number or of a text such as "8Gi" or "1.5G"; parts of a byte round up."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError('must be bytes, such as 1073741824, "1Gi" or "1.5G"')
    if isinstance(value, str):
        if not re.fullmatch(_BYTES_PATTERN, value):
            raise ValueError('must be bytes, such as 1073741824, "1Gi" or "1.5G"')
        match = _BYTES_PARTS.fullmatch(value)
        assert match is not None  # the pattern above is narrower
        exact = Fraction(match[1]) * _BYTE_UNITS[match[2]]
        value = -(-exact.numerator // exact.denominator)
    if not 0 <= value <= MAX_BYTES:
        raise ValueError("must be between 0 and 1024Pi")
    return value


def format_bytes(num_bytes: int) -> str:
    """The shortest exact text: the largest binary unit that divides, else plain digits."""
    for unit in ("Ti", "Gi", "Mi", "Ki"):
        if num_bytes and num_bytes % _BYTE_UNITS[unit] == 0:
            return f"{num_bytes // _BYTE_UNITS[unit]}{unit}"
    return str(num_bytes)


def _parse_timestamp(value: object) -> datetime.datetime:
    if isinstance(value, str):
        try:
            value = datetime.datetime.fromisoformat(value)
        except ValueError:
            value = None
    if not isinstance(value, datetime.datetime) or value.tzinfo is None:
        raise ValueError('must be a time with its zone, such as "2025-01-31T12:00:00Z"')
    return value.astimezone(datetime.UTC)


def _format_timestamp(value: datetime.datetime) -> str:
    return value.isoformat(timespec="seconds").replace("+00:00", "Z")


def timestamp_of(unix_s: float) -> datetime.datetime:
    """The moment of Unix seconds, cut to whole ones as manifests keep them; in [0, 253402300799]."""
    return datetime.datetime.fromtimestamp(int(unix_s), tz=datetime.UTC)


def unix_s_of(value: object) -> float:
    """Unix seconds of an RFC 3339 text or a datetime.

    Raises:
        ValueError: it is neither, or names no zone.
    """
    return _parse_timestamp(value).timestamp()


def _check_uri(value: str) -> str:
    try:
        return str(parse_model_uri(value))
    except InvalidRequest as exc:
        raise PydanticCustomError(URI_ERROR, "{text}", {"text": exc.message}) from exc


def _check_resource(value: object) -> str:
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(text, str) or not re.fullmatch(_RESOURCE_PATTERN, text):
        raise ValueError('must be an amount, such as 2, "500m" or "16Gi"')
    return text


def _int_or_string(pattern: str) -> dict[str, Any]:
    return {
        "anyOf": [{"type": "integer"}, {"type": "string"}],
        "pattern": pattern,
        "x-kubernetes-int-or-string": True,
    }


def _cel_rule(rule: str, message: str) -> list[dict[str, str]]:
    return [{"rule": rule, "message": message}]


Seconds = Annotated[
    float,
    BeforeValidator(parse_duration_s),
    PlainSerializer(format_duration, return_type=str),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": _DURATION_PATTERN,
            "maxLength": _DURATION_MAX_LENGTH,
            "x-kubernetes-validations": _cel_rule(
                "duration(self) <= duration('8760h')", "must be at most 8760h (one year)"
            ),
        }
    ),
]
"""Seconds; in a manifest a duration such as "5m"."""

Bytes = Annotated[
    int,
    BeforeValidator(parse_bytes),
    PlainSerializer(format_bytes, return_type=str),
    WithJsonSchema(_int_or_string(_BYTES_PATTERN)),
]
"""Bytes; in a manifest a number or a quantity such as "8Gi"."""

ResourceAmount = Annotated[str, BeforeValidator(_check_resource), WithJsonSchema(_int_or_string(_RESOURCE_PATTERN))]
"""An amount of a Kubernetes resource, kept as text."""

Timestamp = Annotated[
    datetime.datetime,
    BeforeValidator(_parse_timestamp),
    PlainSerializer(_format_timestamp, return_type=str),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]
"""A moment in UTC; in a manifest RFC 3339."""

ModelUriText = Annotated[
    str,
    AfterValidator(_check_uri),
    WithJsonSchema(
        {
            "type": "string",
            "maxLength": MAX_URI_LENGTH,
            "x-kubernetes-validations": _cel_rule(
                f"self.matches(r'{URI_PATTERN}') && !self.contains('/../') && !self.endsWith('/..')",
                "must be a model URI with one of the schemes " + ", ".join(SCHEMES) + " and no '..' in its path",
            ),
        }
    ),
]
"""A model URI, see `naru_proto.model_uri`."""

ModelNameText = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9]([-._/A-Za-z0-9]*[A-Za-z0-9])?$", max_length=253)
]
"""A name an application may ask for."""

DnsLabel = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
"""An RFC 1123 label."""

DnsSubdomain = Annotated[
    str,
    StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$", max_length=253),
]
"""An RFC 1123 subdomain: what Kubernetes lets an object be called."""
