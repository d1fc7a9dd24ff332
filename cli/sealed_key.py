"""The workload key in a backup: AES-256-GCM under a key that scrypt makes of a passphrase."""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from busbar.cli.errors import BusbarError, UsageProblem

MIN_PASSPHRASE_CHARS = 12
N, R, P = 2**17, 8, 1
"""Cost of scrypt: 128 MiB and about half a second for each try."""
_ABOUT = b"busbar workload key"
_MISSING = "a sealed workload key needs the Python package cryptography: pip install 'busbar[local]'"


def read_passphrase(file: str) -> str:
    """The first line of the file. Raises UsageProblem for one that cannot be read or is short."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageProblem(f"{file}: {getattr(error, 'strerror', None) or error}") from error
    passphrase = lines[0] if lines else ""
    if len(passphrase) < MIN_PASSPHRASE_CHARS:
        raise UsageProblem(
            f"{file}: a passphrase has at least {MIN_PASSPHRASE_CHARS} characters on its first line"
        )
    return passphrase


def seal(data: Mapping[str, str], passphrase: str) -> dict[str, Any]:
    """A Secret's data, sealed."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ModuleNotFoundError as error:
        raise UsageProblem(_MISSING) from error
    salt, nonce = secrets.token_bytes(16), secrets.token_bytes(12)
    text = json.dumps(dict(data)).encode()
    sealed = AESGCM(_derived(passphrase, salt, N, R, P)).encrypt(nonce, text, _ABOUT)
    found = {"salt": salt, "nonce": nonce, "sealed": sealed}
    coded = {name: base64.b64encode(value).decode() for name, value in found.items()}
    return {"kdf": "scrypt", "n": N, "r": R, "p": P, "cipher": "AES-256-GCM", **coded}


def unseal(document: Mapping[str, Any], passphrase: str) -> dict[str, str]:
    """The Secret's data. Raises BusbarError for another passphrase or a damaged key."""
    try:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ModuleNotFoundError as error:
        raise UsageProblem(_MISSING) from error
    try:
        if (document["kdf"], document["n"], document["r"], document["p"]) != ("scrypt", N, R, P):
            raise ValueError("other costs")
        salt, nonce, sealed = (
            base64.b64decode(document[name], validate=True) for name in ("salt", "nonce", "sealed")
        )
        found = json.loads(AESGCM(_derived(passphrase, salt, N, R, P)).decrypt(nonce, sealed, _ABOUT))
    except InvalidTag as error:
        raise BusbarError(
            "the workload key cannot be opened: this is not the passphrase it was sealed with"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise BusbarError("the sealed workload key is not readable by this version") from error
    return {str(name): str(value) for name, value in found.items()}


def _derived(passphrase: str, salt: bytes, n: int, r: int, p: int) -> bytes:
    from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

    return Scrypt(salt=salt, length=32, n=n, r=r, p=p).derive(passphrase.encode())
