"""Settings of the operator: frozen, read once from the environment by ``from_environ``.

Every field is an environment variable ``BUSBAR_OPERATOR_<FIELD>`` in upper case; a variable with that
prefix that names no field is refused, so that a typing error does not pass for a setting. What the pod knows
about itself comes from the downward API (POD_NAME, POD_NAMESPACE, POD_UID), and what other parts need too has
its own name (BUSBAR_WORKLOADS_IMAGE, BUSBAR_WORKLOAD_KEY_FILE, BUSBAR_GATEWAY_URL, BUSBAR_GATEWAY_TOKEN_FILE).
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from busbar.operator.errors import SettingsError

PREFIX = "BUSBAR_OPERATOR_"
OBJECTIVES = ("fairness", "makespan", "cost", "finish-time-fairness")
"""As the scheduler names them; repeated here so that a wrong one is told before anything large is imported."""


@dataclass(frozen=True)
class Settings:
    """How the operator behaves. Times are seconds."""

    namespace: str = "busbar-system"  # its own: the lease lives here
    identity: str = "busbar-operator"  # lease holder; a restarted container of one pod is the same holder
    workloads_image: str = "busbar-workloads"  # image of our engines
    image_pull_policy: str = "IfNotPresent"
    workload_key: bytes = field(default=b"", repr=False)  # every workload's bearer is derived from it
    gateway_url: str = ""  # empty: no gateway, so no wake-up from zero
    gateway_token_file: str = ""
    gateway_public_url: str = "http://busbar-gateway.busbar-system:8080/v1"  # status.url of services
    allowed_callers: tuple[str, ...] = ()  # user names that may use the internal port
    internal_host: str = "0.0.0.0"
    internal_port: int = 8090
    metrics_port: int = 8093

    lease_name: str = "busbar-operator"
    lease_duration_s: float = 15.0  # a dead holder blocks its successor at most this long
    writers: int = 16  # reconciles, hence writes, in flight
    connections: int = 32  # sockets to the API server
    resync_s: float = 300.0  # everything is looked at again this often, whatever the watches said

    round_debounce_s: float = 0.05  # events that arrive together are planned together
    round_period_s: float = 10.0  # and a full plan is made at least this often while jobs wait
    round_check_s: float = 1.0  # after a round that ordered something, the next comes at the latest then
    objective: str = "fairness"  # what the scheduler wants most, one of OBJECTIVES
    usage_half_life_s: float = 7 * 86400.0  # fair share: use that is older counts half
    guarantee_reclaim_s: float = 300.0  # what others borrowed of a guarantee is back within this time
    explain_period_s: float = 15.0  # a waiting job's sentence changes at most this often

    forecast_pause_s: float = 5.0  # waiting jobs are looked through this often for forecasts to make
    forecast_renew_s: float = 300.0  # a forecast older than this is made again,
    forecast_settle_s: float = 60.0  # or one older than this whose job's place in the queue has changed
    forecast_jobs: int = 4  # forecasts made at a time, in a process of their own
    forecast_computing_s: float = 10.0  # which begins no more of them after so much computing
    forecast_draft_s: float = 6.0  # a preview waits at most this long for its forecast
    forecast_ended: int = 5  # nothing is foretold before so many jobs have ended here

    pod_cidrs: str = ""  # comma list; only where nodes carry no podCIDR of their own
    poll_period_s: float = 2.0  # workload ports
    poll_timeout_s: float = 2.0
    poll_limit_bytes: int = 65536
    demand_period_s: float = 1.0  # the gateway's demand
    progress_period_s: float = 5.0  # progress is written at most this often
    usage_period_s: float = 60.0  # and usage at least this often while a job holds devices

    profile_period_s: float = 10.0  # a workload class's profile is written at most this often
    explore_period_s: float = 60.0  # and at least this often while its jobs try what nobody measured

    gang_timeout_s: float = 900.0  # admitted and still not running: torn down, queued again
    unschedulable_s: float = 60.0  # the same for a pod that kube-scheduler cannot place
    preempt_hold_s: float = 15.0  # a preempted job stays out so long: its room is another's
    backoff_base_s: float = 2.0  # a failed attempt waits base * 2^restarts
    backoff_limit_s: float = 300.0

    network_policies: bool = True  # one in each of a tenant's namespaces, see isolation.py

    drain_settle_s: float = 2.0  # a leaving replica stays at least this long, so that the gateway has heard

    events_per_s: float = 5.0
    events_burst: int = 25
    watch_inactivity_s: float = 75.0  # a silent watch is opened again
    watch_dead_s: float = 300.0  # and after this the liveness probe fails

    @property
    def shielded_by(self) -> str:
        """The platform's namespace where NetworkPolicies are kept, else empty."""
        return self.namespace if self.network_policies else ""


