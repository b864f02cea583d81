"""``oci://`` against a real registry: forms of artifacts, tags and digests, passwords, resuming."""

from __future__ import annotations

import base64
import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from oci_registry import INDEX_TYPE, PASSWORD, USER, Registry, oci_registry

from naru_proto.errors import LoadError
from naru_worker.adapters.fetch import FetchedModel, FetchProgress, fetch
from naru_worker.settings import FetchSettings

pytestmark = pytest.mark.timeout(600)  # the registry is built once for a machine

RAW = "application/octet-stream"
KIT = "application/vnd.kitops.modelkit.model.v1.tar+gzip"
IMAGE_CONFIG = "application/vnd.oci.image.config.v1+json"
IMAGE_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
WEIGHTS = bytes(range(256)) * 4096
MODEL = {"model.safetensors": WEIGHTS, "config.json": b"{}", "tokenizer.json": b"[]", "README.md": b"no"}


@pytest.fixture(scope="module")
def registry() -> Iterator[Registry]:
    with oci_registry() as running:
        yield running


def tar(files: dict[str, bytes], mode: str = "w:gz") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode, format=tarfile.PAX_FORMAT) as archive:  # type: ignore[call-overload]
        for name, body in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(body)
            member.pax_headers = {"comment": "made for a test"}
            archive.addfile(member, io.BytesIO(body))
    return out.getvalue()


def as_files(files: dict[str, bytes]) -> list[tuple[str, str, bytes]]:
    return [(RAW, name, body) for name, body in files.items()]


def names(found: FetchedModel) -> set[str]:
    return {path.name for path in found.path.iterdir()} - {"naru.json"}


def test_named_files_come_without_those_that_are_no_model(registry: Registry, home: Path) -> None:
    digest = registry.push("team/llama", "v1", as_files(MODEL))
    seen: list[FetchProgress] = []
    found = fetch(f"oci://{registry.host}/team/llama:v1", home=home, on_progress=seen.append)
    assert names(found) == {"model.safetensors", "config.json", "tokenizer.json"}
    assert (found.path / "model.safetensors").read_bytes() == WEIGHTS
    assert (found.revision, found.digest) == (digest, digest)
    downloads = [p for p in seen if p.phase == "downloading"]
    assert downloads[-1].bytes_done == downloads[-1].bytes_total == len(WEIGHTS) + 4


def test_a_digest_names_the_content_and_a_tag_what_it_stood_for(registry: Registry, home: Path) -> None:
    base = f"oci://{registry.host}/moving"
    old = registry.push("moving", "latest", as_files({"m.gguf": b"GGUF old"}))
    first = fetch(base, home=home)
    registry.push("moving", "latest", as_files({"m.gguf": b"GGUF new"}))
    assert fetch(f"{base}:latest", home=home) == first
    assert fetch(base, home=home, refresh=True).path.read_bytes() == b"GGUF new"
    assert fetch(f"{base}@{old}", home=home).path.read_bytes() == b"GGUF old"
    assert fetch(base, old, home=home).path.read_bytes() == b"GGUF old"


def test_one_of_several_ggufs_is_named_behind_the_tag(registry: Registry, home: Path) -> None:
    registry.push("two", "v1", as_files({"a.gguf": b"GGUFa", "q/b.gguf": b"GGUFb"}))
    base = f"oci://{registry.host}/two:v1"
    assert fetch(f"{base}/q/b.gguf", home=home).path.read_bytes() == b"GGUFb"
    with pytest.raises(LoadError, match=r"several models \(a.gguf, q/b.gguf\)"):
        fetch(base, home=home)


@pytest.mark.parametrize("mode", ["w:gz", "w:"])
def test_tar_layers_are_unpacked(registry: Registry, home: Path, mode: str) -> None:
    kind = KIT if mode == "w:gz" else KIT.removesuffix("+gzip")
    body = tar({f"kit/{name}": content for name, content in MODEL.items()}, mode)
    registry.push("kit", f"v{len(mode)}", [(kind, "", body)])
    found = fetch(f"oci://{registry.host}/kit:v{len(mode)}", home=home)
    assert found.path.name == "kit"
    assert names(found) == {"model.safetensors", "config.json", "tokenizer.json"}
    assert (found.path / "model.safetensors").read_bytes() == WEIGHTS
    assert {path.name for path in found.path.parent.iterdir()} == {"kit", "naru.json"}


def test_an_image_gives_what_lies_below_models(registry: Registry, home: Path) -> None:
    base = tar(
        {"bin/busybox": b"elf", "etc/app/config.json": b"{}", "models/m.gguf": b"GGUF base", "models/x.json": b"1"}
    )
    top = tar({"models/m.gguf": b"GGUF top", "models/.wh.x.json": b""})
    registry.push("car", "v1", [(IMAGE_LAYER, "", base), (IMAGE_LAYER, "", top)], IMAGE_CONFIG)
    found = fetch(f"oci://{registry.host}/car:v1", home=home)
    assert found.path.read_bytes() == b"GGUF top"
    assert {path.name for path in found.path.parent.iterdir()} == {"m.gguf", "naru.json"}


