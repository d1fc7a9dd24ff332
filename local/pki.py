"""Keys and certificates of one instance: three authorities, and a kubeconfig per program.

``cluster`` signs the API server, the kubelet and every client; ``etcd`` its server and its client; ``front-proxy``
the API server's aggregation client.  All are in ``<data>/pki``. A certificate that is valid for another month and
names the right addresses is kept, so that a restart changes nothing.
"""

from __future__ import annotations

import base64
import datetime
import json
import os
from dataclasses import dataclass
from ipaddress import IPv4Address, ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from busbar.local.errors import StartError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

LIFE = datetime.timedelta(days=3650)
RENEW_BEFORE = datetime.timedelta(days=30)


@dataclass(frozen=True)
class Certificate:
    """The content of one certificate; ``authority`` is the file stem of its signer, empty for an authority."""

    file: str
    authority: str
    common_name: str
    organisation: str = ""
    names: tuple[str, ...] = ()  # DNS names and addresses; not empty for a server certificate


class Authority:
    """The certificates of one folder."""

    def __init__(self, folder: Path) -> None:
        try:
            import cryptography  # noqa: F401
        except ImportError as error:
            raise StartError(
                "the Python package `cryptography` is missing: pip install 'busbar[local]'"
            ) from error
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def path(self, file: str) -> Path:
        """A file of the folder, e.g. ``cluster.crt``."""
        return self.folder / file

    def key_pair(self, file: str) -> None:
        """A bare key and its public half (for service-account tokens)."""
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        if not self.path(f"{file}.pub").exists():
            public = self._new_key(file).public_key()
            pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
            self.path(f"{file}.pub").write_bytes(pem)

    def ensure(self, wanted: Certificate) -> None:
        """Make the certificate unless a valid one exists."""
        if not self._good(wanted):
            self._make(wanted)

    def _good(self, wanted: Certificate) -> bool:
        from cryptography import x509
        from cryptography.x509.oid import ExtensionOID

        try:
            found = x509.load_pem_x509_certificate(self.path(f"{wanted.file}.crt").read_bytes())
        except (OSError, ValueError):
            return False
        now = datetime.datetime.now(datetime.UTC)
        if found.not_valid_after_utc - now < RENEW_BEFORE or found.subject != _subject(wanted):
            return False
        if not self._belongs(found, wanted):
            return False
        if not wanted.names:
            return True
        extension = found.extensions.get_extension_for_oid(ExtensionOID.SUBJECT_ALTERNATIVE_NAME).value
        assert isinstance(extension, x509.SubjectAlternativeName)
        return {str(name.value) for name in extension} == set(wanted.names)

    def _belongs(self, found: x509.Certificate, wanted: Certificate) -> bool:
        """Whether its key exists and its authority is the current one (an incomplete authority was made again)."""
        from cryptography import x509
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            key = load_pem_private_key(self.path(f"{wanted.file}.key").read_bytes(), None)
            if wanted.authority:
                signer = self.path(f"{wanted.authority}.crt").read_bytes()
                found.verify_directly_issued_by(x509.load_pem_x509_certificate(signer))
        except (OSError, ValueError, TypeError, InvalidSignature):
            return False
        return key.public_key() == found.public_key()

    def _new_key(self, file: str) -> EllipticCurvePrivateKey:
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

        key = ec.generate_private_key(ec.SECP256R1())
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
        descriptor = os.open(self.path(f"{file}.key"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as handle:
            handle.write(pem)
        return key

    def _make(self, wanted: Certificate) -> None:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID

        key = self._new_key(wanted.file)
        signer_name, signer_key = _subject(wanted), key
        if wanted.authority:
            signer = x509.load_pem_x509_certificate(self.path(f"{wanted.authority}.crt").read_bytes())
            pem = self.path(f"{wanted.authority}.key").read_bytes()
            loaded = serialization.load_pem_private_key(pem, None)
            assert isinstance(loaded, ec.EllipticCurvePrivateKey)
            signer_name, signer_key = signer.subject, loaded
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(_subject(wanted))
            .issuer_name(signer_name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + LIFE)
            .add_extension(x509.BasicConstraints(ca=not wanted.authority, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(signer_key.public_key()), critical=False
            )
        )
        if wanted.authority:
            uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
            if wanted.names:
                uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
                builder = builder.add_extension(_alternative_names(wanted.names), critical=False)
            builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        builder = builder.add_extension(_key_usage(authority=not wanted.authority), critical=True)
        made = builder.sign(signer_key, hashes.SHA256())
        self.path(f"{wanted.file}.crt").write_bytes(made.public_bytes(serialization.Encoding.PEM))

    def kubeconfig(self, file: str, url: str, target: Path, name: str) -> None:
        """Write a kubeconfig with the certificate ``file``."""

        def embedded(source: str) -> str:
            return base64.b64encode(self.path(source).read_bytes()).decode()

        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": name,
            "clusters": [
                {
                    "name": name,
                    "cluster": {"server": url, "certificate-authority-data": embedded("cluster.crt")},
                }
            ],
            "users": [
                {
                    "name": name,
                    "user": {
                        "client-certificate-data": embedded(f"{file}.crt"),
                        "client-key-data": embedded(f"{file}.key"),
                    },
                }
            ],
            "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
        }
        text = json.dumps(content, indent=2) + "\n"  # JSON is YAML
        if not target.exists() or target.read_text() != text:
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w") as handle:
                handle.write(text)


def _subject(wanted: Certificate) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    parts = [x509.NameAttribute(NameOID.COMMON_NAME, wanted.common_name)]
    if wanted.organisation:
        parts.insert(0, x509.NameAttribute(NameOID.ORGANIZATION_NAME, wanted.organisation))
    return x509.Name(parts)


def _alternative_names(names: tuple[str, ...]) -> x509.SubjectAlternativeName:
    from cryptography import x509

    def one(name: str) -> x509.GeneralName:
        try:
            return x509.IPAddress(IPv4Address(str(ip_address(name))))
        except ValueError:
            return x509.DNSName(name)

    return x509.SubjectAlternativeName([one(name) for name in names])


def _key_usage(*, authority: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=not authority,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )
