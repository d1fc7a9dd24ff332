"""Key pairs for leases, the same in every run: KEY with its CERTIFICATE, and another one's key."""

from __future__ import annotations

from datetime import UTC, datetime

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

_NAME = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "busbar-operator")])


def _key(seed: int) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32)


def _pem(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _certificate(key: Ed25519PrivateKey) -> bytes:
    made = x509.CertificateBuilder().subject_name(_NAME).issuer_name(_NAME).public_key(key.public_key())
    made = made.serial_number(1).not_valid_before(datetime(2026, 1, 1, tzinfo=UTC))
    made = made.not_valid_after(datetime(2126, 1, 1, tzinfo=UTC))
    return made.sign(key, None).public_bytes(Encoding.PEM)


KEY = _pem(_key(1))
CERTIFICATE = _certificate(_key(1))
ANOTHER_KEY = _pem(_key(2))
