"""Certificates of a local control plane: a CA, server and client certificates, the service-account key.

Everything is short-lived and lies in one private folder. It must not know who uses a certificate.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFETIME = datetime.timedelta(days=2)
_SKEW = datetime.timedelta(minutes=5)


@dataclass(frozen=True)
class Certificate:
    """Paths of a PEM certificate, its key (mode 0600) and the CA that signed it."""

    cert_file: Path
    key_file: Path
    ca_file: Path


class CertificateAuthority:
    """A CA on P-256 that lives as long as this object; its key is never written anywhere."""

    def __init__(self, name: str, folder: Path) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        usage = _key_usage(sign_certificates=True)
        builder = (
            _builder(self._name, self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
        )
        self._certificate = builder.sign(self._key, hashes.SHA256())
        folder.mkdir(parents=True, exist_ok=True)
        self.ca_file = folder / f"{name}.crt"
        self.ca_file.write_bytes(self.pem)

    @property
    def pem(self) -> bytes:
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def issue(
        self,
        name: str,
        folder: Path,
        *,
        client: bool = True,
        server: bool = True,
        organizations: Sequence[str] = (),
        san_dns: Sequence[str] = (),
        san_ip: Sequence[str] = (),
    ) -> Certificate:
        """Writes ``<name>.crt`` and ``<name>.key`` into folder. `name` becomes the common name and, for a
        server, the first DNS name."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name(
            [x509.NameAttribute(NameOID.ORGANIZATION_NAME, one) for one in organizations]
            + [x509.NameAttribute(NameOID.COMMON_NAME, name)]
        )
        purposes = [ExtendedKeyUsageOID.CLIENT_AUTH] * client + [ExtendedKeyUsageOID.SERVER_AUTH] * server
        builder = (
            _builder(subject, self._name, key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(sign_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
        )
        if server:
            names: list[x509.GeneralName] = [x509.DNSName(one) for one in dict.fromkeys((name, *san_dns))]
            names += [x509.IPAddress(ipaddress.ip_address(one)) for one in san_ip]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        folder.mkdir(parents=True, exist_ok=True)
        cert_file, key_file = folder / f"{name}.crt", folder / f"{name}.key"
        signed = builder.sign(self._key, hashes.SHA256())
        cert_file.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        write_private(key_file, private_pem(key))
        return Certificate(cert_file, key_file, self.ca_file)


def service_account_key(folder: Path) -> tuple[Path, Path]:
    """Writes the key pair that signs service-account tokens; returns (private, public)."""
    key = ec.generate_private_key(ec.SECP256R1())
    private, public = folder / "service-account.key", folder / "service-account.pub"
    write_private(private, private_pem(key))
    public.write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    return private, public


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def write_private(path: Path, data: bytes) -> None:
    """Writes a file that only its owner can read, from its first byte on."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as handle:
        os.fchmod(descriptor, 0o600)
        handle.write(data)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + LIFETIME)
    )


def _key_usage(*, sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        encipher_only=False,
        decipher_only=False,
    )
