"""Settings of the API process, read once from `BUSBAR_API_*` at the edge.

A variable that is not listed here is refused (a typing error must not silently fall back to a default),
and so is a session secret that is missing, short, or looks like an example. Secrets come as files, so that
they never stand in a process's environment listing; each `*_FILE` variable names one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from busbar.api.errors import SettingsError

PREFIX = "BUSBAR_API_"
MIN_SECRET_CHARS = 32
_DEFAULT_SECRETS = ("changeme", "secret", "default", "example", "password", "insecure")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


@dataclass(frozen=True, slots=True)
class Oidc:
    """Optional login through an OpenID Connect provider (authorization code with PKCE and nonce)."""

    issuer: str
    client_id: str
    client_secret: str = field(repr=False)
    groups_claim: str = "groups"
    """Claim that lists a person's groups; they are matched with `Tenant.spec.members` of kind Group."""
    username_claim: str = "email"
    """Claim that becomes the subject; it must be the name that `Tenant.spec.members` uses."""
    admin_group: str = ""
    """Members of this group are admins; empty: nobody becomes one by OIDC."""


@dataclass(frozen=True, slots=True)
class Settings:
    """One field per variable; the field's name in capitals after `BUSBAR_API_` is the variable."""

    session_secret: str = field(repr=False)
    """Signs CSRF tokens and the OIDC state cookie. From SESSION_SECRET_FILE, at least 32 characters."""
    database_url: str = "sqlite+aiosqlite:////var/lib/busbar/api.db"
    """SQLite for one replica, or `postgresql+asyncpg://user:password@host/name` (also by DATABASE_URL_FILE)."""
    host: str = "0.0.0.0"
    port: int = 8080
    """REST and the portal."""
    internal_port: int = 8081
    """Key look-ups and usage; only the gateway's service account may call it."""
    operator_url: str = "http://busbar-operator:8090"
    operator_token_file: str = "/var/run/secrets/busbar/operator/token"
    """Projected service account token with the audience `busbar-operator`; read anew on each use."""
    gateway_url: str = "http://busbar-gateway:8080"
    """Where the portal's try-it box sends completions, from inside the cluster."""
    public_gateway_url: str = ""
    """The gateway's address as people reach it; shown in the portal. Empty: `gateway_url`."""
    public_url: str = ""
    """The portal's own address as people reach it; needed for OIDC redirects behind a proxy."""
    gateway_subject: str = "system:serviceaccount:busbar-system:busbar-gateway"
    """The one Kubernetes subject that may call the internal port."""
    secure_cookies: bool = False
    """Set where the portal is served over TLS; cookies then carry the Secure attribute."""
    session_hours: float = 12.0
    """How long a browser session lasts."""
    history_days: float = 90.0
    """How long finished jobs, their samples and audit rows are kept."""
    kubeconfig: str = ""
    """Empty: the pod's own service account."""
    objective: str = "fairness"
    """The operator's objective: previews are planned as it plans."""
    usage_half_life_s: float = 7 * 86400.0
    """The operator's half-life of past use; likewise."""
    guarantee_reclaim_s: float = 300.0
    """The operator's deadline for taking back a guarantee; likewise."""
    log_level: str = "info"
    oidc: Oidc | None = None

    @property
    def shown_gateway_url(self) -> str:
        return (self.public_gateway_url or self.gateway_url).rstrip("/")


_OIDC_KEYS = {
    "OIDC_ISSUER": "issuer",
    "OIDC_CLIENT_ID": "client_id",
    "OIDC_CLIENT_SECRET_FILE": "client_secret",
    "OIDC_GROUPS_CLAIM": "groups_claim",
    "OIDC_USERNAME_CLAIM": "username_claim",
    "OIDC_ADMIN_GROUP": "admin_group",
}
_FILE_KEYS = {"SESSION_SECRET_FILE": "session_secret", "DATABASE_URL_FILE": "database_url"}


def load(environ: Mapping[str, str], *, needs_secret: bool = True) -> Settings:
    """Settings from the environment.

    Args:
        environ: usually `os.environ`.
        needs_secret: False for commands that never serve (`migrate`, `token`), which need no session secret.

    Raises:
        SettingsError: unknown or malformed variables, a missing file, or an unsafe secret.
    """
    given = {key.removeprefix(PREFIX): value for key, value in environ.items() if key.startswith(PREFIX)}
    kinds = {f.name: f.type for f in fields(Settings) if f.name not in ("session_secret", "oidc")}
    known = {name.upper() for name in kinds} | set(_OIDC_KEYS) | set(_FILE_KEYS)
    if unknown := sorted(set(given) - known):
        names = ", ".join(PREFIX + key for key in unknown)
        raise SettingsError(
            f"unknown setting {names}; remove it or correct its name (known: {', '.join(sorted(known))})"
        )

    values: dict[str, object] = {}
    for key, text in given.items():
        name = key.lower()
        if name in kinds:
            values[name] = _convert(key, text, str(kinds[name]))
    for key, name in _FILE_KEYS.items():
        if key in given:
            values[name] = _read(key, given[key])
    if "session_secret" in values:
        _check_secret("SESSION_SECRET_FILE", str(values["session_secret"]))
    elif needs_secret:
        raise SettingsError(
            f"{PREFIX}SESSION_SECRET_FILE is not set; point it at a file with a random secret"
        )
    else:
        values["session_secret"] = ""
    values["oidc"] = _oidc(given)
    return Settings(**values)  # type: ignore[arg-type]  # converted per field type above


def _oidc(given: Mapping[str, str]) -> Oidc | None:
    values = {name: given[key] for key, name in _OIDC_KEYS.items() if key in given}
    if not any(values.values()):
        return None
    for key in ("OIDC_ISSUER", "OIDC_CLIENT_ID", "OIDC_CLIENT_SECRET_FILE"):
        if not given.get(key):
            raise SettingsError(
                f"{PREFIX}{key} is missing; OIDC login needs issuer, client id and client secret file"
            )
    values["client_secret"] = _read("OIDC_CLIENT_SECRET_FILE", given["OIDC_CLIENT_SECRET_FILE"])
    return Oidc(**values)


def _read(key: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise SettingsError(f"{PREFIX}{key}: cannot read {path}: {error.strerror}") from error


def _check_secret(key: str, secret: str) -> None:
    if len(secret) < MIN_SECRET_CHARS:
        raise SettingsError(
            f"{PREFIX}{key}: the secret has {len(secret)} characters, it needs {MIN_SECRET_CHARS}"
        )
    if len(set(secret)) < 8 or any(secret.lower().startswith(word) for word in _DEFAULT_SECRETS):
        raise SettingsError(
            f"{PREFIX}{key}: the secret looks like a default; make one with `openssl rand -hex 32`"
        )


def _convert(key: str, text: str, kind: str) -> object:
    try:
        if kind == "int":
            return int(text)
        if kind == "float":
            return float(text)
    except ValueError as error:
        raise SettingsError(f"{PREFIX}{key}={text!r} is not a number") from error
    if kind == "bool":
        if text.lower() in _TRUE:
            return True
        if text.lower() in _FALSE:
            return False
        raise SettingsError(f"{PREFIX}{key}={text!r} is neither true nor false")
    return text
