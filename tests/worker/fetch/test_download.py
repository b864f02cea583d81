"""Downloads against a real server: ranges, breaks, checksums, statuses."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from file_server import FileServer

from naru_proto.errors import LoadError
from naru_worker.adapters.fetch.download import Checksum, RemoteFile, download
from naru_worker.adapters.fetch.transport import open_client

BODY = bytes(range(256)) * 4096  # 1 MiB
SHA256 = Checksum("sha256", hashlib.sha256(BODY).hexdigest())


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with open_client({}) as opened:
        yield opened


class Seen:
    def __init__(self) -> None:
        self.reports: list[tuple[int, int]] = []

    def __call__(self, done: int, total: int) -> None:
        self.reports.append((done, total))


def remote(server: FileServer, size: int | None = len(BODY), checksum: Checksum | None = SHA256) -> RemoteFile:
    return RemoteFile(f"{server.url}/file", "the file", size, checksum)


def test_a_file_arrives_whole_and_no_part_stays(server: FileServer, client: httpx.Client, tmp_path: Path) -> None:
    server.put("/file", BODY)
    seen = Seen()
    download(client, remote(server), tmp_path / "f", seen)
    assert (tmp_path / "f").read_bytes() == BODY
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
    assert seen.reports[0] == (0, len(BODY))
    assert seen.reports[-1] == (len(BODY), len(BODY))


def test_a_transfer_that_breaks_goes_on_by_range(server: FileServer, client: httpx.Client, tmp_path: Path) -> None:
    server.put("/file", BODY).cuts = [300_000, 200_000]
    download(client, remote(server), tmp_path / "f", Seen())
    assert (tmp_path / "f").read_bytes() == BODY
    assert server.ranges("/file") == ["", "bytes=300000-1048575", "bytes=500000-1048575"]


def test_another_process_goes_on_from_the_part_file(server: FileServer, client: httpx.Client, tmp_path: Path) -> None:
    server.put("/file", BODY)
    (tmp_path / "f.part").write_bytes(BODY[:123_456])
    seen = Seen()
    download(client, remote(server), tmp_path / "f", seen)
    assert (tmp_path / "f").read_bytes() == BODY
    assert server.ranges("/file") == ["bytes=123456-1048575"]
    assert seen.reports[0] == (123_456, len(BODY))


def test_a_complete_part_file_is_verified_without_a_request(
    server: FileServer, client: httpx.Client, tmp_path: Path
) -> None:
    (tmp_path / "f.part").write_bytes(BODY)
    download(client, remote(server), tmp_path / "f", Seen())
    assert (tmp_path / "f").read_bytes() == BODY
    assert server.asked == []


def test_a_server_without_ranges_sends_it_again(server: FileServer, client: httpx.Client, tmp_path: Path) -> None:
    served = server.put("/file", BODY)
    served.has_ranges = False
    served.cuts = [400_000]
    download(client, remote(server), tmp_path / "f", Seen())
    assert (tmp_path / "f").read_bytes() == BODY


def test_a_part_of_another_content_is_thrown_away_once(
    server: FileServer, client: httpx.Client, tmp_path: Path
) -> None:
    server.put("/file", BODY)
    (tmp_path / "f.part").write_bytes(b"x" * 1000)
    download(client, remote(server), tmp_path / "f", Seen())
    assert (tmp_path / "f").read_bytes() == BODY
    assert server.ranges("/file") == ["bytes=1000-1048575", ""]


@pytest.mark.parametrize("size", [len(BODY), None], ids=["size known", "size unknown"])
def test_a_wrong_checksum_leaves_nothing(
    server: FileServer, client: httpx.Client, tmp_path: Path, size: int | None
) -> None:
    server.put("/file", BODY[:-1] + b"!")
    with pytest.raises(LoadError, match=r"sha256 is .* was announced; it was thrown away"):
        download(client, remote(server, size), tmp_path / "f", Seen())
    assert list(tmp_path.iterdir()) == []


def test_a_git_blob_id_is_a_checksum(server: FileServer, client: httpx.Client, tmp_path: Path) -> None:
    server.put("/file", b"hello\n")
    # What `git hash-object` prints for these bytes.
    blob = Checksum("git-sha1", "ce013625030ba8dba906f756967f9e9ca394464a")
    with pytest.raises(LoadError, match=blob.hexdigest):
        download(client, remote(server, 6, Checksum("git-sha1", "0" * 40)), tmp_path / "f", Seen())
    download(client, remote(server, 6, blob), tmp_path / "f", Seen())
    assert (tmp_path / "f").read_bytes() == b"hello\n"


def test_more_bytes_than_announced_are_refused(server: FileServer, client: httpx.Client, tmp_path: Path) -> None:
    server.put("/file", BODY)
    with pytest.raises(LoadError, match="more than the announced 1000 bytes"):
        download(client, remote(server, 1000, None), tmp_path / "f", Seen())
    assert list(tmp_path.iterdir()) == []


def test_fewer_bytes_than_announced_are_never_taken_for_the_file(
    server: FileServer, client: httpx.Client, tmp_path: Path
) -> None:
    server.put("/file", BODY[:1000])
    with pytest.raises(LoadError, match=r"no bytes from 1000 on|only 1000 of"):
        download(client, remote(server), tmp_path / "f", Seen())
    assert not (tmp_path / "f").exists()


def test_a_range_of_another_place_is_never_appended(server: FileServer, client: httpx.Client, tmp_path: Path) -> None:
    served = server.put("/file", BODY)
    served.status = 206
    served.headers = {"Content-Range": f"bytes 0-{len(BODY) - 1}/{len(BODY)}"}
    (tmp_path / "f.part").write_bytes(BODY[:10])
    download(client, remote(server), tmp_path / "f", Seen())
    assert (tmp_path / "f").read_bytes() == BODY
    assert server.ranges("/file") == ["bytes=10-1048575", ""]


def test_a_server_that_always_breaks_is_given_up_and_the_part_is_kept(
    server: FileServer, client: httpx.Client, tmp_path: Path, no_pauses: list[float]
) -> None:
    server.put("/file", BODY).cuts = [5000, 0, 0, 0, 0, 0, 0, 0]
    with pytest.raises(LoadError, match="check the network and run it again, it goes on from there"):
        download(client, remote(server), tmp_path / "f", Seen())
    assert (tmp_path / "f.part").read_bytes() == BODY[:5000]
    assert no_pauses == sorted(no_pauses)
    assert len(no_pauses) == 5


def test_a_server_that_recovers_is_asked_again(server: FileServer, client: httpx.Client, tmp_path: Path) -> None:
    server.put("/file", BODY).failures = [503, 429]
    download(client, remote(server), tmp_path / "f", Seen())
    assert (tmp_path / "f").read_bytes() == BODY


@pytest.mark.parametrize(("status", "message"), [(404, "not found"), (401, "refuses access"), (403, "refuses access")])
def test_a_final_status_is_a_sentence_and_asked_once(
    server: FileServer, client: httpx.Client, tmp_path: Path, status: int, message: str
) -> None:
    server.put("/file", b"").failures = [status]
    with pytest.raises(LoadError, match=f"the file: .*{message}"):
        download(client, remote(server), tmp_path / "f", Seen())
    assert len(server.asked) == 1


def test_redirects_are_followed_with_the_range(server: FileServer, client: httpx.Client, tmp_path: Path) -> None:
    server.redirect("/file", "/elsewhere")
    server.put("/elsewhere", BODY)
    (tmp_path / "f.part").write_bytes(BODY[:77])
    download(client, remote(server), tmp_path / "f", Seen())
    assert (tmp_path / "f").read_bytes() == BODY
    assert server.ranges("/elsewhere") == ["bytes=77-1048575"]


def test_a_circle_of_redirects_ends(server: FileServer, client: httpx.Client, tmp_path: Path) -> None:
    server.redirect("/file", "/file")
    with pytest.raises(LoadError, match="cannot be followed"):
        download(client, remote(server), tmp_path / "f", Seen())


def test_what_the_watcher_raises_ends_it_and_the_part_is_kept(
    server: FileServer, client: httpx.Client, tmp_path: Path
) -> None:
    server.put("/file", BODY)

    class Stop(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done > 100_000:
            raise Stop

    with pytest.raises(Stop):
        download(client, remote(server), tmp_path / "f", stop)
    assert 100_000 < (tmp_path / "f.part").stat().st_size < len(BODY)
    download(client, remote(server), tmp_path / "f", Seen())
    assert (tmp_path / "f").read_bytes() == BODY


def test_nobody_answers_is_a_sentence(server: FileServer, client: httpx.Client, tmp_path: Path) -> None:
    dead = RemoteFile("http://127.0.0.1:1/file", "the file", None, None)
    with pytest.raises(LoadError, match=r"the file: the connection failed \(ConnectError"):
        download(client, dead, tmp_path / "f", Seen())
