"""API tokens, and the gateway's look-up of one at the API.

A token is `bb_` and 43 URL-safe characters (32 random bytes), shown once. Only its SHA-256 and its first ten
characters are stored. The gateway sends the digest, never the token, and caches the answer: 60 s, and up to 1 h
only while the API cannot be reached.
"""

import hashlib
import re
import secrets
from datetime import datetime

from pydantic import Field

from busbar.kube.contracts.allowances import Account
from busbar.kube.contracts.wire import WireModel

PATH = "/internal/keys/lookup"
TOKEN_PREFIX = "bb_"
SHOWN_PREFIX_LENGTH = 10
FRESH_S = 60.0
STALE_S = 3600.0
SCOPE_INFERENCE = "inference"
SCOPE_API = "api"
_TOKEN = re.compile(r"^bb_[A-Za-z0-9_-]{43}$")


class KeyLookup(WireModel):
    """POST body."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    gateway: str = Field(default="", max_length=253)
    """Who asks, by the name under which it delivers usage."""


class KeyIdentity(WireModel):
    """The owner of the token and its rights."""

    key_id: str
    subject: str
    tenant: str
    namespaces: list[str] = Field(default_factory=list)
    scopes: list[str] = Field(default_factory=list)
    expires_at: datetime | None = None
    accounts: list[Account] = Field(default_factory=list)
    """Of the key and of its tenant, as far as they have limits."""
    counted_through: int = 0
    """The accounts' costs contain the asking gateway's usage records up to this number."""


def new_token() -> str:
    """A new token; show it once and store `digest_of` it."""
    return TOKEN_PREFIX + secrets.token_urlsafe(32)


def is_token(text: str) -> bool:
    """Whether the text has a token's form."""
    return _TOKEN.fullmatch(text) is not None


def digest_of(token: str) -> str:
    """SHA-256 of the whole token in hex, which is stored and looked up."""
    return hashlib.sha256(token.encode()).hexdigest()


def shown_prefix_of(token: str) -> str:
    """The part of the token that lists may show."""
    return token[:SHOWN_PREFIX_LENGTH]
