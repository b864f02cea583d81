"""Certificates of a cluster: two authorities, one certificate for each component, and kubeconfig files made of them.

Called when a cluster starts. Keys stay in the cluster's own folder and end with it.
"""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_VALID = datetime.timedelta(days=365)


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate and its key, as files and as text."""

    crt: Path
    key: Path

    @property
    def pair(self) -> tuple[str, str]:
        """Both paths, as httpx and ssl take them."""
        return str(self.crt), str(self.key)


class Authority:
    """Signs certificates and writes them below a folder; one that stands there already is taken up again."""

    def __init__(self, folder: Path, name: str, common_name: str) -> None:
        self._folder = folder
        self._subject = _subject(common_name, ())
        self.certificate = Certificate(folder / f"{name}.crt", folder / f"{name}.key")
        if self.certificate.key.exists():
            known = serialization.load_pem_private_key(self.certificate.key.read_bytes(), password=None)
            assert isinstance(known, ec.EllipticCurvePrivateKey)
            self._key = known
            return
        self._key = ec.generate_private_key(ec.SECP256R1())
        usage = x509.KeyUsage(
            digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False, key_encipherment=False,
            data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
        )  # fmt: skip
        builder = _builder(self._subject, self._subject, self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        builder = builder.add_extension(usage, critical=True)
        _write(folder, name, builder.sign(self._key, hashes.SHA256()), self._key)

    def client(self, name: str, common_name: str, *organizations: str) -> Certificate:
        """A certificate that a user or component shows to the API server."""
        return self._issue(name, _subject(common_name, organizations), ExtendedKeyUsageOID.CLIENT_AUTH, ())

    def server(self, name: str, common_name: str, hosts: Iterable[str], *organizations: str) -> Certificate:
        """A certificate a server shows, for these DNS names and addresses."""
        return self._issue(name, _subject(common_name, organizations), ExtendedKeyUsageOID.SERVER_AUTH, hosts)

    def _issue(self, name: str, subject: x509.Name, usage: x509.ObjectIdentifier, hosts: Iterable[str]) -> Certificate:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(subject, self._subject, key.public_key())
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        if names := [_general_name(host) for host in hosts]:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return _write(self._folder, name, builder.sign(self._key, hashes.SHA256()), key)


@dataclass(frozen=True, slots=True)
class Pki:
    """All certificates of a cluster."""

    authority: Authority
    front_proxy: Authority
    folder: Path

    @property
    def ca(self) -> Path:
        """The certificate everyone trusts."""
        return self.authority.certificate.crt

    def file(self, name: str) -> str:
        """Path of a file of the folder, such as "apiserver.key"."""
        return str(self.folder / name)


def make_pki(folder: Path, address: str, service_address: str) -> Pki:
    """Writes everything a control plane at `address` needs into `folder`; does nothing where it stands already."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    authority = Authority(folder, "ca", "kubernetes")
    front_proxy = Authority(folder, "front-proxy-ca", "front-proxy")
    pki = Pki(authority, front_proxy, folder)
    if (folder / "service-account.pub").exists():
        return pki
    service = "kubernetes.default.svc.cluster.local"
    names = [".".join(service.split(".")[:count]) for count in (1, 2, 3, 5)]
    authority.server("apiserver", "kube-apiserver", [*names, "localhost", "127.0.0.1", service_address, address])
    authority.client("apiserver-kubelet", "kube-apiserver-kubelet-client", "system:masters")
    front_proxy.client("front-proxy-client", "front-proxy-client")
    authority.client("admin", "admin", "system:masters")
    for component in ("kube-controller-manager", "kube-scheduler", "kube-proxy"):
        authority.client(component, f"system:{component}")
    key = ec.generate_private_key(ec.SECP256R1())
    (folder / "service-account.key").write_bytes(_pem(key))
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / "service-account.pub").write_bytes(public)
    return pki


def node_certificates(pki: Pki, node: str, address: str) -> None:
    """Adds what the kubelet of a node shows as a client and as a server; does nothing where it stands already."""
    if (pki.folder / f"kubelet-{node}.key").exists():
        return
    user = f"system:node:{node}"
    pki.authority.client(f"node-{node}", user, "system:nodes")
    pki.authority.server(f"kubelet-{node}", user, [node, address, "127.0.0.1"], "system:nodes")


def write_kubeconfig(path: Path, server: str, folder: Path, user: str) -> None:
    """A kubeconfig with everything inside it, for the certificate called `user` in `folder`."""

    def data(name: str) -> str:
        return base64.b64encode((folder / name).read_bytes()).decode()

    config: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "naru",
        "clusters": [{"name": "naru", "cluster": {"server": server, "certificate-authority-data": data("ca.crt")}}],
        "users": [
            {
                "name": user,
                "user": {"client-certificate-data": data(f"{user}.crt"), "client-key-data": data(f"{user}.key")},
            }
        ],
        "contexts": [{"name": "naru", "context": {"cluster": "naru", "user": user, "namespace": "default"}}],
    }
    write_if_other(path, json.dumps(config, indent=2))  # JSON is YAML, too


def write_if_other(path: Path, text: str) -> None:
    """Writes a private file unless it has that text: some components end when their configuration is written."""
    if not path.exists() or path.read_text() != text:
        path.touch(mode=0o600)
        path.write_text(text)


def _subject(common_name: str, organizations: Iterable[str]) -> x509.Name:
    parts = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization) for organization in organizations]
    return x509.Name([*parts, x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + _VALID)
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write(folder: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Certificate:
    crt, key_file = folder / f"{name}.crt", folder / f"{name}.key"
    crt.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(_pem(key))
    return Certificate(crt, key_file)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
