"""``s3://`` and ``gs://`` against a real S3 server: choice, ranges, resuming, change, checksums, refusals.

The GCS client speaks the same requests (list-type=2, ranges, If-Match) to it; only its signatures are another matter.
"""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("moto", reason="the S3 server is not installed here (extra `test`)")
pytest.importorskip("flask", reason="the S3 server is not installed here (extra `test`)")

from object_server import Asked, ObjectServer

from naru_proto.errors import LoadError
from naru_worker.adapters.fetch import FetchedModel, FetchProgress, fetch
from naru_worker.settings import FetchSettings

MIB = 1 << 20
BODY = bytes(range(251)) * (5 * MIB // 251)
MODEL = {"model.safetensors": BODY, "config.json": b"{}", "tokenizer.json": b"[]", "README.md": b"no"}


def put(store: ObjectServer, folder: str, files: dict[str, bytes]) -> None:
    for name, body in files.items():
        store.put(f"models/{folder}/{name}", body)
    store.forget()


def names(found: FetchedModel) -> set[str]:
    return {path.name for path in found.path.iterdir()} - {"naru.json"}


def test_a_folder_gives_safetensors_with_what_belongs_to_them(store: ObjectServer, home: Path) -> None:
    put(store, "whole", MODEL)
    seen: list[FetchProgress] = []
    found = fetch("s3://models/whole/", home=home, on_progress=seen.append)
    assert names(found) == {"model.safetensors", "config.json", "tokenizer.json"}
    assert (found.path / "model.safetensors").read_bytes() == BODY
    assert found.digest.startswith("sha256-tree:")
    downloads = [p for p in seen if p.phase == "downloading"]
    assert downloads[-1].bytes_done == downloads[-1].bytes_total == len(BODY) + 4
    assert len({p.bytes_done for p in downloads}) >= 5


def test_large_objects_come_in_bounded_parallel_ranges_of_what_was_listed(store: ObjectServer, home: Path) -> None:
    put(store, "ranges", {"m.gguf": BODY})
    second = threading.Event()

    def wait_for_two(asked: Asked) -> None:
        if store.open_ranges >= 2:
            second.set()
        elif asked.range:
            assert second.wait(30)

    store.fault = wait_for_two
    found = fetch("s3://models/ranges", home=home, settings=FetchSettings(max_fetch_ranges=2))
    assert found.path.read_bytes() == BODY
    asked = store.gets("ranges/m.gguf")
    assert sorted(int(item.range.split("=")[1].split("-")[0]) // MIB for item in asked) == [0, 1, 2, 3, 4]
    assert {item.if_match for item in asked} == {f'"{hashlib.md5(BODY).hexdigest()}"'}
    assert 2 <= store.most_open_ranges <= 3  # one that was sent may not be counted down yet


def test_an_onnx_folder_keeps_its_version_and_a_file_may_be_named(store: ObjectServer, home: Path) -> None:
    put(store, "t", {"config.pbtxt": b"c", "1/model.onnx": b"1", "2/model.onnx": b"2", "2/data": b"d"})
    found = fetch("s3://models/t", home=home)
    assert names(found) == {"config.pbtxt", "2"}
    assert (found.path / "2" / "model.onnx").read_bytes() == b"2"
    assert (found.path / "2" / "data").read_bytes() == b"d"
    assert fetch("s3://models/t/1", home=home).path.name == "model.onnx"
    assert fetch("s3://models/t/1/model.onnx", home=home).path.read_bytes() == b"1"


def test_one_gguf_may_be_named_or_be_the_only_one(store: ObjectServer, home: Path) -> None:
    put(store, "two", {"a.gguf": b"GGUFa", "b.gguf": b"GGUFb"})
    assert fetch("s3://models/two/b.gguf", home=home).path.read_bytes() == b"GGUFb"
    with pytest.raises(LoadError, match=r"several GGUF files; name one as s3://models/two/FILE: a.gguf, b.gguf"):
        fetch("s3://models/two", home=home)


def test_a_name_that_only_begins_like_the_folder_is_not_in_it(store: ObjectServer, home: Path) -> None:
    put(store, "pre", {"a.gguf": b"GGUFa"})
    put(store, "prefix", {"b.gguf": b"GGUFb"})
    assert fetch("s3://models/pre", home=home).path.read_bytes() == b"GGUFa"


def test_what_is_cached_needs_no_store_and_a_refresh_takes_what_changed(store: ObjectServer, home: Path) -> None:
    put(store, "moving", {"m.gguf": b"GGUF one"})
    first = fetch("s3://models/moving", home=home)
    put(store, "moving", {"m.gguf": b"GGUF two"})
    assert fetch("s3://models/moving", home=home) == first
    assert store.asked == []
    assert fetch("s3://models/moving", home=home, refresh=True).path.read_bytes() == b"GGUF two"
    assert first.path.read_bytes() == b"GGUF one"


def test_an_object_that_is_overwritten_meanwhile_is_fetched_anew_and_never_mixed(
    store: ObjectServer, home: Path
) -> None:
    put(store, "hot", {"m.gguf": BODY})
    other = BODY[::-1]
    done = threading.Event()

    def overwrite(asked: Asked) -> None:
        if asked.range.startswith(f"bytes={2 * MIB}-") and not done.is_set():
            done.set()
            store.put("models/hot/m.gguf", other)

    store.fault = overwrite
    assert fetch("s3://models/hot", home=home, settings=FetchSettings(max_fetch_ranges=1)).path.read_bytes() == other


def test_an_object_that_always_changes_is_given_up(store: ObjectServer, home: Path) -> None:
    put(store, "restless", {"m.gguf": b"GGUF"})

    def overwrite(asked: Asked) -> None:
        if asked.range:
            store.put("models/restless/m.gguf", b"GGUF %d" % len(store.asked))

    store.fault = overwrite
    with pytest.raises(LoadError, match="changed 3 times while it was fetched"):
        fetch("s3://models/restless", home=home)


def test_a_version_of_an_object_is_taken(store: ObjectServer, home: Path) -> None:
    store.put("versioned", b"")
    import httpx

    xml = b"<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
    httpx.put(f"{store.url}/versioned?versioning", content=xml).raise_for_status()
    version = store.put("versioned/m.gguf", b"GGUF old")["x-amz-version-id"]
    store.put("versioned/m.gguf", b"GGUF new")
    found = fetch("s3://versioned/m.gguf", version, home=home)
    assert (found.path.read_bytes(), found.revision) == (b"GGUF old", version)
    assert fetch("s3://versioned/m.gguf", home=home).path.read_bytes() == b"GGUF new"
    with pytest.raises(LoadError, match="not found"):
        fetch("s3://versioned/m.gguf", "no-such-version", home=home)


def test_broken_transfers_and_a_busy_store_are_asked_again(store: ObjectServer, home: Path) -> None:
    put(store, "flaky", {"m.gguf": BODY})
    left = {"cut": 3, "busy": 2, "busy list": 2}

    def fault(asked: Asked) -> tuple[str, bytes] | int | None:
        kind = "busy list" if not asked.range else "cut" if left["cut"] else "busy"
        if not left[kind]:
            return None
        left[kind] -= 1
        return 100_000 if kind == "cut" else ("503 Slow Down", b"<Error><Code>SlowDown</Code></Error>")

    store.fault = fault
    assert fetch("s3://models/flaky", home=home).path.read_bytes() == BODY
    assert set(left.values()) == {0}


def test_a_store_that_never_answers_is_given_up_and_what_came_is_kept(
    store: ObjectServer, home: Path, no_pauses: list[float]
) -> None:
    put(store, "dying", {"m.gguf": BODY})
    store.fault = lambda asked: 0 if asked.range and not asked.range.startswith("bytes=0-") else None
    with pytest.raises(LoadError, match="goes on from there"):
        fetch("s3://models/dying", home=home)
    assert no_pauses == sorted(no_pauses)
    store.fault = None
    store.forget()
    assert fetch("s3://models/dying", home=home).path.read_bytes() == BODY
    assert store.sent_bytes == len(BODY) - MIB


def test_a_hung_store_ends_in_a_sentence(store: ObjectServer, home: Path) -> None:
    put(store, "hung", {"m.gguf": BODY})
    release = threading.Event()
    store.on_sent = lambda num_bytes: release.wait(60)
    try:
        with pytest.raises(LoadError, match=r"models/hung/m.gguf: .*goes on from there"):
            fetch("s3://models/hung", home=home, settings=FetchSettings(fetch_stall_timeout_s=0.2))
    finally:
        release.set()


def rot_second_range(store: ObjectServer, times: int) -> None:
    """Its first byte is another one, so many times."""
    left = [times]

    def rot(asked: Asked, body: bytes) -> bytes:
        if not asked.range.startswith(f"bytes={MIB}-") or not left[0]:
            return body
        left[0] -= 1
        return b"?" + body[1:]

    store.rot = rot


def test_bytes_that_are_not_the_object_are_fetched_once_more(store: ObjectServer, home: Path) -> None:
    put(store, "rotten", {"m.gguf": BODY})
    rot_second_range(store, times=1)
    assert fetch("s3://models/rotten", home=home).path.read_bytes() == BODY
    assert len(store.gets("m.gguf")) == 10


def test_bytes_that_never_are_the_object_are_refused(store: ObjectServer, home: Path) -> None:
    put(store, "rotten", {"m.gguf": BODY})
    rot_second_range(store, times=9)
    with pytest.raises(LoadError, match=r"its md5 is .*, the store says .*thrown away, upload the object again"):
        fetch("s3://models/rotten", home=home)
    assert len(store.gets("m.gguf")) == 10
    assert [path.name for path in home.rglob("*.part")] == []


def test_an_object_under_a_key_of_the_user_has_no_md5_to_compare(
    store: ObjectServer, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ETag looks like one; here it is that of other bytes."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIATEST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-test")
    store.put("models/kms/m.gguf", BODY, {"x-amz-server-side-encryption": "aws:kms"})
    store.forget()
    rot_second_range(store, times=9)
    assert fetch("s3://models/kms", home=home).path.read_bytes() == BODY[:MIB] + b"?" + BODY[MIB + 1 :]
    assert [asked.method for asked in store.asked if "X-Amz-Signature" in asked.query] == ["HEAD"]
    assert len(store.gets("m.gguf")) == 5


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("s3://no-such-bucket/x", "not found"),
        ("s3://models/no-such-folder", "not found: it holds no object"),
        ("s3://models/no-such.gguf", r"not found \(HTTP 404\)"),
        ("s3://models/pickled", "pickles only, which run code"),
    ],
)
def test_what_cannot_be_had_is_a_sentence_at_once(
    store: ObjectServer, home: Path, uri: str, message: str, no_pauses: list[float]
) -> None:
    put(store, "pickled", {"pytorch_model.bin": b"x", "config.json": b"{}"})
    with pytest.raises(LoadError, match=message):
        fetch(uri, home=home)
    assert no_pauses == []


