"""The client's side of one bidirectional gRPC stream that has an HTTP/2 connection to itself. Bytes in, messages out.

The link to a worker feeds it what the socket brings and writes what it leaves in `outgoing`. gRPC's own library
carries such a stream through a thread of its own and several turns of the event loop; this is what the stream needs
and no more: no second stream, no compression, no push. What breaks the protocol raises `StreamBroken`, after which
nothing more is fed or sent.

Source: RFC 9113 (HTTP/2), RFC 7541 (HPACK, by the library), gRPC over HTTP2
https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import unquote

from hpack import Decoder, Encoder
from hpack.exceptions import HPACKError

from naru_router.core.http2 import frames
from naru_router.core.http2.frames import HEADER_BYTES

RECEIVE_WINDOW_BYTES = 16 * 1024 * 1024
"""More than a worker has under way: it never waits for this side."""
MAX_FRAME_BYTES = 1024 * 1024
MAX_HEADER_BYTES = 64 * 1024
_PREFIX_BYTES = 5
_STREAM = 1


class StreamBroken(Exception):
    """The peer ended the stream or does not speak the protocol; the text says which."""


class GrpcStream:
    """One call. Mutable; `start` first, then `receive` and `send` in any order."""

    def __init__(self, authority: str, path: str, *, max_message_bytes: int) -> None:
        self.outgoing: list[bytes] = []
        """What is to be written, oldest first; whoever writes it empties the list."""
        self.is_ready = False
        """The peer has said that it speaks HTTP/2."""
        self._request = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", authority),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
        ]
        self._max_message_bytes = max_message_bytes
        self._rest = b""
        self._message = bytearray()
        """The beginning of a message whose end has not come."""
        self._headers: bytearray | None = None
        """A header block whose end has not come."""
        self._ends_with_headers = False
        self._is_answered = False
        self._decoder = Decoder(max_header_list_size=MAX_HEADER_BYTES)
        self._unsent: list[bytes] = []
        """Message bytes that wait for the peer's window."""
        self._send_window = self._connection_window = frames.DEFAULT_WINDOW_BYTES
        self._initial_window = frames.DEFAULT_WINDOW_BYTES
        self._max_send_bytes = frames.DEFAULT_FRAME_BYTES
        self._num_unacknowledged = 0

    def start(self) -> None:
        """Leaves the beginning of the connection and of the call in `outgoing`."""
        ours = {
            frames.ENABLE_PUSH: 0,
            frames.INITIAL_WINDOW_SIZE: RECEIVE_WINDOW_BYTES,
            frames.MAX_FRAME_SIZE: MAX_FRAME_BYTES,
            frames.MAX_HEADER_LIST_SIZE: MAX_HEADER_BYTES,
        }
        headers = Encoder().encode(self._request)
        self.outgoing += [
            frames.PREFACE,
            frames.settings(ours),
            frames.window_update(0, RECEIVE_WINDOW_BYTES - frames.DEFAULT_WINDOW_BYTES),
            frames.frame(frames.HEADERS, frames.END_HEADERS, _STREAM, headers),
        ]

    def send(self, message: bytes) -> None:
        """Sends a message as far as the peer's window allows; the rest follows as it opens."""
        data = b"\x00" + len(message).to_bytes(4, "big") + message
        if not self._unsent and len(data) <= min(self._send_window, self._connection_window, self._max_send_bytes):
            self._send_window -= len(data)
            self._connection_window -= len(data)
            self.outgoing.append(frames.frame(frames.DATA, 0, _STREAM, data))
            return
        self._unsent.append(data)
        self._send_waiting()

    def cancel(self) -> None:
        """Tells the peer that the call is over."""
        self.outgoing.append(frames.frame(frames.RST_STREAM, 0, _STREAM, frames.word(frames.CANCEL)))
        self.outgoing.append(frames.frame(frames.GOAWAY, 0, 0, frames.word(0) + frames.word(0)))

    def receive(self, data: bytes) -> list[bytes]:
        """Takes bytes of the connection; the messages that are whole by now.

        Raises:
            StreamBroken: the stream has ended, well or badly.
        """
        if self._rest:
            data = self._rest + data
        messages: list[bytes] = []
        at, size = 0, len(data)
        while size - at >= HEADER_BYTES:
            length, kind, flags, stream = frames.read_head(data, at)
            if length > MAX_FRAME_BYTES:
                raise StreamBroken(f"it sent a frame of {length} bytes; at most {MAX_FRAME_BYTES} are allowed")
            end = at + HEADER_BYTES + length
            if end > size:
                break
            payload = data[at + HEADER_BYTES : end]
            at = end
            if self._headers is not None and kind != frames.CONTINUATION:
                raise StreamBroken("it sent another frame inside a header block")
            if kind == frames.DATA:
                self._take_data(payload, flags, stream, messages)
            else:
                self._take_other(kind, flags, stream, payload)
        self._rest = data[at:]
        return messages

    def _take_data(self, payload: bytes, flags: int, stream: int, messages: list[bytes]) -> None:
        if stream != _STREAM or not self._is_answered:
            raise StreamBroken("it sent data outside the stream")
        self._num_unacknowledged += len(payload)
        if self._num_unacknowledged >= RECEIVE_WINDOW_BYTES // 2:
            for each in (0, _STREAM):
                self.outgoing.append(frames.window_update(each, self._num_unacknowledged))
            self._num_unacknowledged = 0
        if flags & frames.PADDED:
            payload = _unpadded(payload)
        # Most frames hold one whole message.
        if not self._message and len(payload) >= _PREFIX_BYTES and self._size_at(payload, 0) == len(payload):
            messages.append(payload[_PREFIX_BYTES:])
        elif payload:
            self._message += payload
            self._cut_messages(messages)
        if flags & frames.END_STREAM:
            raise StreamBroken("it ended the stream without a status")

    def _cut_messages(self, messages: list[bytes]) -> None:
        buffer = self._message
        at = 0
        while len(buffer) - at >= _PREFIX_BYTES:
            end = at + self._size_at(buffer, at)
            if end > len(buffer):
                break
            messages.append(bytes(buffer[at + _PREFIX_BYTES : end]))
            at = end
        del buffer[:at]

    def _size_at(self, data: bytes | bytearray, at: int) -> int:
        """Bytes of the message that begins at `at`, its prefix included."""
        if data[at]:
            raise StreamBroken("it sent a compressed message, which was not offered")
        size = int.from_bytes(data[at + 1 : at + _PREFIX_BYTES], "big")
        if size > self._max_message_bytes:
            raise StreamBroken(f"it sent a message of {size} bytes; at most {self._max_message_bytes} are allowed")
        return size + _PREFIX_BYTES

    def _take_other(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == frames.SETTINGS:
            self._take_settings(flags, payload)
        elif kind == frames.PING:
            if not flags & frames.ACK:
                self.outgoing.append(frames.frame(frames.PING, frames.ACK, 0, payload))
        elif kind == frames.WINDOW_UPDATE:
            self._take_window(stream, payload)
        elif kind in (frames.HEADERS, frames.CONTINUATION):
            self._take_header_block(kind, flags, stream, payload)
        elif kind == frames.RST_STREAM:
            _check_size(payload, 4)
            raise StreamBroken(f"it reset the stream: {frames.error_name(frames.read_word(payload))}")
        elif kind == frames.GOAWAY:
            _check_size(payload, 8)
            # One that lets this stream end by itself is no news: the stream's own end follows.
            code = frames.read_word(payload, 4)
            if code or frames.read_word(payload) & 0x7FFFFFFF < _STREAM:
                raise StreamBroken(f"it closes the connection: {frames.error_name(code)}")
        elif kind == frames.PUSH_PROMISE:
            raise StreamBroken("it pushes, which was not offered")
        # Frames of unknown types, and priorities, mean nothing here.

    def _take_settings(self, flags: int, payload: bytes) -> None:
        if flags & frames.ACK:
            return
        if len(payload) % 6:
            raise StreamBroken("it sent settings of an odd size")
        for name, value in frames.read_settings(payload):
            if name == frames.INITIAL_WINDOW_SIZE:
                self._send_window += value - self._initial_window
                self._initial_window = value
            elif name == frames.MAX_FRAME_SIZE:
                self._max_send_bytes = max(frames.DEFAULT_FRAME_BYTES, value)
        self.is_ready = True
        self.outgoing.append(frames.frame(frames.SETTINGS, frames.ACK, 0, b""))
        self._send_waiting()

    def _take_window(self, stream: int, payload: bytes) -> None:
        _check_size(payload, 4)
        increment = frames.read_word(payload) & 0x7FFFFFFF
        if stream == 0:
            self._connection_window += increment
        elif stream == _STREAM:
            self._send_window += increment
        if max(self._connection_window, self._send_window) > frames.MAX_WINDOW_BYTES:
            raise StreamBroken("it opened its window too far")
        self._send_waiting()

    def _send_waiting(self) -> None:
        while self._unsent:
            data = self._unsent[0]
            room = min(self._send_window, self._connection_window, self._max_send_bytes)
            if room <= 0:
                return
            piece = data[:room]
            self._send_window -= len(piece)
            self._connection_window -= len(piece)
            self.outgoing.append(frames.frame(frames.DATA, 0, _STREAM, piece))
            if len(piece) < len(data):
                self._unsent[0] = data[room:]
            else:
                del self._unsent[0]

    def _take_header_block(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == frames.HEADERS:
            if flags & frames.PADDED:
                payload = _unpadded(payload)
            if flags & frames.PRIORITY:
                payload = payload[5:]
            self._headers = bytearray()
            self._ends_with_headers = bool(flags & frames.END_STREAM)
        if self._headers is None or stream != _STREAM:
            raise StreamBroken("it sent headers outside the stream")
        self._headers += payload
        if len(self._headers) > MAX_HEADER_BYTES:
            raise StreamBroken(f"it sent more than {MAX_HEADER_BYTES} bytes of headers")
        if not flags & frames.END_HEADERS:
            return
        block, self._headers = bytes(self._headers), None
        try:
            headers = [(_text(name), _text(value)) for name, value, *_ in self._decoder.decode(block, raw=True)]
        except HPACKError as exc:
            raise StreamBroken(f"it sent headers that cannot be read: {exc}") from exc
        self._take_headers(headers)

    def _take_headers(self, headers: Sequence[tuple[str, str]]) -> None:
        values = dict(headers)
        if self._ends_with_headers:
            status, detail = values.get("grpc-status", "?"), unquote(values.get("grpc-message", ""))
            raise StreamBroken(f"it ended the stream with status {status}{': ' if detail else ''}{detail[:500]}")
        is_grpc = values.get("content-type", "").startswith("application/grpc")
        if values.get(":status") != "200" or not is_grpc:
            raise StreamBroken(f"it answered with HTTP status {values.get(':status', '?')}, not as a gRPC server")
        self._is_answered = True


def _unpadded(payload: bytes) -> bytes:
    if not payload or payload[0] >= len(payload):
        raise StreamBroken("it sent a frame with more padding than bytes")
    return payload[1 : len(payload) - payload[0]]


def _check_size(payload: bytes, least: int) -> None:
    if len(payload) < least:
        raise StreamBroken("it sent a frame that is too short")


def _text(data: bytes | str) -> str:
    return data if isinstance(data, str) else data.decode("latin-1")
