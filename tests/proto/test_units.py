"""Durations, bytes and times as manifests write them."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from naru_proto.crd import units


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0s", 0), ("30s", 30), ("5m", 300), ("1h30m", 5400), ("250ms", 0.25), ("1.5h", 5400), ("8760h", 31_536_000)],
)
def test_a_duration_is_its_seconds(text: str, seconds: float) -> None:
    assert units.parse_duration_s(text) == seconds


@pytest.mark.parametrize(
    "value",
    [
        "",
        "5",
        "5d",
        "-5s",
        "5 s",
        "5s\n",
        "s",
        "1e3s",
        "1.2345s",
        "٣s",
        5,
        5.0,
        True,
        None,
        "8761h",
        "1s" * 100,
        ["5s"],
    ],
)
def test_anything_but_a_duration_with_its_unit_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="must be"):
        units.parse_duration_s(value)


@given(st.integers(0, units.MAX_DURATION_S * 1000))
def test_durations_survive_printing_and_parsing(milliseconds: int) -> None:
    assert round(units.parse_duration_s(units.format_duration(milliseconds / 1000)) * 1000) == milliseconds


@pytest.mark.parametrize(
    ("value", "num_bytes"),
    [(0, 0), (1024, 1024), ("1024", 1024), ("1Ki", 1024), ("8Gi", 2**33), ("1.5G", 1_500_000_000), ("0.001", 1)],
)
def test_a_quantity_is_its_bytes(value: object, num_bytes: int) -> None:
    assert units.parse_bytes(value) == num_bytes


@pytest.mark.parametrize(
    "value", ["", "-1", "1gi", "1 Gi", "1GiB", "1m", "1e3", "Gi", "1.2345Gi", "1Gi\n", -1, 1.5, True, None, "9999999Ti"]
)
def test_anything_but_bytes_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="must be"):
        units.parse_bytes(value)


@given(st.integers(0, units.MAX_BYTES))
def test_bytes_survive_printing_and_parsing(num_bytes: int) -> None:
    text = units.format_bytes(num_bytes)
    if len(text) <= 15:  # longer plain numbers are written as integers, which have no such bound
        assert units.parse_bytes(text) == num_bytes


def test_times_are_read_with_their_zone_and_kept_in_utc() -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(units.Timestamp)
    noon = datetime.datetime(2025, 1, 31, 12, tzinfo=datetime.UTC)
    assert adapter.validate_python("2025-01-31T12:00:00Z") == noon
    assert adapter.validate_python("2025-01-31T13:00:00+01:00") == noon
    assert adapter.dump_python(noon) == "2025-01-31T12:00:00Z"


@pytest.mark.parametrize("value", ["2025-01-31T12:00:00", "noon", 1738324800, None, datetime.datetime(2025, 1, 31)])
def test_times_without_a_zone_are_refused(value: object) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(units.Timestamp)
    with pytest.raises(ValidationError, match="with its zone"):
        adapter.validate_python(value)


@pytest.mark.parametrize(("value", "text"), [(2, "2"), ("500m", "500m"), ("16Gi", "16Gi")])
def test_resource_amounts_stay_text(value: object, text: str) -> None:
    adapter: TypeAdapter[str] = TypeAdapter(units.ResourceAmount)
    assert adapter.validate_python(value) == text