def test_an_index_gives_its_only_manifest_or_this_machines(registry: Registry, home: Path) -> None:
    import platform

    own = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    body = b"GGUF here"
    here = registry.push("multi", "here", as_files({"m.gguf": body}))
    there = registry.push("multi", "there", as_files({"m.gguf": b"GGUF there"}))
    offers = [
        {"digest": there, "size": 1, "mediaType": INDEX_TYPE, "platform": {"os": "linux", "architecture": "s390x"}},
        {"digest": here, "size": 1, "mediaType": INDEX_TYPE, "platform": {"os": "linux", "architecture": own}},
    ]
    for offer in offers:
        offer["mediaType"] = "application/vnd.oci.image.manifest.v1+json"
    registry.put_manifest("multi", "both", {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": offers})
    registry.put_manifest("multi", "one", {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": offers[:1]})
    assert fetch(f"oci://{registry.host}/multi:both", home=home).path.read_bytes() == body
    assert fetch(f"oci://{registry.host}/multi:one", home=home).path.read_bytes() == b"GGUF there"


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([(RAW, "pytorch_model.bin", b"x"), (RAW, "config.json", b"{}")], "pickles only, which run code"),
        ([(RAW, "README.md", b"x")], "holds no .gguf and no .safetensors"),
        ([(RAW, "", b"x")], "has no layer with files of a model"),
        ([("application/vnd.cncf.model.weight.v1.tar+zstd", "", b"x")], "zstd is not read here"),
        ([(RAW, "../m.gguf", b"x")], "'../m.gguf' leads out"),
        ([(RAW, "/m.gguf", b"x")], "'/m.gguf' leads out"),
        ([(KIT, "", b"no tar")], "an archive layer is damaged"),
    ],
    ids=["pickle", "no model", "no files", "zstd", "climbs", "absolute", "damaged"],
)
def test_an_artifact_without_a_model_is_refused(
    registry: Registry, home: Path, layers: list[tuple[str, str, bytes]], message: str, request: pytest.FixtureRequest
) -> None:
    tag = request.node.callspec.id.replace(" ", "-")
    registry.push("bad", tag, layers)
    with pytest.raises(LoadError, match=message):
        fetch(f"oci://{registry.host}/bad:{tag}", home=home)
    assert [path.name for path in home.rglob("*.gguf")] == []


@pytest.mark.parametrize("reference", ["no-such", "no/such:v1"])
def test_what_is_not_there_is_a_sentence(registry: Registry, home: Path, reference: str) -> None:
    with pytest.raises(LoadError, match=rf"oci://{registry.host}/{reference}.*(not found|refuses access)"):
        fetch(f"oci://{registry.host}/{reference}", home=home)


def test_an_interrupted_layer_goes_on_by_range(registry: Registry, home: Path) -> None:
    registry.push("large", "v1", as_files({"m.gguf": WEIGHTS * 4}))

    class Stop(Exception):
        pass

    def stop(progress: FetchProgress) -> None:
        if progress.bytes_done > len(WEIGHTS):
            raise Stop

    with pytest.raises(Stop):
        fetch(f"oci://{registry.host}/large:v1", home=home, on_progress=stop)
    kept = next(home.rglob("m.gguf.part")).stat().st_size
    seen: list[FetchProgress] = []
    assert fetch(f"oci://{registry.host}/large:v1", home=home, on_progress=seen.append).path.read_bytes() == WEIGHTS * 4
    assert next(p.bytes_done for p in seen if p.phase == "downloading") == kept > 0


# --- passwords --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def closed() -> Iterator[Registry]:
    with oci_registry(with_password=True) as running:
        running.push("private", "v1", as_files({"m.gguf": b"GGUF private"}))
        yield running


def docker_config(host: str, password: str) -> str:
    auth = base64.b64encode(f"{USER}:{password}".encode()).decode()
    return json.dumps({"auths": {"other.example": {"auth": "eDp5"}, f"https://{host}/v2/": {"auth": auth}}})


def settings_with(folder: Path, values: dict[str, str]) -> FetchSettings:
    (folder / "registry").mkdir()
    for key, value in values.items():
        (folder / "registry" / key).write_text(value)
    return FetchSettings(credentials_dir=str(folder))


@pytest.mark.parametrize("form", ["docker config", "name and password", "environment"])
def test_a_password_opens_a_closed_repository(
    closed: Registry, home: Path, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"oci://{closed.host}/private:v1"
    if form == "environment":
        (tmp_path / "config.json").write_text(docker_config(closed.host, PASSWORD))
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
        assert fetch(uri, home=home).path.read_bytes() == b"GGUF private"
        return
    values = {"username": USER, "password": PASSWORD}
    if form == "docker config":
        values = {".dockerconfigjson": docker_config(closed.host, PASSWORD)}
    settings = settings_with(tmp_path, values)
    assert fetch(uri, home=home, settings=settings, credentials="registry").path.read_bytes() == b"GGUF private"


def test_a_wrong_password_is_a_sentence_that_does_not_show_it(closed: Registry, home: Path, tmp_path: Path) -> None:
    settings = settings_with(tmp_path, {".dockerconfigjson": docker_config(closed.host, "wrong-password")})
    with pytest.raises(LoadError, match=r"refuses access .*credentials 'registry' were used") as caught:
        fetch(f"oci://{closed.host}/private:v1", home=home, settings=settings, credentials="registry")
    assert "wrong-password" not in caught.value.message


def test_without_a_password_the_remedy_is_told(closed: Registry, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(home))
    with pytest.raises(LoadError, match=r"refuses access .*set model.credentialsSecret"):
        fetch(f"oci://{closed.host}/private:v1", home=home)
