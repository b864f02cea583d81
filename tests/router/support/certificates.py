"""An authority of its own, and certificates that it signs, as PEM files."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


class Authority:
    """Signs certificates for this machine."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        certificate = self._signed(self._name, self._key, is_authority=True)
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, password: bytes = b"") -> tuple[Path, Path]:
        """Files of a certificate and of its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._signed(_name(name), key, is_authority=False)
        files = self._folder / f"{name}.crt", self._folder / f"{name}.key"
        files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        lock: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if password:
            lock = serialization.BestAvailableEncryption(password)
        pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        files[1].write_bytes(key.private_bytes(pem, form, lock))
        return files

    def _signed(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, is_authority: bool) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        usage = x509.KeyUsage(True, False, False, False, False, is_authority, is_authority, False, False)
        hosts = x509.SubjectAlternativeName(
            [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        )
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(own, critical=False)
            .add_extension(issuer, critical=False)
            .add_extension(hosts, critical=False)
            .sign(self._key, hashes.SHA256())
        )
