"""Settings of the API process: frozen, read once from `BUSBAR_API_*` by the rules of `busbar.kube.settings`.

A session secret that is missing, short, or looks like an example is refused. Secrets are read from files, so that they
never appear in a process's environment; each `*_FILE` variable names one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from busbar.kube import settings
from busbar.kube.settings import Count, Filled, LogFormat, LogLevel, Port, Positive, Rule, setting

PREFIX = "BUSBAR_API_"
MIN_SECRET_CHARS = 32
_DEFAULT_SECRETS = ("changeme", "secret", "default", "example", "password", "insecure")


def _is_strong(secret: str) -> bool:
    varied = len(set(secret)) >= 8
    return varied and not any(secret.lower().startswith(word) for word in _DEFAULT_SECRETS)


Secret = Annotated[
    str,
    Rule(f"a secret of {MIN_SECRET_CHARS} characters or more", lambda s: len(s) >= MIN_SECRET_CHARS),
    Rule("a random secret, not a default; make one with `openssl rand -hex 32`", _is_strong),
]


@dataclass(frozen=True, slots=True)
class Oidc:
    """Optional login through an OpenID Connect provider (authorization code with PKCE and nonce)."""

    issuer: Filled
    client_id: Filled
    client_secret: str = setting(own=False, file=PREFIX + "OIDC_CLIENT_SECRET_FILE", secret=True)
    groups_claim: str = "groups"
    """Claim that lists a person's groups; they are matched with `Tenant.spec.members` of kind Group."""
    username_claim: str = "email"
    """Claim that becomes the subject; it must be the name that `Tenant.spec.members` uses."""
    admin_group: str = ""
    """Members of this group are admins; empty: nobody becomes one by OIDC."""


@dataclass(frozen=True, slots=True)
class Settings:
    """One field per variable; the field's name in capitals after `BUSBAR_API_` is the variable."""

    session_secret: Secret = setting(own=False, file=PREFIX + "SESSION_SECRET_FILE", secret=True)
    """Signs CSRF tokens and the OIDC state cookie. From SESSION_SECRET_FILE, at least 32 characters."""
    database_url: str = setting(
        "sqlite+aiosqlite:////var/lib/busbar/api.db", file=PREFIX + "DATABASE_URL_FILE", secret=True
    )
    """SQLite for one replica, or `postgresql+asyncpg://user:password@host/name` (also by DATABASE_URL_FILE)."""
    host: str = "0.0.0.0"
    port: Port = 8080
    """REST and the portal."""
    internal_port: Port = 8081
    """Key look-ups and usage; only the gateway's service account may call it."""
    operator_url: str = "http://busbar-operator:8090"
    operator_token_file: str = "/var/run/secrets/busbar/operator/token"
    """Projected service account token with the audience `busbar-operator`; a renewed one is used within seconds."""
    gateway_url: str = "http://busbar-gateway:8080"
    """Where the portal's try-it box sends completions, from inside the cluster."""
    public_gateway_url: str = ""
    """The gateway's address as people reach it; shown in the portal. Empty: `gateway_url`."""
    public_url: str = ""
    """The portal's own address as people reach it; needed for OIDC redirects behind a proxy."""
    gateway_subject: str = "system:serviceaccount:busbar-system:busbar-gateway"
    """The one Kubernetes subject that may call the internal port."""
    secure_cookies: bool = False
    """Says that every browser reaches the portal over TLS, which `public_url` with https says as well. Cookies are
    then Secure and answers carry HSTS; else where the request itself, or a trusted proxy, says https."""
    header_timeout_s: float = 10.0
    """Longest time for a request's head to arrive, from the opening of its connection."""
    body_timeout_s: float = 30.0
    """Longest time for a request's body (at most 1 MiB) to arrive, from the end of its head."""
    session_hours: float = 12.0
    """How long a browser session lasts."""
    tokens_per_person: Count = 50
    """Live tokens that one person may have at a time."""
    token_days: Positive = 90.0
    """Lifetime of a new token for which none was asked."""
    token_max_days: Positive = 365.0
    """The longest lifetime that may be asked for."""
    token_creations_per_minute: Count = 30
    """Tokens that one person, and one address, may make in a minute."""
    logins_per_minute: Count = 30
    """Logins of one person, and wrong logins from one address, that are taken in a minute; and as many wrong bearers at
    REST, counted apart."""
    trusted_proxies: str = ""
    """Addresses and networks, by commas, whose X-Forwarded-For and X-Forwarded-Proto are believed."""
    history_days: float = 90.0
    """How long finished jobs, their samples and audit rows are kept."""
    kubeconfig: str = ""
    """Empty: the pod's own service account."""
    log_format: LogFormat = setting("json", shared="BUSBAR_LOG_FORMAT")
    log_level: LogLevel = "info"
    oidc: Oidc | None = None

    @property
    def shown_gateway_url(self) -> str:
        return (self.public_gateway_url or self.gateway_url).rstrip("/")


def load(environ: Mapping[str, str], *, needs_secret: bool = True) -> Settings:
    """Settings from the environment.

    Args:
        environ: usually `os.environ`.
        needs_secret: False for commands that never serve (`migrate`, `token`), which need no session secret.

    Raises:
        SettingsError: names every variable that is unknown, missing or wrong.
    """
    return settings.load(Settings, PREFIX, environ, defaults={} if needs_secret else {"session_secret": ""})
