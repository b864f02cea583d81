"""``oci://`` against a registry that breaks, lies, and asks for tokens."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from file_server import Asked, FileServer, Served

from naru_proto.errors import LoadError
from naru_worker.adapters.fetch import fetch
from naru_worker.adapters.fetch.registry_login import parse_challenges
from naru_worker.settings import FetchSettings

WEIGHTS = bytes(range(256)) * 4096


def sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


class Fake:
    """A registry with one artifact of one GGUF file."""

    def __init__(self, server: FileServer) -> None:
        self.server = server
        self.host = server.url.removeprefix("http://")
        self.uri = f"oci://{self.host}/org/model:v1"
        self.blob_path = f"/v2/org/model/blobs/sha256:{sha256(WEIGHTS)}"
        self.blob = server.put(self.blob_path, WEIGHTS)
        self.put_manifest(self.manifest())

    def manifest(self, **changes: Any) -> dict[str, Any]:
        layer = {
            "mediaType": "application/octet-stream",
            "digest": f"sha256:{sha256(WEIGHTS)}",
            "size": len(WEIGHTS),
            "annotations": {"org.opencontainers.image.title": "m.gguf"},
        }
        return {"schemaVersion": 2, "config": {}, "layers": [{**layer, **changes}]}

    def put_manifest(self, manifest: Any) -> None:
        self.server.put("/v2/org/model/manifests/v1", json.dumps(manifest).encode())


@pytest.fixture
def fake(server: FileServer, monkeypatch: pytest.MonkeyPatch, home: Path) -> Fake:
    monkeypatch.setenv("DOCKER_CONFIG", str(home / "none"))
    return Fake(server)


def test_a_cut_layer_goes_on_by_range(fake: Fake, home: Path) -> None:
    fake.blob.cuts = [300_000, 200_000]
    assert fetch(fake.uri, home=home).path.read_bytes() == WEIGHTS
    assert fake.server.ranges(fake.blob_path) == ["", "bytes=300000-1048575", "bytes=500000-1048575"]


def test_a_layer_of_another_digest_is_fetched_once_more_and_then_refused(fake: Fake, home: Path) -> None:
    fake.blob.body = b"?" + WEIGHTS[1:]
    with pytest.raises(LoadError, match=r"its sha256 is .*, .* was announced; it was thrown away"):
        fetch(fake.uri, home=home)
    assert fake.server.ranges(fake.blob_path) == ["", ""]
    assert [path.name for path in home.rglob("*") if path.suffix in (".gguf", ".part")] == []


def test_a_manifest_of_another_digest_is_refused(fake: Fake, home: Path) -> None:
    digest = "sha256:" + "0" * 64
    fake.server.put(f"/v2/org/model/manifests/{digest}", json.dumps(fake.manifest()).encode())
    with pytest.raises(LoadError, match=f"{digest} was asked for"):
        fetch(f"oci://{fake.host}/org/model@{digest}", home=home)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"digest": "sha256:../../etc/passwd"}, "is no sha256"),
        ({"digest": "md5:" + "0" * 32}, "is no sha256"),
        ({"digest": 7}, "is no sha256"),
        ({"size": -1}, "has size -1"),
        ({"size": "12"}, "has size 12"),
        ({"size": True}, "has size True"),
        ({"size": 1 << 60}, "on disk"),
        ({"annotations": 3}, "manifest is broken"),
        ({"annotations": {"org.opencontainers.image.title": "a/../../m.gguf"}}, "leads out"),
        ({"annotations": {"org.opencontainers.image.title": "a\\m.gguf"}}, "leads out"),
        ({"annotations": {"org.opencontainers.image.title": "m\n.gguf"}}, "leads out"),
    ],
    ids=repr,
)
def test_a_hostile_manifest_is_a_sentence(fake: Fake, home: Path, change: dict[str, Any], message: str) -> None:
    fake.put_manifest(fake.manifest(**change))
    with pytest.raises(LoadError, match=message):
        fetch(fake.uri, home=home)
    assert fake.server.ranges(fake.blob_path) == []


@pytest.mark.parametrize(
    "manifest", ["{", "[1]", "{}", '{"layers": 3}', '{"layers": [3]}', '{"manifests": [3]}', "[" * 100_000], ids=len
)
def test_a_broken_manifest_is_a_sentence(fake: Fake, home: Path, manifest: str) -> None:
    fake.server.put("/v2/org/model/manifests/v1", manifest.encode())
    with pytest.raises(LoadError, match=f"oci://{fake.host}/org/model:v1: "):
        fetch(fake.uri, home=home)


def test_a_manifest_without_end_is_refused(fake: Fake, home: Path) -> None:
    fake.server.put("/v2/org/model/manifests/v1", b" " * (5 << 20))
    with pytest.raises(LoadError, match="over 4194304 bytes"):
        fetch(fake.uri, home=home)


def test_a_registry_elsewhere_is_asked_with_tls_unless_it_is_listed(fake: Fake, home: Path) -> None:
    port = fake.host.rpartition(":")[2]
    # Every address of 127/8 is loopback; this name is not known to be.
    uri = f"oci://127.0.0.1.nip.invalid:{port}/org/model:v1"
    with pytest.raises(LoadError, match="no answer"):
        fetch(uri, home=home)
    from naru_worker.adapters.fetch.credentials import Credentials
    from naru_worker.adapters.fetch.job import FetchJob
    from naru_worker.adapters.fetch.oci import _base_url

    def base(registry: str, *insecure: str) -> str:
        settings = FetchSettings(insecure_registries=insecure)
        return _base_url(registry, FetchJob(home, lambda progress: None, {}, Credentials(), settings, False))

    assert base("registry.local:5000") == "https://registry.local:5000"
    assert base("registry.local:5000", "registry.local:5000") == "http://registry.local:5000"
    assert base("registry.local", "other.local") == "https://registry.local"
    assert base("localhost:5000") == "http://localhost:5000"
    assert base("[::1]:5000") == "http://[::1]:5000"
    assert base("docker.io") == "https://registry-1.docker.io"


# --- tokens -----------------------------------------------------------------------------------------------------------


class TokenGate:
    """Asks for a bearer token at everything below /v2, and gives one at /token to those who may have it."""

    def __init__(self, fake: Fake, password: str = "", realm: str = "") -> None:
        self.password = password
        self.valid: set[str] = set()
        self.realm = realm or f"{fake.server.url}/token"
        fake.server.gate = self

    def __call__(self, asked: Asked) -> Served | None:
        given = asked.headers.get("authorization", "")
        if asked.path.startswith("/token"):
            wanted = f"Basic {base64.b64encode(f'reader:{self.password}'.encode()).decode()}"
            if self.password and given != wanted:
                return Served(status=401, body=b"who are you")
            self.valid = {f"token-{len(self.valid)}-{id(asked)}"}
            return Served(json.dumps({"token": next(iter(self.valid))}).encode())
        if given.removeprefix("Bearer ") in self.valid:
            return None
        challenge = f'Bearer realm="{self.realm}",service="test",scope="repository:org/model:pull"'
        return Served(status=401, headers={"WWW-Authenticate": challenge})


def tokens_asked(fake: Fake) -> list[str]:
    return [asked.path for asked in fake.server.asked if asked.path.startswith("/token")]


def test_a_token_is_fetched_once_and_used_for_all(fake: Fake, home: Path, no_pauses: list[float]) -> None:
    TokenGate(fake)
    assert fetch(fake.uri, home=home).path.read_bytes() == WEIGHTS
    assert tokens_asked(fake) == ["/token?scope=repository%3Aorg%2Fmodel%3Apull&service=test"]
    assert no_pauses == []


def test_a_token_that_expires_in_the_middle_is_renewed(fake: Fake, home: Path) -> None:
    gate = TokenGate(fake)
    fake.blob.cuts = [300_000]

    def expire(asked: Asked) -> Served | None:
        answer = gate(asked)
        if asked.path == fake.blob_path and answer is None and fake.blob.cuts:
            gate.valid.clear()
        return answer

    fake.server.gate = expire
    assert fetch(fake.uri, home=home).path.read_bytes() == WEIGHTS
    assert len(tokens_asked(fake)) == 2


def test_the_token_service_gets_the_password_and_the_registry_the_token(fake: Fake, home: Path, tmp_path: Path) -> None:
    TokenGate(fake, password="pa55word")
    (tmp_path / "reg").mkdir()
    (tmp_path / "reg" / "username").write_text("reader")
    (tmp_path / "reg" / "password").write_text("pa55word")
    settings = FetchSettings(credentials_dir=str(tmp_path))
    assert fetch(fake.uri, home=home, settings=settings, credentials="reg").path.read_bytes() == WEIGHTS
    below = {asked.headers.get("authorization", "")[:6] for asked in fake.server.asked if asked.path.startswith("/v2")}
    assert below == {"", "Bearer"}
    (tmp_path / "reg" / "password").write_text("old-password")
    with pytest.raises(LoadError, match=r"token service: the server refuses access .*credentials 'reg' were used") as e:
        fetch(fake.uri, home=home, settings=settings, credentials="reg", refresh=True)
    assert "old-password" not in e.value.message


@pytest.mark.parametrize(
    ("realm", "answer", "message"),
    [
        ("file:///etc/passwd", b"", "no safe address"),
        ("", b"{", "token service's answer is broken"),
        ("", b"{}", "token service's answer is broken"),
        ("", b"[]", "token service's answer is broken"),
        ("", b'{"token": 7}', "sends no token"),
        ("", b'{"token": "a\\nb: c"}', "sends no token"),
        ("", b" " * (2 << 20), "sends too much"),
    ],
    ids=["scheme", "no JSON", "no token", "list", "number", "header", "endless"],
)
def test_a_hostile_token_service_is_a_sentence(fake: Fake, home: Path, realm: str, answer: bytes, message: str) -> None:
    gate = TokenGate(fake, realm=realm)

    def answered(asked: Asked) -> Served | None:
        return Served(answer) if asked.path.startswith("/token") else gate(asked)

    fake.server.gate = answered
    with pytest.raises(LoadError, match=message):
        fetch(fake.uri, home=home)


def test_a_registry_that_takes_no_token_is_not_asked_for_ever(fake: Fake, home: Path) -> None:
    gate = TokenGate(fake)

    def refuse(asked: Asked) -> Served | None:
        answer = gate(asked)
        gate.valid.clear()
        return answer

    fake.server.gate = refuse
    with pytest.raises(LoadError, match=f"{fake.host}/org/model:v1: no answer"):
        fetch(fake.uri, home=home)
    assert len(fake.server.asked) < 20


Challenges = dict[str, dict[str, str]]


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ('Bearer realm="https://a/t",service="s",scope="repository:x:pull,push"',
         {"bearer": {"realm": "https://a/t", "service": "s", "scope": "repository:x:pull,push"}}),
        ('Basic realm="Registry Realm"', {"basic": {"realm": "Registry Realm"}}),
        ('bearer realm=https://a/t', {"bearer": {"realm": "https://a/t"}}),
        ('Bearer realm="https://a/t", Basic realm="b"', {"bearer": {"realm": "https://a/t"}, "basic": {"realm": "b"}}),
        ("", {}),
        ("Negotiate", {}),
    ],
)  # fmt: skip
def test_challenges_are_read(header: str, expected: Challenges) -> None:
    assert parse_challenges(header) == expected
