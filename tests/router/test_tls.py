"""TLS and mutual TLS of both servers: who gets in, changed files, and files that cannot be used."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from certificates import Authority
from router_rig import CHAT, MODEL, Rig, body, poll, simple

from naru_proto.settings import SettingsError
from naru_proto.v1 import inference_pb2 as inf
from naru_proto.v1 import inference_pb2_grpc
from naru_router.adapters.tls_files import TlsFiles
from naru_router.app import build
from naru_router.settings import Settings


@dataclass
class World:
    """The files of a router and of its clients."""

    rig: Rig
    authority: Authority
    cert: Path
    key: Path

    def settings(self, **more: Any) -> dict[str, Any]:
        return {"tls_cert_file": str(self.cert), "tls_key_file": str(self.key), **more}

    def replace(self, cert: Path, key: Path) -> None:
        """As a mounted secret is replaced: each file at once."""
        for new, old in ((cert, self.cert), (key, self.key)):
            os.replace(new, old)

    def context(self, client: tuple[Path, Path] | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.authority.file))
        if client is not None:
            context.load_cert_chain(*client)
        return context

    async def chat(self, client: tuple[Path, Path] | None = None) -> int:
        """Status of a chat on a new connection over HTTP."""
        async with httpx.AsyncClient(verify=self.context(client)) as http:
            url = f"https://127.0.0.1:{self.rig.app.http_port}{CHAT}"
            return (await http.post(url, json=body(CHAT))).status_code

    async def generate(self, client: tuple[Path, Path] | None = None) -> str:
        """A text on a new connection over gRPC."""
        files = [self.authority.file.read_bytes(), *(None, None)]
        if client is not None:
            files = [files[0], client[1].read_bytes(), client[0].read_bytes()]
        address = f"127.0.0.1:{self.rig.app.grpc_port}"
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(*files), options=options) as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            request = inf.InferenceGenerateRequest(model=MODEL, prompt="x")
            return "".join([each.text async for each in stub.Generate(request, timeout=5)])

    async def shown(self, port: int) -> bytes:
        """The certificate that a new connection is shown."""
        context = self.context()
        context.set_alpn_protocols(["h2", "http/1.1"])
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        found: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.transport.abort()
        return found

    async def both_shown(self) -> list[bytes]:
        return [await self.shown(self.rig.app.http_port), await self.shown(self.rig.app.grpc_port)]


@pytest.fixture
def world(rig: Rig, tmp_path: Path) -> World:
    """An authority, and a certificate of the router."""
    authority = Authority(tmp_path)
    return World(rig, authority, *authority.issue("router"))


async def test_both_servers_speak_tls_and_nothing_else(world: World) -> None:
    await simple(world.rig, **world.settings())
    assert await world.chat() == 200
    assert await world.generate() == "Hello"
    with pytest.raises(httpx.TransportError):
        await world.rig.client.post(CHAT, json=body(CHAT))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{world.rig.app.grpc_port}") as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.ListModels(inf.ListModelsRequest(), timeout=5)
    assert world.rig.workers["w0"].requests[0].text


async def test_clients_must_show_a_certificate_of_their_authority(world: World, tmp_path: Path) -> None:
    await simple(world.rig, **world.settings(tls_client_ca_file=str(world.authority.file)))
    client = world.authority.issue("client")
    stranger = Authority(tmp_path, "other").issue("stranger")
    assert await world.chat(client) == 200
    assert await world.generate(client) == "Hello"
    for who in (None, stranger):
        with pytest.raises(httpx.TransportError):
            await world.chat(who)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await world.generate(who)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert len(world.rig.workers["w0"].requests) == 2


async def test_changed_files_count_for_new_connections_and_old_ones_stay(world: World) -> None:
    await simple(world.rig, **world.settings())
    first = await world.both_shown()
    url = f"https://127.0.0.1:{world.rig.app.http_port}{CHAT}"
    async with httpx.AsyncClient(verify=world.context()) as standing:
        assert (await standing.post(url, json=body(CHAT))).status_code == 200
        world.replace(*world.authority.issue("second"))

        async def has_changed() -> bool:
            return all(new != old for new, old in zip(await world.both_shown(), first, strict=True))

        await poll(has_changed)
        assert (await standing.post(url, json=body(CHAT))).status_code == 200
    assert await world.chat() == 200 and await world.generate() == "Hello"


def test_files_that_became_unusable_are_not_taken(world: World) -> None:
    files = TlsFiles(str(world.cert), str(world.key))
    first = files.context()
    os.replace(world.authority.issue("second")[0], world.cert)  # the key is still the old one's
    assert files.context() is first
    world.key.unlink()
    assert files.context() is first
    world.replace(*world.authority.issue("third"))
    assert files.context() is not first


@pytest.mark.parametrize("rounds_before", range(4))
async def test_who_connects_just_as_the_files_change_is_served(world: World, rounds_before: int) -> None:
    """Whatever the server has got to with the connection by then: nothing, accepting it, or setting it up."""
    await simple(world.rig, **world.settings())
    server: Any = world.rig.app._http
    with socket.create_connection(("127.0.0.1", world.rig.app.http_port)) as client:
        for _ in range(rounds_before):
            await asyncio.sleep(0)
        world.replace(*world.authority.issue("second"))
        before = server._context
        await server._renew_tls(server._tls)
        assert server._context is not before
        client.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=client, ssl=world.context(), server_hostname="127.0.0.1")
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()
        await writer.wait_closed()


async def test_a_revoked_authority_lets_no_new_client_in(world: World, tmp_path: Path) -> None:
    authorities = tmp_path / "clients.pem"
    authorities.write_bytes(world.authority.file.read_bytes())
    await simple(world.rig, **world.settings(tls_client_ca_file=str(authorities)))
    client = world.authority.issue("client")
    other = Authority(tmp_path, "other")
    assert await world.chat(client) == 200
    os.replace(other.file, authorities)
    new = other.issue("new")

    async def has_changed() -> bool:
        try:
            return await world.chat(new) == 200
        except httpx.TransportError:
            return False

    await poll(has_changed)
    with pytest.raises(httpx.TransportError):
        await world.chat(client)
    with pytest.raises(grpc.aio.AioRpcError):
        await world.generate(client)
    assert await world.generate(new) == "Hello"


FILES = ("tls_cert_file", "tls_key_file")
BAD: list[tuple[str, Callable[[World], dict[str, Any]], str]] = [
    ("no key", lambda w: {"tls_cert_file": str(w.cert)}, "tls_key_file"),
    ("no certificate", lambda w: {"tls_key_file": str(w.key)}, "tls_cert_file"),
    ("an authority alone", lambda w: {"tls_client_ca_file": str(w.authority.file)}, "tls_client_ca_file"),
    ("no such file", lambda w: w.settings(tls_key_file="/nowhere/key"), "/nowhere/key"),
    ("another key", lambda w: w.settings(tls_key_file=str(w.authority.issue("other")[1])), "used together"),
    ("a locked key", lambda w: dict(zip(FILES, map(str, w.authority.issue("locked", b"pw")), strict=True)), "password"),
    ("no PEM", lambda w: w.settings(tls_cert_file=str(w.key)), "used together"),
    ("no authority", lambda w: w.settings(tls_client_ca_file=str(w.key)), "tls_client_ca_file"),
    ("a folder", lambda w: w.settings(tls_key_file=str(w.key.parent)), "cannot be read"),
]


@pytest.mark.parametrize(("make", "says"), [pytest.param(make, says, id=name) for name, make, says in BAD])
async def test_what_cannot_be_used_stops_the_start(
    world: World, make: Callable[[World], dict[str, Any]], says: str
) -> None:
    with pytest.raises(SettingsError, match=says):
        build(Settings(http_port=0, grpc_port=0, redis_url=world.rig.redis_url, **make(world)))


def test_files_that_change_while_they_are_read_are_read_again(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = TlsFiles(str(world.cert), str(world.key))
    first = files.context()
    world.replace(*world.authority.issue("second"))
    stamps = iter([((1, 1, 1),), ((2, 2, 2),)])
    with monkeypatch.context() as patch:
        patch.setattr(files, "_look", lambda: next(stamps))
        assert files.context() is first
    assert files.context() is not first
