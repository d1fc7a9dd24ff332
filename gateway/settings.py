"""Settings of the gateway: one frozen dataclass, read once from `BUSBAR_GATEWAY_*`.

Every field is one environment variable: `hold_timeout_s` is `BUSBAR_GATEWAY_HOLD_TIMEOUT_S`.
Unknown `BUSBAR_GATEWAY_*` names are refused, so that a misspelt limit does not silently mean "default".
Only the names that Kubernetes itself sets for a Service called `busbar-gateway` are passed over.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

from busbar.gateway.errors import SettingsError
from busbar.kube.contracts.auth import TOKEN_ROOT
from busbar.kube.contracts.keys import FRESH_S, STALE_S
from busbar.kube.contracts.usage import MAX_BATCH

PREFIX = "BUSBAR_GATEWAY_"
_SERVICE_LINK = re.compile(r"^BUSBAR_GATEWAY_(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_\d+_.*)?)$")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the gateway can be told. Units are in the names; `_s` is seconds."""

    public_address: str = "0.0.0.0:8080"
    """Where clients connect (OpenAI routes, /health, /ready)."""
    internal_address: str = "0.0.0.0:8091"
    """Where the operator reads /demand and Prometheus reads /metrics."""
    state_dir: Path = Path("/var/lib/busbar-gateway")
    """Last routes and the usage spool. Keep it on a disk that survives a restart."""

    operator_url: str = "http://busbar-operator:8090"
    operator_token_file: Path = TOKEN_ROOT / "operator" / "token"
    """Projected token, for the operator's audience; it rotates, so it is read again and again."""
    api_url: str = "http://busbar-api:8081"
    api_token_file: Path = TOKEN_ROOT / "api" / "token"
    """Projected token for the API's audience."""

    operator_subject: str = "system:serviceaccount:busbar-system:busbar-operator"
    """The only caller that may read /demand."""
    metrics_subjects: tuple[str, ...] = ()
    """Further callers that may read /metrics with one line per service (comma separated)."""

    key_cache_s: float = FRESH_S
    """How long a key look-up is believed."""
    key_stale_s: float = STALE_S
    """How long it is believed while the API cannot be reached."""
    key_negative_s: float = 5.0
    """How long "no such key" is believed."""
    key_cache_entries: int = 20_000

    hold_timeout_s: float = 300.0
    """Longest wait of a request for a ready replica (a cold start must fit in)."""
    hold_limit: int = 256
    """Requests that may wait per service."""
    hold_limit_per_key: int = 128
    """Requests of one key that may wait per service, so that one key cannot fill the room."""
    replica_in_flight: int = 128
    """Requests sent to one replica at a time; more of them wait here, where the order is fair."""
    max_requests: int = 2048
    """Requests in hand at a time, over all services."""

    attempts: int = 3
    """Replicas tried for one request before its first byte."""
    suspect_s: float = 1.0
    """A replica that failed is left out for this long, doubling up to `suspect_max_s`."""
    suspect_max_s: float = 30.0
    connect_timeout_s: float = 3.0
    first_byte_timeout_s: float = 600.0
    stream_idle_timeout_s: float = 120.0
    """Longest silence of an engine in mid-stream."""
    client_stall_s: float = 60.0
    """A client that reads nothing for this long is cut off."""
    request_body_mib: int = 8
    response_body_mib: int = 32
    event_kib: int = 1024
    """Largest single server-sent event."""

    usage_batch: int = 500
    """Usage records per delivery; the API takes at most 1,000."""
    usage_commit_s: float = 0.05
    """Finished requests are gathered this long for one fsync; until then they are in the mapped file."""
    usage_delivery_s: float = 1.0
    """Records are gathered this long for one delivery to the API."""
    usage_retry_max_s: float = 30.0
    spool_limit_mib: int = 1024
    """Undelivered usage on disk; when it is full, requests are refused rather than served uncounted."""
    spool_segment_mib: int = 4

    linger_s: float = 3.0
    """After SIGTERM: seconds in which /ready already says no but connections are still taken."""
    drain_s: float = 60.0
    """After that: seconds for running streams to end."""

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Settings:
        """Read settings; raises SettingsError for an unknown name or a value that does not parse."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        values: dict[str, object] = {}
        for key, text in environ.items():
            if not key.startswith(PREFIX) or _SERVICE_LINK.match(key):
                continue
            name = key.removeprefix(PREFIX).lower()
            if name not in fields:
                known = ", ".join(sorted(PREFIX + field.upper() for field in fields))
                raise SettingsError(f"{key}: no such setting. Known settings: {known}")
            values[name] = _parse(key, text, fields[name].default)
        settings = cls(**values)  # type: ignore[arg-type]
        settings._check()
        return settings

    def _check(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not isinstance(value, bool) and value < 0:
                raise SettingsError(f"{PREFIX}{field.name.upper()}={value}: must not be negative")
        for name in ("attempts", "hold_limit", "max_requests", "replica_in_flight", "usage_batch"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{PREFIX}{name.upper()}: must be at least 1")
        if self.usage_batch > MAX_BATCH:
            raise SettingsError(f"{PREFIX}USAGE_BATCH: must be at most {MAX_BATCH}")
        for name in ("public_address", "internal_address"):
            address(getattr(self, name), PREFIX + name.upper())


def address(text: str, where: str = "address") -> tuple[str, int]:
    """Split `host:port`; raises SettingsError. Port 0 means any free port."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise SettingsError(f"{where}={text!r}: write it as host:port, for example 0.0.0.0:8080")
    return host, int(port)


def _parse(key: str, text: str, default: object) -> object:
    try:
        if isinstance(default, int):
            return int(text)
        if isinstance(default, float):
            return float(text)
    except ValueError as error:
        raise SettingsError(f"{key}={text!r}: not a number") from error
    if isinstance(default, Path):
        return Path(text)
    if isinstance(default, tuple):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if text == "":
        raise SettingsError(f"{key} is empty; leave it out to get the default {default!r}")
    return text
