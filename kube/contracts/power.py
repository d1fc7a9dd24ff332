"""`GET /telemetry` of the node agents: what the boards and the processors of a node draw.

The operator dials the agent on port 8094, and the agent dials nobody. The bearer is derived from the chart's power key
and the node's name, so the agent needs no right in the cluster to check it. One process may answer for many nodes: the
simulator does, under the name `simulated`.

Energy counters decide: the operator computes means from them between two answers, so neither a late answer nor a
single wrong reading of watts changes a sum. Time is the agent's monotonic clock, of which only the passing counts.
"""

from __future__ import annotations

import hashlib
import hmac
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from busbar.kube.contracts.wire import WireModel

PORT = 8094
PATH = "/telemetry"
SIMULATED_LABEL = "sim.busbar.dev/power"
"""A node with this label, whatever its value, is played by the simulator; its watts are invented."""
SIMULATOR = "simulated"
"""The simulator's name in its bearer."""

Name = Annotated[str, Field(min_length=1, max_length=253)]
Text = Annotated[str, Field(max_length=253)]


class Backend(StrEnum):
    """Where numbers come from."""

    NVML = "nvml"
    RAPL = "rapl"
    SIMULATED = "simulated"
    """Invented: no meter has measured them."""
    NONE = "none"
    """Nothing is measured."""


class Probe(WireModel):
    """One back end that was tried at the agent's start."""

    backend: Backend
    used: bool
    why: Text = ""
    """Why it is not used, or what it found."""


class Meter(WireModel):
    """One board, or all processors of the host together. Numbers are not checked here: the reader judges them."""

    uuid: Name
    watts: float
    """Now, as near to instantaneous as the back end can tell."""
    joules: float
    """Counter; it begins anew when its epoch does, and whenever a driver was loaded again."""
    floor_watts: float
    """The lowest limit that it accepts; without limits, its nameplate."""
    nameplate_watts: float
    """What it draws at most if nobody limits it."""


class AgentReport(WireModel):
    """What one node draws."""

    node: Name
    epoch: Name
    """Another value after each start of the agent."""
    clock_s: float
    """The agent's monotonic clock when it read the meters."""
    boards_from: Backend
    host_from: Backend
    boards: Annotated[tuple[Meter, ...], Field(max_length=64)] = ()
    host: Meter | None = None
    probes: Annotated[tuple[Probe, ...], Field(max_length=8)] = ()


class AgentAnswer(WireModel):
    """Answer of `GET /telemetry`: one report, or the simulator's many."""

    reports: Annotated[tuple[AgentReport, ...], Field(max_length=1000)]


def telemetry_bearer(key: bytes, name: str) -> str:
    """The bearer for the agent of this node, or for the simulator: HMAC-SHA256 in hex."""
    return hmac.new(key, f"telemetry:{name}".encode(), hashlib.sha256).hexdigest()
