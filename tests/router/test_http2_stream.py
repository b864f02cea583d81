"""The stream to a worker, byte by byte: whatever the peer sends, messages come out whole or the stream is broken."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

import pytest
from hpack import Encoder

from naru_router.core.http2 import frames
from naru_router.core.http2.stream import MAX_FRAME_BYTES, RECEIVE_WINDOW_BYTES, GrpcStream, StreamBroken

MAX_MESSAGE = 2_000_000


def head(length: int, kind: int, flags: int, stream: int) -> bytes:
    return struct.pack("!I", length)[1:] + struct.pack("!BBI", kind, flags, stream)


def raw(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return head(len(payload), kind, flags, stream) + payload


def message(data: bytes) -> bytes:
    return b"\0" + struct.pack("!I", len(data)) + data


def data_frame(payload: bytes, flags: int = 0) -> bytes:
    return raw(frames.DATA, flags, 1, payload)


def headers(*pairs: tuple[str, str]) -> bytes:
    return Encoder().encode([(":status", "200"), ("content-type", "application/grpc"), *pairs])


ANSWER = raw(frames.HEADERS, frames.END_HEADERS, 1, headers())
GREETING = raw(frames.SETTINGS, 0, 0, b"")


def opened() -> GrpcStream:
    stream = GrpcStream("worker:1", "/naru.v1.Worker/Exchange", max_message_bytes=MAX_MESSAGE)
    stream.start()
    stream.outgoing.clear()
    assert stream.receive(GREETING + ANSWER) == [] and stream.is_ready
    stream.outgoing.clear()
    return stream


def sent(stream: GrpcStream) -> list[tuple[int, int, int, bytes]]:
    """Frames that are to be written: type, flags, stream, payload."""
    data = b"".join(stream.outgoing)
    stream.outgoing.clear()
    found = []
    while data:
        length = int.from_bytes(data[:3], "big")
        found.append((data[3], data[4], int.from_bytes(data[5:9], "big"), data[9 : 9 + length]))
        data = data[9 + length :]
    return found


def test_it_begins_as_http2_and_grpc_ask() -> None:
    stream = GrpcStream("worker:1", "/naru.v1.Worker/Exchange", max_message_bytes=MAX_MESSAGE)
    stream.start()
    assert stream.outgoing[0] == b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    del stream.outgoing[0]
    settings, window, call = sent(stream)
    assert settings[0] == frames.SETTINGS and window[0] == frames.WINDOW_UPDATE
    assert call[:3] == (frames.HEADERS, frames.END_HEADERS, 1)
    assert not stream.is_ready


def test_messages_come_out_whole_however_they_are_cut() -> None:
    dice = random.Random(1)
    messages = [dice.randbytes(dice.choice((0, 1, 5, 300, 70_000))) for _ in range(60)]
    payload = b"".join(map(message, messages))
    data, at = b"", 0
    while at < len(payload):
        size = dice.randint(1, 9000)
        piece = payload[at : at + size]
        at += size
        pad = dice.randint(0, 20)
        padded = dice.random() < 0.3
        data += data_frame(bytes([pad]) + piece + bytes(pad), frames.PADDED) if padded else data_frame(piece)
        if dice.random() < 0.2:
            data += raw(frames.PING, 0, 0, b"12345678") + raw(2, 0, 1, bytes(5)) + raw(77, 3, 9, b"unknown")
    stream = opened()
    found, at = [], 0
    while at < len(data):
        size = dice.choice((1, 8, 100, 20_000))
        found += stream.receive(data[at : at + size])
        at += size
    assert found == messages
    assert all(frame[:2] == (frames.PING, frames.ACK) for frame in sent(stream) if frame[0] == frames.PING)


def test_pings_are_answered_with_what_they_brought() -> None:
    stream = opened()
    stream.receive(raw(frames.PING, 0, 0, b"abcdefgh") + raw(frames.PING, frames.ACK, 0, b"mine....") + GREETING)
    assert sent(stream) == [(frames.PING, frames.ACK, 0, b"abcdefgh"), (frames.SETTINGS, frames.ACK, 0, b"")]


def test_header_blocks_may_be_cut_and_padded() -> None:
    stream = GrpcStream("worker:1", "/x", max_message_bytes=MAX_MESSAGE)
    stream.start()
    block = headers(("x-long", "v" * 300))
    first = bytes([3]) + bytes(5) + block[:10] + bytes(3)
    stream.receive(
        GREETING
        + raw(frames.HEADERS, frames.PADDED | frames.PRIORITY, 1, first)
        + raw(frames.CONTINUATION, 0, 1, block[10:20])
        + raw(frames.CONTINUATION, frames.END_HEADERS, 1, block[20:])
    )
    assert stream.receive(data_frame(message(b"hello"))) == [b"hello"]


def test_the_peers_window_is_kept_and_used() -> None:
    stream = opened()
    stream.receive(raw(frames.SETTINGS, 0, 0, struct.pack("!HIHI", 4, 100_000, 5, 20_000)))
    sent(stream)
    text = bytes(range(256)) * 700
    stream.send(text)
    stream.send(b"second")
    pieces = sent(stream)
    assert sum(len(p[3]) for p in pieces) == 65_535 and max(len(p[3]) for p in pieces) <= 20_000
    stream.receive(raw(frames.WINDOW_UPDATE, 0, 0, struct.pack("!I", 1_000_000)))
    pieces += sent(stream)
    assert sum(len(p[3]) for p in pieces) == 100_000
    stream.receive(raw(frames.WINDOW_UPDATE, 0, 1, struct.pack("!I", 1_000_000)))
    pieces += sent(stream)
    assert b"".join(p[3] for p in pieces) == message(text) + message(b"second")
    assert {p[:3] for p in pieces} == {(frames.DATA, 0, 1)}


def test_a_window_that_shrinks_below_what_is_sent_holds_back() -> None:
    stream = opened()
    stream.send(b"x" * 50_000)
    sent(stream)
    stream.receive(raw(frames.SETTINGS, 0, 0, struct.pack("!HI", 4, 10)))
    sent(stream)
    stream.send(b"later")
    assert sent(stream) == []
    stream.receive(raw(frames.WINDOW_UPDATE, 0, 1, struct.pack("!I", 60_000)))
    assert [frame[3] for frame in sent(stream)] == [message(b"later")]


def test_what_was_received_is_given_back_to_the_peers_window() -> None:
    stream = opened()
    piece = data_frame(message(b"x" * (MAX_FRAME_BYTES - 5)), 0)
    given_back = {0: 0, 1: 0}
    for _ in range(40):
        assert len(stream.receive(piece)) == 1
        for kind, _, where, payload in sent(stream):
            assert kind == frames.WINDOW_UPDATE
            given_back[where] += frames.read_word(payload)
    assert given_back[0] == given_back[1]
    assert 40 * MAX_FRAME_BYTES - given_back[0] < RECEIVE_WINDOW_BYTES / 2


def trailers(status: str, detail: str = "") -> bytes:
    block = Encoder().encode([("grpc-status", status), ("grpc-message", detail)])
    return raw(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, 1, block)


BREAKS: dict[str, tuple[Callable[[], bytes], str]] = {
    "status": (lambda: trailers("14", "worker%20drains"), "status 14: worker drains"),
    "reset": (lambda: raw(frames.RST_STREAM, 0, 1, struct.pack("!I", 7)), "REFUSED_STREAM"),
    "goodbye": (lambda: raw(frames.GOAWAY, 0, 0, struct.pack("!II", 1, 11) + b"too_many_pings"), "ENHANCE_YOUR_CALM"),
    "goodbye before the call": (lambda: raw(frames.GOAWAY, 0, 0, struct.pack("!II", 0, 0)), "closes the connection"),
    "end without status": (lambda: data_frame(b"", frames.END_STREAM), "without a status"),
    "compressed": (lambda: data_frame(b"\1\0\0\0\1x"), "compressed"),
    "large message": (lambda: data_frame(b"\0" + struct.pack("!I", MAX_MESSAGE + 1)), f"{MAX_MESSAGE + 1} bytes"),
    "large frame": (lambda: head(MAX_FRAME_BYTES + 1, frames.DATA, 0, 1), "frame of"),
    "padding": (lambda: data_frame(b"\x09123", frames.PADDED), "padding"),
    "push": (lambda: raw(frames.PUSH_PROMISE, frames.END_HEADERS, 1, b"\0\0\0\2"), "pushes"),
    "odd settings": (lambda: raw(frames.SETTINGS, 0, 0, b"12345"), "odd size"),
    "short reset": (lambda: raw(frames.RST_STREAM, 0, 1, b"1"), "too short"),
    "wide window": (lambda: raw(frames.WINDOW_UPDATE, 0, 1, struct.pack("!I", 2**31 - 1)), "too far"),
    "another stream": (lambda: raw(frames.DATA, 0, 3, b"x"), "outside the stream"),
    "headers of another": (lambda: raw(frames.HEADERS, frames.END_HEADERS, 3, headers()), "outside the stream"),
    "bad headers": (lambda: raw(frames.HEADERS, frames.END_HEADERS, 1, b"\xff\xff\xff\xff\xff"), "cannot be read"),
    "cut headers": (lambda: raw(frames.HEADERS, 0, 1, headers()) + GREETING, "inside a header block"),
    "endless headers": (
        lambda: raw(frames.HEADERS, 0, 1, b"x") + raw(frames.CONTINUATION, 0, 1, bytes(60_000)) * 2,
        "bytes of headers",
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_what_breaks_the_stream_is_told(name: str) -> None:
    make, reason = BREAKS[name]
    stream = opened()
    assert stream.receive(data_frame(message(b"before"))) == [b"before"]
    with pytest.raises(StreamBroken, match=reason):
        stream.receive(make())


def test_a_goodbye_that_lets_the_call_end_is_no_end() -> None:
    stream = opened()
    goodbye = raw(frames.GOAWAY, 0, 0, struct.pack("!II", 2**31 - 1, 0))
    assert stream.receive(goodbye + data_frame(message(b"still"))) == [b"still"]


@pytest.mark.parametrize(
    ("pairs", "reason"),
    [
        ([(":status", "404"), ("content-type", "text/html")], "HTTP status 404"),
        ([(":status", "200"), ("content-type", "text/html")], "not as a gRPC server"),
    ],
)
def test_a_server_that_is_no_grpc_server_is_named(pairs: list[tuple[str, str]], reason: str) -> None:
    stream = GrpcStream("worker:1", "/x", max_message_bytes=MAX_MESSAGE)
    stream.start()
    with pytest.raises(StreamBroken, match=reason):
        stream.receive(GREETING + raw(frames.HEADERS, frames.END_HEADERS, 1, Encoder().encode(pairs)))


def test_garbage_never_does_anything_but_break_the_stream() -> None:
    dice = random.Random(2)
    kinds = list(range(12))
    for _ in range(3000):
        stream = opened()
        data = b"".join(
            raw(dice.choice(kinds), dice.randrange(256), dice.choice((0, 1, 1, 2)), dice.randbytes(dice.randrange(30)))
            for _ in range(4)
        )
        try:
            stream.receive(data)
        except StreamBroken:
            continue
