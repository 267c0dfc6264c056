"""A self-signed certificate for TLS in the local network, kept until it expires or the addresses change.

It is made with the library ``cryptography``: the standard library cannot sign, and the program openssl differs between
systems.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from omni_ws.config.values import literal_address
from omni_ws.tools.opening import (
    read_private,
    write_private,
)

#: Browsers refuse certificates that are valid for longer than 398 days.
VALIDITY: Final = timedelta(days=397)
#: A certificate that expires sooner than this is replaced at the start of the server.
REMAINING: Final = timedelta(days=7)
#: The start of validity lies this far in the past, as the clocks of phones may be slow.
BACKDATED: Final = timedelta(days=1)


def kept_certificate(path: Path, names: Sequence[str], *, now: datetime | None = None) -> str:
    """Return the SHA-256 fingerprint of the certificate in ``path``, a PEM file that also contains the private key.

    The certificate is replaced if it is missing, readable for other users, broken, about to expire, or not valid for
    all of ``names``, which are addresses and host names. Raises OSError.
    """
    now = now or datetime.now(UTC)
    content = read_private(path)
    certificate = None if content is None else _parsed(content)
    if certificate is None or not _is_good(certificate, names, now):
        content = _made(names, now)
        write_private(path, content)
        certificate = x509.load_pem_x509_certificate(content)
    return certificate.fingerprint(hashes.SHA256()).hex(":").upper()


def _parsed(content: bytes) -> x509.Certificate | None:
    try:
        serialization.load_pem_private_key(content, None)
        return x509.load_pem_x509_certificate(content)
    except ValueError:
        return None


def _is_good(certificate: x509.Certificate, names: Sequence[str], now: datetime) -> bool:
    """Return whether a certificate that this module made can still be used."""
    own = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    in_time = certificate.not_valid_before_utc <= now < certificate.not_valid_after_utc - REMAINING
    return in_time and set(_general_names(names)) <= set(own)


def _made(names: Sequence[str], now: datetime) -> bytes:
    """Make a self-signed certificate and its key, as PEM.

    The certificate cannot sign others, so who trusts it trusts only this server.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "omni_ws")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now - BACKDATED + VALIDITY)
        .add_extension(x509.SubjectAlternativeName(_general_names(names)), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.public_bytes(serialization.Encoding.PEM) + private


def _general_names(names: Sequence[str]) -> list[x509.GeneralName]:
    return [
        x509.DNSName(name) if (address := literal_address(name)) is None else x509.IPAddress(address) for name in names
    ]
