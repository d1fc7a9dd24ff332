"""Settings of the operator: frozen, read once from ``BUSBAR_OPERATOR_*`` by the rules of ``busbar.kube.settings``.

Facts about the pod itself come from the downward API (POD_NAME, POD_NAMESPACE, POD_UID). Settings that other processes
share have their own names (BUSBAR_WORKLOADS_IMAGE, BUSBAR_WORKLOADS_ACCEPTED_DIGESTS, BUSBAR_WORKLOAD_KEY_FILE,
BUSBAR_FORMER_WORKLOAD_KEY_FILE, BUSBAR_POWER_KEY_FILE,
BUSBAR_GATEWAY_URL, BUSBAR_GATEWAY_TOKEN_FILE ...).
"""

from __future__ import annotations

import os
import re
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from busbar.kube import settings
from busbar.kube.settings import LogFormat, LogLevel, Port, Positive, Rule, setting
from busbar.scheduler.autoscale.reach import NODE_LOST_S, POLL_PERIOD_S, POLL_TIMEOUT_S

PREFIX = "BUSBAR_OPERATOR_"
FORMER_KEY_FILE = "BUSBAR_FORMER_WORKLOAD_KEY_FILE"
Objective = Literal["fairness", "makespan", "cost", "finish-time-fairness"]
"""The scheduler's names, repeated here so that a wrong one is reported before anything large is imported."""
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
Digests = Annotated[
    tuple[str, ...],
    Rule(
        "a comma list of digests, each sha256: and 64 hex digits",
        lambda found: all(_DIGEST.fullmatch(one) for one in found),
    ),
]
WorkloadKey = Annotated[bytes, Rule("16 bytes or more; let the chart make it", lambda key: len(key) >= 16)]
FormerKey = Annotated[
    bytes, Rule("16 bytes or more, or empty: no former key", lambda key: not key or len(key) >= 16)
]


