"""Settings of the agent: frozen, read once from ``BUSBAR_AGENT_*`` by the rules of ``busbar.kube.settings``."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from busbar.kube import settings
from busbar.kube.contracts.power import PORT
from busbar.kube.settings import Count, LogFormat, LogLevel, Port, Positive, Rule, setting

PREFIX = "BUSBAR_AGENT_"
Key = Annotated[bytes, Rule("16 bytes or more; let the chart make it", lambda key: len(key) >= 16)]


@dataclass(frozen=True)
class Settings:
    """How the agent behaves. Times are seconds."""

    node: str = setting("", own=False, shared="NODE_NAME")  # of this node; empty: the host's name
    # the bearers of all agents are derived from it
    key: Key = setting(b"", own=False, file="BUSBAR_POWER_KEY_FILE", required=True, secret=True)
    # probe: this node's own meters; simulated: invent those of simulated_nodes
    backend: Literal["probe", "simulated"] = "probe"
    host: str = "0.0.0.0"
    port: Port = PORT
    period_s: Positive = 0.2  # the meters are read this often

    # whether it may set limits of boards; it then holds the boards at their lowest limits until it is told otherwise
    set_limits: bool = False
    # the operator's certificate for leases; with set_limits it is required
    lease_cert: bytes = setting(b"", own=False, file="BUSBAR_POWER_LEASE_CERT_FILE")
    # the kubelet's PodResources socket, for which pod holds which board; empty: nobody is asked
    pod_resources_socket: str = ""
    heartbeat_file: str = ""  # shared with the guard; empty: there is none
    guard_after_s: Positive = 1.0  # the guard lowers the boards when the heartbeat is older

    simulated_nodes: tuple[str, ...] = ()  # names of the nodes that are played
    simulated_boards: Count = 8  # of each of them
    simulated_board_watts: Positive = 400.0
    simulated_board_floor_watts: Positive = 100.0
    simulated_host_watts: float = 1750.0
    simulated_seed: int = 0
    simulated_limits_dir: str = ""  # keeps the limits of the boards that are played; empty: memory

    log_format: LogFormat = setting("json", shared="BUSBAR_LOG_FORMAT")
    log_level: LogLevel = "info"


def load(environ: Mapping[str, str] | None = None) -> Settings:
    """The settings of this process. Raises SettingsError, which names every variable that is wrong."""
    env = os.environ if environ is None else environ
    return settings.load(Settings, PREFIX, env, defaults={"node": socket.gethostname()})
