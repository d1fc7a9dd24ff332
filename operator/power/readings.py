"""What a node's report is worth: a reading, or a refusal. Pure.

An agent runs on a machine that may be broken, so its numbers are judged before they count:

* not finite, negative, above 1.5 times the nameplate, or for another node: refused;
* the clock or a counter stands still while watts flow: frozen, refused;
* another epoch, a clock that jumped, a counter that fell, a new meter: the counter begins anew, and the watts told
  count instead.

A refused report changes nothing: the last reading stays until it is too old, and then the node is silent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from busbar.kube.contracts.power import AgentReport, Backend, LimitsReport, Meter
from busbar.scheduler.errors import PowerError
from busbar.scheduler.power import NodePower, NodeTelemetry
from busbar.scheduler.power.telemetry import plausible

CLOCK_SLACK_S = 5.0
"""A report may be so much younger than the request for it, and a clock that stood still may catch up."""
CAPPED_W = 1.0
"""A limit this far below the nameplate is one: drivers round."""
HOST = "host"
"""Key of the host's meter beside the boards' uuids."""


@dataclass(frozen=True, slots=True)
class Metered:
    """One meter's part of a reading."""

    watts: float
    """Mean since the last reading; of the first, as told."""
    joules: float
    floor_w: float
    nameplate_w: float
    limit_w: float | None = None
    """In force, as the agent read it back; None: none is known."""
    refuses: bool = False
    """It takes no limit, or ignores it."""
    pods: tuple[str, ...] | None = None
    """Who holds it, `namespace/name`; None: its agent does not say."""

    @property
    def is_capped(self) -> bool:
        return self.limit_w is not None and self.limit_w < self.nameplate_w - CAPPED_W


@dataclass(frozen=True, slots=True)
class Reading:
    """What is believed of a node."""

    node: str
    at_s: float
    """The operator's monotonic clock when it asked."""
    epoch: str
    clock_s: float
    meters: Mapping[str, Metered]
    """By the boards' uuids, and HOST."""
    boards_from: Backend
    host_from: Backend
    limits: LimitsReport | None = None
    """None: the agent may not set limits."""

    @property
    def watts(self) -> float:
        return sum(meter.watts for meter in self.meters.values())

    @property
    def boards(self) -> dict[str, Metered]:
        return {name: meter for name, meter in self.meters.items() if name != HOST}

    @property
    def floor_w(self) -> float:
        return sum(meter.floor_w for meter in self.meters.values())

    @property
    def nameplate_w(self) -> float:
        return sum(meter.nameplate_w for meter in self.meters.values())

    @property
    def is_capped(self) -> bool:
        """Whether a board's limit is below what it can draw."""
        return any(meter.is_capped for meter in self.meters.values())

    @property
    def refuses(self) -> bool:
        """Whether a board takes no limits: its agent may not set any, or the board takes none, or ignores them."""
        return self.limits is None or any(meter.refuses for meter in self.meters.values())

    @property
    def is_simulated(self) -> bool:
        return Backend.SIMULATED in (self.boards_from, self.host_from)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a report does not count, for the log."""

    why: str


def read(last: Reading | None, told: AgentReport, at_s: float) -> Reading | Refusal:
    """Judges one report.

    Args:
        last: the node's last reading.
        at_s: the operator's monotonic clock when it asked.
    """
    if last is not None and last.epoch == told.epoch and last.clock_s == told.clock_s:
        return Refusal("its clock stands still: the numbers are frozen")
    if last is not None and not _continues(last, told, at_s):
        last = None
    found: dict[str, Metered] = {}
    for name, meter in _meters(told):
        if name in found:
            return Refusal(f"two meters are named {name}")
        judged = _judged(last, told, name, meter)
        if isinstance(judged, Refusal):
            return judged
        found[name] = judged
    if not found:
        tried = "; ".join(f"{probe.backend.value}: {probe.why}" for probe in told.probes)
        return Refusal(f"it has no meters ({tried})")
    return Reading(
        node=told.node,
        at_s=at_s,
        epoch=told.epoch,
        clock_s=told.clock_s,
        meters=found,
        boards_from=told.boards_from,
        host_from=told.host_from,
        limits=told.limits,
    )


def _continues(last: Reading, told: AgentReport, at_s: float) -> bool:
    """Whether the counters can be compared: one start, and a clock that ran on about as fast as ours."""
    passed_s = told.clock_s - last.clock_s
    return last.epoch == told.epoch and 0 < passed_s <= 2 * (at_s - last.at_s) + CLOCK_SLACK_S


def _meters(told: AgentReport) -> list[tuple[str, Meter]]:
    host = [(HOST, told.host)] if told.host is not None else []
    return [*host, *((board.uuid, board) for board in told.boards)]


def _judged(last: Reading | None, told: AgentReport, name: str, meter: Meter) -> Metered | Refusal:
    """One meter, by the controller's rules for what a node can draw at all."""
    nameplate_w = meter.nameplate_watts
    try:
        power = NodePower(name, 0.0, 1, meter.floor_watts, nameplate_w)
    except PowerError as error:
        return Refusal(str(error))
    said = NodeTelemetry(name, 0.0, 0, told.clock_s, 0, nameplate_w, meter.watts)
    if not plausible(power, said) or not (math.isfinite(meter.joules) and meter.joules >= 0):
        return Refusal(f"{name}: {meter.watts:g} W and {meter.joules:g} J are not those of {nameplate_w:g} W")
    before = last.meters.get(name) if last is not None else None
    watts = meter.watts
    if last is not None and before is not None and meter.joules >= before.joules:
        if meter.joules == before.joules and meter.watts > 0:
            return Refusal(f"{name}: its counter stands still: the numbers are frozen")
        watts = (meter.joules - before.joules) / (told.clock_s - last.clock_s)
    if not plausible(power, replace(said, drawn_w=watts)):
        return Refusal(f"{name}: its counter says {watts:g} W, of {nameplate_w:g} W")
    limit_w = meter.limit_watts
    if limit_w is not None and not (math.isfinite(limit_w) and limit_w >= 0):
        return Refusal(f"{name}: a limit of {limit_w:g} W")
    return Metered(watts, meter.joules, meter.floor_watts, nameplate_w, limit_w, meter.refuses, meter.pods)
