"""Credentials: read anew from a Secret's files, never mixed with the environment's, never shown."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from file_server import FileServer
from hypothesis import given
from hypothesis import strategies as st

from naru_proto.errors import LoadError
from naru_worker.adapters.fetch import fetch
from naru_worker.adapters.fetch.credentials import Credentials, read_credentials
from naru_worker.settings import FetchSettings


def put(folder: Path, name: str, **values: str) -> Path:
    (folder / name).mkdir(parents=True, exist_ok=True)
    for key, value in values.items():
        (folder / name / key).write_text(value)
    return folder


def test_a_mounted_secret_is_read_without_its_inner_folders(tmp_path: Path) -> None:
    """The kubelet mounts keys as links into a hidden folder that it swaps."""
    data = tmp_path / "hub" / "..2026_01_01"
    data.mkdir(parents=True)
    (data / "HF_TOKEN").write_text("hf_token\n")
    (tmp_path / "hub" / "..data").symlink_to(data.name)
    (tmp_path / "hub" / "HF_TOKEN").symlink_to("..data/HF_TOKEN")
    assert read_credentials("hub", tmp_path).values == {"HF_TOKEN": "hf_token"}


@pytest.mark.parametrize("name", ["..", ".", "../hub", "a/b", "/etc", "UPPER", "a..b", "-a", "a\n", "a" * 254, "a b"])
def test_a_name_that_is_no_secrets_is_refused(tmp_path: Path, name: str) -> None:
    put(tmp_path, "hub", HF_TOKEN="x")
    with pytest.raises(LoadError, match="it is no name of a Secret"):
        read_credentials(name, tmp_path / "hub")


@given(st.text(max_size=40))
def test_no_name_leads_out_of_the_folder(name: str) -> None:
    try:
        found = read_credentials(name, Path("/nonexistent/credentials"))
    except LoadError:
        return
    assert found.name == "" == name


def test_a_missing_secret_says_where_to_list_it(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"credentials 'hub': .*list it in WorkerPool.spec.credentialSecrets"):
        fetch("hf://org/name", credentials="hub", settings=FetchSettings(credentials_dir=str(tmp_path)))


@pytest.mark.parametrize("uri", ["s3://bucket/x", "gs://bucket/x", "hf://org/name", "oci://r/a:v1", "pypi://no-such-1"])
def test_a_secret_without_a_key_for_the_scheme_is_refused(tmp_path: Path, home: Path, uri: str) -> None:
    put(tmp_path, "other", SOMETHING="value-of-something")
    settings = FetchSettings(credentials_dir=str(tmp_path))
    with pytest.raises(LoadError, match=r"have no key for .*; one of .* which has SOMETHING") as caught:
        fetch(uri, home=home, credentials="other", settings=settings)
    assert "value-of-something" not in caught.value.message


def test_half_a_key_pair_is_refused(tmp_path: Path, home: Path) -> None:
    put(tmp_path, "half", AWS_ACCESS_KEY_ID="AKIA")
    with pytest.raises(LoadError, match="'half' lack AWS_SECRET_ACCESS_KEY"):
        fetch("s3://bucket/x", home=home, credentials="half", settings=FetchSettings(credentials_dir=str(tmp_path)))


@pytest.mark.parametrize("content", [b"\xff\xfe", b"x" * ((1 << 20) + 1)], ids=["no text", "too large"])
def test_a_key_that_cannot_be_read_is_named_without_its_content(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "HF_TOKEN").write_bytes(content)
    with pytest.raises(LoadError, match="key 'HF_TOKEN' is no text"):
        read_credentials("hub", tmp_path)


def test_named_credentials_take_the_place_of_the_environments() -> None:
    ambient = {
        "AWS_ACCESS_KEY_ID": "a", "AWS_SESSION_TOKEN": "b", "AWS_ROLE_ARN": "c", "HF_TOKEN": "d", "PIP_INDEX_URL": "e",
        "GOOGLE_APPLICATION_CREDENTIALS": "f", "DOCKER_CONFIG": "g", "UV_DEFAULT_INDEX": "h",
        "AWS_ENDPOINT_URL": "kept", "AWS_REGION": "kept", "HF_ENDPOINT": "kept", "HTTPS_PROXY": "kept",
    }  # fmt: skip
    found = Credentials("x", {"HF_TOKEN": "own"}).environ(ambient)
    kept = {"AWS_ENDPOINT_URL", "AWS_REGION", "HF_ENDPOINT", "HTTPS_PROXY"}
    assert found == {**dict.fromkeys(kept, "kept"), "HF_TOKEN": "own"}
    assert Credentials().environ(ambient) == ambient


def test_no_secret_survives_in_a_message() -> None:
    auth = base64.b64encode(b"user:inner-password").decode()
    docker = json.dumps({"auths": {"r.example": {"auth": auth, "password": "other-password"}}})
    values = {
        "HF_TOKEN": "hf_secret",
        "PIP_INDEX_URL": "https://me:url-password@host/simple",
        ".dockerconfigjson": docker,
    }
    own = Credentials("x", values)
    text = own.scrubbed(f"hf_secret {auth} inner-password other-password url-password r.example")
    assert text == "*** *** *** *** *** r.example"
    assert "hf_secret" not in repr(own)


def test_the_hubs_token_and_endpoint_come_from_the_secret(server: FileServer, tmp_path: Path, home: Path) -> None:
    put(tmp_path, "hub", HF_TOKEN="hf_secret_token", HF_ENDPOINT=server.url)
    settings = FetchSettings(credentials_dir=str(tmp_path))
    with pytest.raises(LoadError, match="org/name@main: not found"):
        fetch("hf://org/name", home=home, credentials="hub", settings=settings)
    assert {asked.headers["authorization"] for asked in server.asked} == {"Bearer hf_secret_token"}


def test_a_private_index_comes_from_the_secret_and_is_not_logged(
    server: FileServer, tmp_path: Path, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    url = server.url.replace("http://", "http://me:index-password@")
    put(tmp_path, "index", PIP_INDEX_URL=f"{url}/simple")
    settings = FetchSettings(credentials_dir=str(tmp_path))
    with pytest.raises(LoadError, match="package 'no-such-package-1': not found") as caught:
        fetch("pypi://no-such-package-1", home=home, credentials="index", settings=settings)
    assert "index-password" not in caught.value.message + caplog.text
    wanted = base64.b64encode(b"me:index-password").decode()
    assert [asked.headers["authorization"] for asked in server.asked] == [f"Basic {wanted}"]
