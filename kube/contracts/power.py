"""`GET /telemetry` and `POST /lease` of the node agents: what a node draws, and how much it may draw.

The operator dials the agent on port 8094, and the agent dials nobody but its kubelet. The bearer is derived from the chart's power key
and the node's name, so the agent needs no right in the cluster to check it. One process may answer for many nodes: the
simulator does, under the name `simulated`.

Energy counters decide: the operator computes means from them between two answers, so neither a late answer nor a
single wrong reading of watts changes a sum. Time is the agent's monotonic clock, of which only the passing counts.

A *lease* lets the node draw so many watts until a moment of that clock. When it ends, and when the agent starts, the
node holds its *standing cap*: each board at its lowest limit. Only a *release*, a message like a lease, puts the boards'
default limits back; silence never does. Leases are counted from the clock of the report that they answer, so a message
that arrives late has less time left. Each message has a sequence; the agent takes only higher ones, of its own epoch.
"""

from __future__ import annotations

import hashlib
import hmac
from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from busbar.kube.contracts.wire import WireModel

PORT = 8094
PATH = "/telemetry"
LEASE_PATH = "/lease"
SIGNATURE = "Busbar-Signature"
"""Header of a lease: the body's signature with the operator's Ed25519 key, in base64."""
SIMULATED_LABEL = "sim.busbar.dev/power"
"""A node with this label, whatever its value, is played by the simulator; its watts are invented."""
SIMULATOR = "simulated"
"""The simulator's name in its bearer."""

Name = Annotated[str, Field(min_length=1, max_length=253)]
Text = Annotated[str, Field(max_length=253)]
Watts = Annotated[float, Field(ge=0, le=1e8, allow_inf_nan=False)]
Part = Annotated[float, Field(gt=0, le=1)]
MOST_BOARDS = 64
"""Of one node."""
MOST_SEQUENCE = 2**53
"""Larger numbers are not exact in every JSON reader."""
MOST_TTL_S = 60.0
MOST_HOLDERS = 256
"""Pods on one board."""
MOST_POD_NAME = 317
PodName = Annotated[str, Field(min_length=1, max_length=MOST_POD_NAME)]
"""`namespace/name`."""


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
    limit_watts: float | None = None
    """The limit in force, as read back; None: it has none, or none is known."""
    refuses: bool = False
    """It takes no limit from this agent, or draws more than its limit: it counts with its nameplate."""
    pods: Annotated[tuple[PodName, ...], Field(max_length=MOST_HOLDERS)] | None = None
    """Who holds it, as the node's kubelet says. Several share a board that is divided; empty: nobody holds it; None: nobody
    says."""


class LeaseState(StrEnum):
    """What the agent holds the boards to."""

    STANDING = "Standing"
    """The standing cap: no lease since the agent's start, or the last one has ended."""
    LEASED = "Leased"
    RELEASED = "Released"
    """The boards' default limits."""


class LimitsReport(WireModel):
    """What an agent that may set limits has done."""

    state: LeaseState
    sequence: Annotated[int, Field(ge=0, le=MOST_SEQUENCE)]
    """The newest message whose limits are in force by read-back; 0: none since the agent's start."""
    lease_watts: float | None = None
    """Of the lease in force."""
    remaining_s: float | None = None
    actuation_s: float | None = None
    """From the arrival of the newest message to its limits being read back."""
    conflicts: Annotated[tuple[Name, ...], Field(max_length=64)] = ()
    """Boards with a limit that somebody else has written in the last minute."""
    free: bool = False
    """The boards' limits are above those of the lease in force, because its bucket is not empty."""
    bucket_j: float | None = None
    """Joules in the bucket of the lease in force; below zero: a debt. None: it has no bucket."""


class AgentReport(WireModel):
    """What one node draws."""

    node: Name
    epoch: Name
    """Another value after each start of the agent."""
    clock_s: float
    """The agent's monotonic clock when it read the meters."""
    boards_from: Backend
    host_from: Backend
    boards: Annotated[tuple[Meter, ...], Field(max_length=MOST_BOARDS)] = ()
    host: Meter | None = None
    probes: Annotated[tuple[Probe, ...], Field(max_length=8)] = ()
    limits: LimitsReport | None = None
    """None: this agent may not set limits."""


class AgentAnswer(WireModel):
    """Answer of `GET /telemetry`: one report, or the simulator's many."""

    reports: Annotated[tuple[AgentReport, ...], Field(max_length=1000)]


class LeaseMessage(WireModel):
    """A lease, or a release: then there are no watts and no end."""

    node: Name
    epoch: Name
    """Of the report that it answers."""
    sequence: Annotated[int, Field(ge=1, le=MOST_SEQUENCE)]
    watts: Watts | None = None
    """Of the whole node."""
    host_watts: Watts = 0.0
    """Part of these watts that is not for the boards."""
    clock_s: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    """Of the report that it answers; the time to live counts from there."""
    ttl_s: Annotated[float, Field(gt=0, le=MOST_TTL_S, allow_inf_nan=False)] | None = None
    burst_j: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Depth of the node's bucket in joules: the lease bounds the mean, and the emptier the bucket, the nearer are the
    boards' limits to the lease. 0: the limits alone keep the lease."""

    board_part: Part = 1.0
    """What each board may draw at most, as a part of its nameplate, however much the lease leaves; not less than its
    lowest limit. Below 1 where the job that holds the boards was admitted under a power cap."""
    board_parts: dict[Name, Part] = Field(default_factory=dict, max_length=MOST_BOARDS)
    """The same of single boards, by uuid, where pods under different caps share the node; `board_part` is that of the others.
    An agent that does not know this field ignores it and holds all boards to `board_part`. It says of no board who holds it
    either, so nothing depends on its parts; the lease bounds what its boards draw in any case."""

    @property
    def releases(self) -> bool:
        return self.watts is None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if (self.watts is None) != (self.ttl_s is None):
            raise ValueError("a lease has watts and ttlS; a release has neither")
        return self


class LeaseOrder(WireModel):
    """Body of `POST /lease`: one message, or one for each of the simulator's nodes."""

    leases: Annotated[tuple[LeaseMessage, ...], Field(min_length=1, max_length=1000)]


class LeaseRefusal(WireModel):
    """Why a message changed nothing."""

    node: str
    why: str


class LeaseAnswer(WireModel):
    """Answer of `POST /lease`: 200 if every message was taken, else 409."""

    refused: tuple[LeaseRefusal, ...] = ()


def lease_bearer(key: bytes, name: str) -> str:
    """The bearer for leases of the agent of this node, or of the simulator; another than for telemetry."""
    return hmac.new(key, f"lease:{name}".encode(), hashlib.sha256).hexdigest()


def telemetry_bearer(key: bytes, name: str) -> str:
    """The bearer for the agent of this node, or for the simulator: HMAC-SHA256 in hex."""
    return hmac.new(key, f"telemetry:{name}".encode(), hashlib.sha256).hexdigest()
