"""The files of the servers' TLS: certificate, key, and the authority of clients who must show one, too.

Changed files count for new connections. What cannot be used is refused at the start, and kept out later: the last good
files serve on. Used by both servers.
"""

from __future__ import annotations

import logging
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from naru_proto.settings import SettingsError

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 1024 * 1024
_Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class _Contents:
    certificate: bytes
    key: bytes
    authority: bytes


class TlsFiles:
    """Follows the files. Mutable; asked by the event loop and by gRPC's threads."""

    def __init__(self, cert_file: str, key_file: str, client_ca_file: str = "") -> None:
        """`client_ca_file` empty: clients need no certificate.

        Raises:
            SettingsError: naming the file and what is wrong with it.
        """
        self._paths = {"tls_cert_file": cert_file, "tls_key_file": key_file, "tls_client_ca_file": client_ca_file}
        self._lock = threading.Lock()
        self._stamp = self._look()
        self._contents = self._read()
        self._context = self._make_context()
        self._grpc_contents = self._contents

    @property
    def asks_clients(self) -> bool:
        """Whether clients must show a certificate."""
        return bool(self._paths["tls_client_ca_file"])

    def context(self) -> ssl.SSLContext:
        """What new connections are served with; another object once the files have changed."""
        self._follow()
        return self._context

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """The same for gRPC's library, which asks at each new connection whether something has changed."""
        changed: Any = self._changed_configuration  # None where nothing has, which its types do not tell
        return grpc.dynamic_ssl_server_credentials(_configuration(self._contents), changed, self.asks_clients)

    def _changed_configuration(self) -> grpc.ServerCertificateConfiguration | None:
        self._follow()
        contents = self._contents
        if contents is self._grpc_contents:
            return None
        self._grpc_contents = contents
        return _configuration(contents)

    def _follow(self) -> None:
        with self._lock:
            stamp = self._look()
            if stamp != self._stamp:
                self._take(stamp)

    def _take(self, stamp: _Stamp) -> None:
        try:
            contents, context = self._read(), self._make_context()
        except SettingsError as exc:
            self._stamp = stamp
            logger.error("the changed TLS files are not used, the ones before serve on: %s", exc)
            return
        if self._look() != stamp:
            return  # they are changing just now: the next connection looks again
        self._stamp, self._contents, self._context = stamp, contents, context
        logger.info("new connections get the changed TLS certificate of %s", self._paths["tls_cert_file"])

    def _look(self) -> _Stamp:
        """Changes when a file does; a link that leads elsewhere is a changed file."""
        found = []
        for path in self._paths.values():
            try:
                stat = Path(path).stat() if path else None
            except OSError:
                stat = None
            found.append((stat.st_ino, stat.st_mtime_ns, stat.st_size) if stat is not None else (0, 0, 0))
        return tuple(found)

    def _read(self) -> _Contents:
        texts = [_bytes_of(name, path) if path else b"" for name, path in self._paths.items()]
        return _Contents(*texts)

    def _make_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        cert, key, authority = self._paths.values()
        try:
            # A key that is locked is refused rather than asked for at a terminal.
            context.load_cert_chain(cert, key, password=lambda: b"")
        except (OSError, ValueError) as exc:
            raise SettingsError(
                f"tls_cert_file {cert!r} and tls_key_file {key!r} cannot be used together: {_reason(exc)}; they must "
                "be PEM files, the key without a password and of that certificate"
            ) from exc
        if authority:
            try:
                context.load_verify_locations(authority)
            except (OSError, ValueError) as exc:
                message = (
                    f"tls_client_ca_file {authority!r} cannot be used: {_reason(exc)}; it must hold certificates in PEM"
                )
                raise SettingsError(message) from exc
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def _configuration(contents: _Contents) -> grpc.ServerCertificateConfiguration:
    pairs = [(contents.key, contents.certificate)]
    return grpc.ssl_server_certificate_configuration(pairs, root_certificates=contents.authority or None)


def _bytes_of(name: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as exc:
        raise SettingsError(f"{name} is {path!r}, which cannot be read: {exc.strerror}") from exc
    if len(data) > MAX_FILE_BYTES:
        raise SettingsError(f"{name} is {path!r}, which is larger than {MAX_FILE_BYTES} bytes; it is no such file")
    return data


def _reason(exc: Exception) -> str:
    return getattr(exc, "reason", None) or str(exc)


def tls_files(cert_file: str, key_file: str, client_ca_file: str) -> TlsFiles | None:
    """The files, as the settings name them; None: no TLS.

    Raises:
        SettingsError: naming the file and what is wrong with it.
    """
    return TlsFiles(cert_file, key_file, client_ca_file) if cert_file else None