def from_environ(environ: Mapping[str, str] | None = None) -> Settings:
    """The settings of this process. Raises SettingsError with the variable's name."""
    env = os.environ if environ is None else environ
    known = {f.name: f for f in fields(Settings)}
    values: dict[str, object] = {}
    for name, text in env.items():
        if not name.startswith(PREFIX) or name == PREFIX + "ALLOWED_CALLERS":
            continue
        key = name.removeprefix(PREFIX).lower()
        if key.startswith(("service_", "port")):
            continue  # Kubernetes' own variables for a Service called busbar-operator
        if key not in known or key == "workload_key":
            raise SettingsError(
                f"{name} is not a setting; known are {PREFIX}<one of {', '.join(sorted(known))}>"
            )
        values[key] = _convert(name, text, str(known[key].type))
    if values.get("objective", OBJECTIVES[0]) not in OBJECTIVES:
        raise SettingsError(f"{PREFIX}OBJECTIVE={values['objective']!r} is none of {', '.join(OBJECTIVES)}")
    for key in ("usage_half_life_s", "guarantee_reclaim_s"):
        seconds = values.get(key, 1.0)
        if not (isinstance(seconds, float) and seconds > 0):
            raise SettingsError(f"{PREFIX}{key.upper()}={seconds} must be above 0 seconds")
    if env.get("POD_NAMESPACE"):
        values.setdefault("namespace", env["POD_NAMESPACE"])
    values.setdefault("identity", _identity(env))
    for variable, key in (
        ("BUSBAR_WORKLOADS_IMAGE", "workloads_image"),
        ("BUSBAR_WORKLOADS_PULL_POLICY", "image_pull_policy"),
        ("BUSBAR_GATEWAY_URL", "gateway_url"),
        ("BUSBAR_GATEWAY_TOKEN_FILE", "gateway_token_file"),
        ("BUSBAR_GATEWAY_PUBLIC_URL", "gateway_public_url"),
    ):
        if env.get(variable):
            values.setdefault(key, env[variable])
    if env.get(PREFIX + "ALLOWED_CALLERS"):
        values["allowed_callers"] = tuple(
            c.strip() for c in env[PREFIX + "ALLOWED_CALLERS"].split(",") if c.strip()
        )
    if not env.get("BUSBAR_WORKLOAD_KEY_FILE"):
        raise SettingsError(
            "BUSBAR_WORKLOAD_KEY_FILE is not set: name the file that holds the chart's workload key"
        )
    try:
        key_bytes = Path(env["BUSBAR_WORKLOAD_KEY_FILE"]).read_bytes().strip()
    except OSError as error:
        raise SettingsError(f"BUSBAR_WORKLOAD_KEY_FILE cannot be read: {error}") from error
    if len(key_bytes) < 16:
        raise SettingsError("the workload key is shorter than 16 bytes; let the chart make one")
    return Settings(**{**values, "workload_key": key_bytes})  # type: ignore[arg-type]


def _identity(env: Mapping[str, str]) -> str:
    """One holder per pod: a restarted container takes its own lease back at once, a new pod waits."""
    if env.get("POD_UID"):
        return f"{env.get('POD_NAME', 'busbar-operator')}_{env['POD_UID']}"
    return f"{socket.gethostname()}_{uuid.uuid4()}"


def _convert(name: str, text: str, kind: str) -> object:
    if kind == "bool":
        if text not in ("true", "false"):
            raise SettingsError(f"{name}={text!r} is neither true nor false")
        return text == "true"
    try:
        if kind == "int":
            return int(text)
        if kind == "float":
            return float(text)
    except ValueError as error:
        raise SettingsError(f"{name}={text!r} is not a number") from error
    return text
