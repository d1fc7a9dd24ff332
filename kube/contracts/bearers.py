"""The bearers of a workload's port: which role may call which path, and how each side gets its bearer.

The port has three roles, each with a bearer that is valid for no other:

    read      GET /status, /metrics and all paths not listed below    the operator's polls
    infer     /v1/…, /resume, /tokenize, /detokenize, and what         the gateway, the one API key of vLLM and SGLang, and
              is below /migrate                                        what replicas of one service tell each other
    command   POST /checkpoint, /drain, /sleep, /wake_up,              the operator's commands
              /kv_shares, /adapters, /migrate, loading and unloading
              adapters

Inference has its own bearer because the gateway keeps its routes on disk and vLLM may print its key: neither leak must
allow stopping a replica. (An SGLang takes its one key for its own commands, too, and tells it to whoever has it, so a second one
would part nothing.) Streams are sent from replica to replica with it too, because the gateway names the address to
which one goes: whoever could make a replica send to an address of its own gets no bearer that it does not have. Each bearer is derived from the chart's key and the object's uid, so the owner of the key
needs no look-up, and a bearer is invalid at any other object. In the cluster they are in one Secret for each object,
made by the operator and mounted as files, one file for each role: a caller who may read pods, logs or events learns
none. The Secret's name contains the uid and a fingerprint of the key, so a pod's spec shows with which key it was
made, and another key means another Secret. While the key is rotated, the former one is valid at the pods that were made
under it (`key_of`).
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path

SECRET_TYPE = "busbar.dev/bearers"
SECRET_PREFIX = "busbar-bearers-"
VOLUME = "busbar-bearers"
FOLDER = "/var/run/secrets/busbar"
FOLDER_ENV = "BUSBAR_BEARERS_DIR"


class Role(StrEnum):
    """A role at the port; also the name of the file with its bearer."""

    READ = "read"
    INFER = "infer"
    COMMAND = "command"


Bearers = Mapping[Role, str]

_OPEN = frozenset({"/health", "/ready"})
_COMMANDS = frozenset({"/adapters", "/checkpoint", "/drain", "/kv_shares", "/migrate", "/sleep", "/wake_up"})
_COMMANDS |= {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
_INFERENCE = frozenset({"/resume", "/tokenize", "/detokenize"})


def role_of(path: str) -> Role | None:
    """The role whose bearer a path requires; None for the kubelet's probes, which need none."""
    if path in _OPEN:
        return None
    if path in _COMMANDS:
        return Role.COMMAND
    return Role.INFER if path.startswith(("/v1/", "/migrate/")) or path in _INFERENCE else Role.READ


def bearer_for(key: bytes, uid: str, role: Role) -> str:
    """The bearer of one role at the pods of the object with this uid: HMAC-SHA256 in hex."""
    return _derived(key, f"{role}:{uid}")


def former_bearer_for(key: bytes, uid: str) -> str:
    """The one bearer of a pod made by a release without roles, which has it in its environment."""
    return _derived(key, uid)


def secret_name(key: bytes, uid: str) -> str:
    """The Secret with the bearers of the object with this uid: at most 60 characters.

    It is immutable, so its content must follow from the key and the object alone; a release with other content needs
    another name.
    """
    return f"{SECRET_PREFIX}{uid}-{_derived(key, 'fingerprint')[:8]}"


def key_of(secret: str, uid: str, keys: Iterable[bytes]) -> bytes | None:
    """The key under which a pod that mounts this Secret of the object with this uid was made; None: none of these."""
    return next((key for key in keys if secret_name(key, uid) == secret), None)


def bearers_in(folder: str | Path) -> dict[Role, str]:
    """The bearers in a mounted folder. A role without a file has none: nobody may call its paths.

    Raises:
        OSError: a file exists and cannot be read.
    """
    found: dict[Role, str] = {}
    for role in Role:
        file = Path(folder) / role
        if file.is_file() and (text := file.read_text().strip()):
            found[role] = text
    return found


def one_for_all(token: str) -> dict[Role, str]:
    """Outside a cluster: one bearer for every path."""
    return dict.fromkeys(Role, token)


def is_allowed(path: str, header: str | None, bearers: Bearers) -> bool:
    """Whether an Authorization header is valid for this path; the comparison takes constant time."""
    role = role_of(path)
    if role is None:
        return True
    bearer = bearers.get(role, "")
    scheme, _, given = (header or "").partition(" ")
    same = hmac.compare_digest(given.strip().encode(errors="surrogateescape"), bearer.encode())
    return bool(bearer) and scheme.lower() == "bearer" and same


def _derived(key: bytes, text: str) -> str:
    if len(key) < 16:
        raise ValueError(
            "the workload key has fewer than 16 bytes; the chart's Secret busbar-workload-key is damaged"
        )
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
