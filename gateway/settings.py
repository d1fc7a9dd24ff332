"""Settings of the gateway: frozen, read once from `BUSBAR_GATEWAY_*` by the rules of `busbar.kube.settings`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from busbar.kube import settings
from busbar.kube.contracts.auth import TOKEN_ROOT
from busbar.kube.contracts.batches import MOST_HELD
from busbar.kube.contracts.keys import FRESH_S, STALE_S
from busbar.kube.contracts.request_size import REQUEST_MIB, RESUME_TOKENS
from busbar.kube.contracts.usage import MAX_BATCH
from busbar.kube.settings import Count, Filled, LogFormat, LogLevel, Rule, setting
from busbar.scheduler.autoscale.contacts import PROBE_AFTER_S, PROBE_TIMEOUT_S

PREFIX = "BUSBAR_GATEWAY_"


def _is_address(text: str) -> bool:
    try:
        address(text)
    except ValueError:
        return False
    return True


Address = Annotated[str, Rule("host:port, for example 0.0.0.0:8080", _is_address)]
BodyMib = Annotated[
    int, Rule(f"1 to {REQUEST_MIB}, which is what an engine takes", lambda n: 1 <= n <= REQUEST_MIB)
]
ResumeTokens = Annotated[int, Rule(f"0 to {RESUME_TOKENS:,}", lambda n: n <= RESUME_TOKENS)]
BatchLines = Annotated[int, Rule(f"0 to {MOST_HELD}", lambda n: 0 <= n <= MOST_HELD)]
Replicas = Annotated[int, Rule("1 to 1,000", lambda n: 1 <= n <= 1000)]
Batch = Annotated[int, Rule(f"1 to {MAX_BATCH:,}", lambda n: 1 <= n <= MAX_BATCH)]


@dataclass(frozen=True)
class Settings:
    """The gateway's settings. Units are in the names; `_s` is seconds."""

    public_address: Address = "0.0.0.0:8080"
    """Where clients connect (OpenAI routes, /health, /ready)."""
    internal_address: Address = "0.0.0.0:8091"
    """Where the operator reads /demand and Prometheus reads /metrics."""
    state_dir: Path = Path("/var/lib/busbar-gateway")
    """Last routes and the usage spool. Keep it on a disk that survives a restart."""

    replicas: Replicas = 1
    """How many gateways there are. With more than one, they share the limits of keys and tenants (`leases`)."""

    operator_url: Filled = "http://busbar-operator:8090"
    operator_token_file: Path = TOKEN_ROOT / "operator" / "token"
    """Projected token, for the operator's audience; it rotates, so it is read again regularly."""
    api_url: Filled = "http://busbar-api:8081"
    api_token_file: Path = TOKEN_ROOT / "api" / "token"
    """Projected token for the API's audience."""

    operator_subject: Filled = "system:serviceaccount:busbar-system:busbar-operator"
    """The only caller that may read /demand."""
    metrics_subjects: tuple[str, ...] = ()
    """Further callers that may read /metrics with one line per service (comma separated)."""

    key_cache_s: float = FRESH_S
    """How long a key look-up is cached."""
    key_stale_s: float = STALE_S
    """How long it is used while the API cannot be reached."""
    key_negative_s: float = 5.0
    """How long "no such key" is cached."""
    key_cache_entries: int = 20_000

    hold_timeout_s: float = 300.0
    """Longest wait of a request for a ready replica (a cold start must fit in)."""
    hold_limit: Count = 256
    """Requests that may wait per service."""
    hold_limit_per_user: int = 128
    """Requests of one user, over all their keys, that may wait per service: nobody fills the queue alone."""
    replica_in_flight: Count = 128
    """Requests sent to one replica at a time; more of them wait here, where the order is fair."""
    max_requests: Count = 2048
    """Requests in hand at a time, over all services."""

    attempts: Count = 2
    """Replicas that may fail while they work on one request; it is given to no further one."""
    resume_tokens: ResumeTokens = RESUME_TOKENS
    """Tokens of one stream whose ids are kept (4 bytes each); a longer stream cannot go on at another replica."""
    suspect_s: float = 1.0
    """A replica that failed is left out for this long, doubling up to `suspect_max_s`."""
    suspect_max_s: float = 30.0
    connect_timeout_s: float = 3.0
    probe_after_s: float = PROBE_AFTER_S
    """A replica from which a request has heard nothing for so long is asked for its /health, again and again."""
    probe_timeout_s: float = PROBE_TIMEOUT_S
    first_byte_timeout_s: float = 600.0
    stream_idle_timeout_s: float = 120.0
    """Longest silence of an engine in mid-stream."""
    client_stall_s: float = 60.0
    """A client that reads nothing for this long is cut off."""
    header_timeout_s: float = 10.0
    """Longest time for a request's head to arrive, from the opening of its connection or its first byte."""
    idle_timeout_s: float = 75.0
    """A connection on which nothing was asked for this long is closed."""
    request_body_mib: BodyMib = REQUEST_MIB
    """A larger request is refused with 413."""
    response_body_mib: int = 32
    event_kib: int = 1024
    """Largest single server-sent event."""

    batch_lines: BatchLines = 64
    """Requests of batches that this gateway runs at a time; 0: none."""
    batch_poll_s: float = 2.0
    """How often it asks the API for more of them."""

    usage_batch: Batch = 500
    """Usage records per delivery; the API takes at most `MAX_BATCH`."""
    usage_commit_s: float = 0.05
    """Finished requests are gathered this long for one fsync; until then they are in the mapped file."""
    usage_delivery_s: float = 1.0
    """Records are gathered this long for one delivery to the API."""
    usage_retry_max_s: float = 30.0
    spool_limit_mib: int = 1024
    """Undelivered usage on disk; when it is full, requests are refused rather than served uncounted."""
    spool_segment_mib: int = 4

    log_format: LogFormat = setting("json", shared="BUSBAR_LOG_FORMAT")
    log_level: LogLevel = "info"

    linger_s: float = 3.0
    """After SIGTERM: seconds in which /ready already says no but connections are still taken."""
    drain_s: float = 60.0
    """After that: seconds for running streams to end."""


def load(environ: Mapping[str, str]) -> Settings:
    """The settings of this process. Raises SettingsError, which names every variable that is wrong."""
    return settings.load(Settings, PREFIX, environ)


def address(text: str) -> tuple[str, int]:
    """Split ``host:port``; port 0 means any free port. Raises ValueError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{text!r} is not host:port")
    return host, int(port)
