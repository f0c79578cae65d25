"""Certificates for NATS and etcd, signed by an authority of KVBM's own.

With a PKI of your own, use its certificates instead: only the files' names matter. Keys are of the
curve P-256. A run leaves certificates that are there; one that is deleted is made again.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from kvbm_common.access.secret_files import write_secret

AUTHORITY_DAYS = 3_650
CERTIFICATE_DAYS = 825
BACKDATED = timedelta(hours=1)
"""Clocks differ: a certificate is good from a little before it was made."""


class Authority:
    """A key and a certificate that sign others: kept in a directory, made at the first use."""

    def __init__(self, directory: Path) -> None:
        self._certificate_path = directory / "ca.pem"
        key_path = directory / "ca.key"
        if not key_path.exists():
            key = ec.generate_private_key(ec.SECP256R1())
            certificate = _signed(
                _builder("KVBM authority", key.public_key(), days=AUTHORITY_DAYS),
                issuer=_named("KVBM authority"), key=key, is_authority=True,
            )  # fmt: skip
            write_secret(key_path, _pem_of_key(key))
            write_secret(self._certificate_path, _pem(certificate))
        loaded = serialization.load_pem_private_key(key_path.read_bytes(), None)
        assert isinstance(loaded, ec.EllipticCurvePrivateKey)
        self._key = loaded
        self._certificate = x509.load_pem_x509_certificate(self._certificate_path.read_bytes())

    @property
    def text(self) -> str:
        """The authority's certificate, for who is to trust it."""
        return self._certificate_path.read_text()

    def give(self, directory: Path, stem: str, common_name: str, names: Sequence[str] = ()) -> None:
        """Write STEM.pem and STEM.key of a new key, unless they are there.

        With names or addresses it is for a server, too.
        """
        certificate_path, key_path = directory / f"{stem}.pem", directory / f"{stem}.key"
        if certificate_path.exists() and key_path.exists():
            return
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(common_name, key.public_key(), days=CERTIFICATE_DAYS)
        if names:
            alternatives = x509.SubjectAlternativeName([_alternative(name) for name in names])
            builder = builder.add_extension(alternatives, critical=False)
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if names:
            uses.insert(0, ExtendedKeyUsageOID.SERVER_AUTH)
        builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        certificate = _signed(
            builder, issuer=self._certificate.subject, key=self._key, is_authority=False
        )
        write_secret(key_path, _pem_of_key(key))
        write_secret(certificate_path, _pem(certificate))


def _builder(
    common_name: str, key: ec.EllipticCurvePublicKey, *, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_named(common_name))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + timedelta(days=days))
    )


def _signed(
    builder: x509.CertificateBuilder,
    *,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    is_authority: bool,
) -> x509.Certificate:
    constraints = x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None)
    usage = x509.KeyUsage(
        digital_signature=True, key_cert_sign=is_authority, crl_sign=is_authority,
        content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())
    return (
        builder.issuer_name(issuer)
        .add_extension(constraints, critical=True)
        .add_extension(usage, critical=True)
        .add_extension(identifier, critical=False)
        .sign(key, hashes.SHA256())
    )


def _named(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _pem_of_key(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ).decode()