@dataclass(frozen=True)
class Settings:
    """How the operator behaves. Times are seconds."""

    namespace: str = "busbar-system"  # the operator's own namespace; it holds the lease
    identity: str = "busbar-operator"  # lease holder; a restarted container of one pod is the same holder
    pod_name: str = ""  # the pod that gets the leader's label; empty: none
    # image of our engines
    workloads_image: str = setting("busbar-workloads", shared="BUSBAR_WORKLOADS_IMAGE")
    # accepted digests of it; empty: any, or the one in its reference
    workloads_digests: Digests = setting((), own=False, shared="BUSBAR_WORKLOADS_ACCEPTED_DIGESTS")
    image_pull_policy: str = setting("IfNotPresent", shared="BUSBAR_WORKLOADS_PULL_POLICY")
    # every workload's bearer is derived from it
    workload_key: WorkloadKey = setting(
        b"", own=False, file="BUSBAR_WORKLOAD_KEY_FILE", required=True, secret=True
    )
    # the one before, while the key is rotated: pods that were made under it are called with it; empty: there is none
    former_workload_key: FormerKey = setting(b"", own=False, file=FORMER_KEY_FILE, secret=True)
    gateway_url: str = setting(
        "", shared="BUSBAR_GATEWAY_URL"
    )  # of several gateways each one's, by commas; empty: no gateway, so no wake-up from zero
    gateway_token_file: str = setting("", shared="BUSBAR_GATEWAY_TOKEN_FILE")
    # status.url of services
    gateway_public_url: str = setting(
        "http://busbar-gateway.busbar-system:8080/v1", shared="BUSBAR_GATEWAY_PUBLIC_URL"
    )
    allowed_callers: tuple[str, ...] = ()  # user names that may use the internal port
    internal_host: str = "0.0.0.0"
    internal_port: Port = 8090
    metrics_port: Port = 8093

    lease_name: str = "busbar-operator"
    lease_duration_s: float = (
        30.0  # a successor waits this long for a holder that died; renewed every third of it
    )
    writers: int = 16  # reconciles in flight
    connections: int = 32  # sockets to the API server, hence writes in flight; fewer while it is slow
    resync_s: float = 300.0  # every object is reconciled at least this often

    round_debounce_s: float = 0.05  # events that arrive together are planned together
    # and a full plan is made this often while jobs wait; where it takes half a second or more, up to once a minute
    round_period_s: float = 10.0
    round_check_s: float = 1.0  # after a round with actions, the next round follows at the latest after this
    objective: Objective = "fairness"  # what the scheduler optimizes first
    usage_half_life_s: Positive = 7 * 86400.0  # fair share: half-life of past use
    guarantee_reclaim_s: Positive = 300.0  # borrowed guaranteed capacity is reclaimed within this time
    explain_period_s: float = (
        60.0  # a waiting job's status is written at most this often, unless the code changes
    )
    sentences_per_s: float = 20.0  # statuses of waiting jobs written per second, all together
    refused_again_s: float = 15.0  # pods of a service that the API server refused are sent again after this

    forecast_pause_s: float = 5.0  # pause between two batches of forecasts,
    forecast_cpu_share: float = 0.05  # longer where they would take more than this share of one core
    forecast_renew_s: float = 300.0  # a forecast older than this is made again,
    forecast_settle_s: float = 60.0  # or one older than this whose job's place in the queue has changed
    forecast_jobs: int = 4  # forecasts made at a time, in a process of their own
    forecast_computing_s: float = 10.0  # CPU time after which that process begins no further forecast
    forecast_draft_s: float = 6.0  # a preview waits at most this long for its forecast
    forecast_ended: int = 5  # no forecasts are made before this many jobs have ended

    pod_cidrs: str = ""  # comma list; only where nodes carry no podCIDR of their own
    poll_period_s: float = POLL_PERIOD_S  # workload ports
    poll_timeout_s: float = POLL_TIMEOUT_S
    poll_limit_bytes: int = 65536
    demand_period_s: float = 1.0  # the gateway's demand
    progress_period_s: float = 5.0  # progress is written at most this often
    start_told_s: float = 5.0  # a start that takes longer is written,
    count_period_s: float = 2.0  # and how many of its pods run at most this often
    usage_period_s: float = 60.0  # and usage about this often while a job holds devices
    progress_writes_per_s: float = 20.0  # of all jobs together: with many, each is written less often
    usage_writes_per_s: float = 2.0  # the same, down to once in twelve minutes

    profile_period_s: float = 10.0  # a workload class's profile is written at most this often
    explore_period_s: float = 60.0  # and at least this often while its jobs run where nobody measured

    gang_timeout_s: float = 900.0  # admitted and still not running: torn down, queued again
    unschedulable_s: float = 60.0  # the same for a pod that kube-scheduler cannot place
    # the platform's engine is started again elsewhere when a node of its pods has not answered Kubernetes for so long
    node_lost_s: Positive = NODE_LOST_S
    preempt_hold_s: float = (
        15.0  # a preempted job is not started again within this time: its devices are for another
    )
    backoff_base_s: float = 2.0  # a failed attempt waits base * 2^restarts
    backoff_limit_s: float = 300.0

    network_policies: bool = True  # one in each of a tenant's namespaces, see network_policy.py

    # the bearers of the node agents are derived from it; empty: no agent is asked
    power_key: WorkloadKey = setting(b"", own=False, file="BUSBAR_POWER_KEY_FILE", secret=True)
    power_lease_key: bytes = setting(
        b"", own=False, file="BUSBAR_POWER_LEASE_KEY_FILE", secret=True
    )  # signs leases
    power_simulator_url: str = ""  # plays the nodes labelled sim.busbar.dev/power; empty: nobody does
    power_fresh_s: Positive = 3.0  # a node that has not reported for longer is silent
    # nodes lower their boards when they have heard of no lease for this long
    power_lease_s: Annotated[float, Rule("1 to 60 seconds", lambda s: 1 <= s <= 60)] = 10.0
    # whether nodes whose boards are not limited as their domain says get a taint; the chart gives the right to it
    power_taint_nodes: bool = False
    power_meter_s: Positive = 30.0  # between two looks at the meters of feeds
    energy_checkpoint_s: Positive = 30.0  # of the energy ledger, in one object; two missed are a minute
    history_period_s: Positive = 60.0  # of the services' last day, in one object; written if it has changed
    # of the services' load over time: each of its objects is written at most this often, if something was counted
    series_period_s: Positive = 600.0
    power_status_s: Positive = 10.0  # the numbers in a PowerDomain's status are written at most this often

    orphan_grace_s: float = 30.0  # time that the garbage collector has to delete a pod whose owner is gone

    drain_settle_s: float = (
        2.0  # a draining replica stays at least this long, so that the gateway has new routes
    )
    sleep_limit_s: Positive = 60.0  # a replica that takes longer to fall asleep, or to wake, is deleted

    log_format: LogFormat = setting("json", shared="BUSBAR_LOG_FORMAT")
    log_level: LogLevel = "info"

    events_per_s: float = 5.0
    events_burst: int = 25
    watch_inactivity_s: float = 75.0  # a watch without messages for this long is opened again
    watch_dead_s: float = 300.0  # and after this the liveness probe fails

    @property
    def workload_keys(self) -> tuple[bytes, ...]:
        """The workload key, and the former one while it is rotated."""
        return (self.workload_key, *filter(None, [self.former_workload_key]))

    @property
    def shielded_by(self) -> str:
        """The platform's namespace where NetworkPolicies are kept, else empty."""
        return self.namespace if self.network_policies else ""


def load(environ: Mapping[str, str] | None = None) -> Settings:
    """The settings of this process. Raises SettingsError, which names every variable that is wrong."""
    env = dict(os.environ if environ is None else environ)
    if not Path(env.get(FORMER_KEY_FILE, "")).is_file():
        env.pop(FORMER_KEY_FILE, None)  # the Secret has it only while the key is rotated
    pod: dict[str, object] = {"identity": _identity(env)}
    if env.get("POD_NAMESPACE"):
        pod["namespace"] = env["POD_NAMESPACE"]
    if env.get("POD_NAME"):
        pod["pod_name"] = env["POD_NAME"]
    read = settings.load(Settings, PREFIX, env, defaults=pod)
    if read.former_workload_key == read.workload_key:
        # A restored backup may bring the former key back. Replicas of one key must not be replaced again and again.
        return replace(read, former_workload_key=b"")
    return read


def _identity(env: Mapping[str, str]) -> str:
    """One identity per pod: a restarted container takes its own lease back at once, a new pod waits."""
    if env.get("POD_UID"):
        return f"{env.get('POD_NAME', 'busbar-operator')}_{env['POD_UID']}"
    return f"{socket.gethostname()}_{uuid.uuid4()}"
