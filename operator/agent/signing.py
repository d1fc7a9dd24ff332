"""Signatures of leases (Ed25519): the operator has the private key, agents only the certificate.

Every agent has the key of the bearers, so a bearer does not prove that the operator has sent a message. The signature is
of the whole body, which names node, start and sequence: sent again, or to another agent, it is refused.
"""

from __future__ import annotations

import base64
import binascii

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509 import load_pem_x509_certificate


class Signer:
    """The operator's side."""

    def __init__(self, pem: bytes) -> None:
        """Raises ValueError where it is no private key of this kind."""
        key = load_pem_private_key(pem, password=None)
        if not isinstance(key, Ed25519PrivateKey):
            raise ValueError("the key of leases is not an Ed25519 key")
        self._key = key

    def sign(self, body: bytes) -> str:
        return base64.b64encode(self._key.sign(body)).decode()


class Verifier:
    """The agent's side."""

    def __init__(self, pem: bytes) -> None:
        """Raises ValueError where it is no certificate of this kind of key. When it ends does not matter: there is no
        third party to ask, and the chart replaces it."""
        key = load_pem_x509_certificate(pem).public_key()
        if not isinstance(key, Ed25519PublicKey):
            raise ValueError("the certificate of leases is not of an Ed25519 key")
        self._key = key

    def is_signed(self, body: bytes, signature: str) -> bool:
        try:
            self._key.verify(base64.b64decode(signature, validate=True), body)
        except (InvalidSignature, binascii.Error, ValueError):
            return False
        return True