def test_a_folder_larger_than_the_disk_is_refused_before_the_download(
    store: ObjectServer, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "huge", {"m.gguf": BODY})
    monkeypatch.setattr("naru_worker.adapters.fetch.budget.free_bytes", lambda folder: 1000)
    with pytest.raises(LoadError, match=r"s3://models/huge needs 5 MB on disk.* has 0 MB free"):
        fetch("s3://models/huge", home=home, settings=FetchSettings(cache_budget_bytes=1 << 40))
    assert store.gets("m.gguf") == []


def test_a_dead_endpoint_is_a_sentence(home: Path, store: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(LoadError, match=r"s3://models/x: no answer .*check the endpoint"):
        fetch("s3://models/x", home=home)


def test_the_gcs_client_fetches_a_folder_too(store: ObjectServer, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", store.url)
    put(store, "google", MODEL)
    found = fetch("gs://models/google", home=home)
    assert (found.path / "model.safetensors").read_bytes() == BODY
    assert names(found) == {"model.safetensors", "config.json", "tokenizer.json"}
    with pytest.raises(LoadError, match="not found"):
        fetch("gs://models/no-such-folder", home=home)


# --- credentials ------------------------------------------------------------------------------------------------------

SECRET_KEY = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"


@pytest.fixture
def guarded(store: ObjectServer) -> ObjectServer:
    """Objects of /private/ are for one key alone; the real server checks the rest."""

    def guard(asked: Asked) -> tuple[str, bytes] | None:
        is_private = "private" in asked.path or "private" in asked.query
        if is_private and "Credential=AKIAOWNER/" not in asked.authorization and asked.method != "PUT":
            return "403 Forbidden", b"<Error><Code>AccessDenied</Code></Error>"
        return None

    store.fault = guard
    put(store, "private", {"m.gguf": b"GGUF private"})
    return store


def secret(folder: Path, name: str, **values: str) -> FetchSettings:
    place = folder / "credentials" / name
    place.mkdir(parents=True)
    for key, value in values.items():
        (place / key).write_text(value + "\n")
    return FetchSettings(credentials_dir=str(folder / "credentials"))


def test_credentials_of_a_secret_open_what_is_closed_without(guarded: ObjectServer, home: Path, tmp_path: Path) -> None:
    settings = secret(tmp_path, "owner", AWS_ACCESS_KEY_ID="AKIAOWNER", AWS_SECRET_ACCESS_KEY=SECRET_KEY)
    with pytest.raises(LoadError, match=r"refuses access \(HTTP 403\); no credentials were named.*credentialsSecret"):
        fetch("s3://models/private", home=home, settings=settings)
    found = fetch("s3://models/private", home=home, settings=settings, credentials="owner")
    assert found.path.read_bytes() == b"GGUF private"


def test_what_credentials_fetched_is_not_served_from_the_cache_to_others(
    guarded: ObjectServer, home: Path, tmp_path: Path
) -> None:
    settings = secret(tmp_path, "owner", AWS_ACCESS_KEY_ID="AKIAOWNER", AWS_SECRET_ACCESS_KEY=SECRET_KEY)
    secret(tmp_path, "stranger", AWS_ACCESS_KEY_ID="AKIASTRANGER", AWS_SECRET_ACCESS_KEY=SECRET_KEY)
    fetch("s3://models/private", home=home, settings=settings, credentials="owner")
    for name in ("", "stranger"):
        with pytest.raises(LoadError, match="refuses access"):
            fetch("s3://models/private", home=home, settings=settings, credentials=name)
    guarded.forget()
    fetch("s3://models/private", home=home, settings=settings, credentials="owner")
    assert guarded.asked == []


def test_rotated_credentials_are_used_by_the_next_fetch(guarded: ObjectServer, home: Path, tmp_path: Path) -> None:
    settings = secret(tmp_path, "turns", AWS_ACCESS_KEY_ID="AKIAOLD", AWS_SECRET_ACCESS_KEY=SECRET_KEY)
    with pytest.raises(LoadError, match="credentials 'turns' were used: check the Secret's keys") as caught:
        fetch("s3://models/private", home=home, settings=settings, credentials="turns")
    assert SECRET_KEY not in caught.value.message
    (tmp_path / "credentials" / "turns" / "AWS_ACCESS_KEY_ID").write_text("AKIAOWNER")
    assert fetch("s3://models/private", home=home, settings=settings, credentials="turns").path.exists()


def test_the_environments_keys_do_not_mix_with_named_ones(
    guarded: ObjectServer, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAOWNER")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "ambient-token")
    settings = secret(tmp_path, "stranger", AWS_ACCESS_KEY_ID="AKIASTRANGER", AWS_SECRET_ACCESS_KEY=SECRET_KEY)
    with pytest.raises(LoadError, match="credentials 'stranger' were used"):
        fetch("s3://models/private", home=home, settings=settings, credentials="stranger")
    assert {"ambient-token" in asked.authorization for asked in guarded.asked} == {False}
    assert fetch("s3://models/private", home=home, settings=settings).path.read_bytes() == b"GGUF private"


# --- killed -----------------------------------------------------------------------------------------------------------


def test_a_killed_fetch_goes_on_where_it_was(store: ObjectServer, home: Path) -> None:
    put(store, "killed", {"m.gguf": BODY * 8})
    command = [sys.executable, "-m", "naru_worker.adapters.fetch", "s3://models/killed", "--home", str(home), "--json"]
    half = threading.Event()
    go_on = threading.Event()

    def hold(num_bytes: int) -> None:
        if num_bytes >= 30 * MIB:
            half.set()
            go_on.wait(60)

    store.on_sent = hold
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert half.wait(60)
        # Ranges are asked ahead: what is on disk is what was received in order.
        part = next(home.rglob("*.part"))
        assert process.stdout is not None
        while part.stat().st_size < 8 * MIB:
            assert process.poll() is None
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        go_on.set()
        assert process.stdout is not None
        process.stdout.close()
    kept = part.stat().st_size
    store.on_sent = lambda num_bytes: None
    store.forget()
    assert not any(path.name == "naru.json" for path in home.rglob("*"))
    assert fetch("s3://models/killed", home=home).path.read_bytes() == BODY * 8
    first = min(int(asked.range.split("=")[1].split("-")[0]) for asked in store.gets("m.gguf"))
    assert first == kept > 0
    assert sum(asked.sent_bytes for asked in store.gets("m.gguf")) == 8 * len(BODY) - kept
