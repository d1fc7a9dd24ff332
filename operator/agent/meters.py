"""Counters of a node's meters, from samples of its back ends. Pure but for the back ends themselves.

A back end may know watts, a counter of joules, or both. What it does not know is made from what it does: joules are
the integral of watts, watts the slope of joules. A counter that falls (driver loaded again, wrap-around) begins anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from busbar.kube.contracts.power import AgentReport, Backend, Meter, Probe

from .limits import Limiter

HOST = "host"
NO_PODS: Mapping[str, tuple[str, ...]] = MappingProxyType({})


class BackendAbsent(Exception):
    """The back end cannot be used here; the text says why."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One meter at one moment; at least one of watts and joules is known."""

    uuid: str
    floor_w: float
    nameplate_w: float
    watts: float | None = None
    joules: float | None = None


class BoardsOrHost(Protocol):
    """A back end. `sample` may take milliseconds; it raises OSError or BackendAbsent when it cannot read."""

    @property
    def backend(self) -> Backend: ...

    def sample(self, clock_s: float) -> Sequence[Sample]: ...


@dataclass(frozen=True, slots=True)
class Counted:
    """One meter with both numbers."""

    sample: Sample
    watts: float
    joules: float
    clock_s: float


Counters = Mapping[str, Counted]


def counted(last: Counters, samples: Sequence[Sample], clock_s: float) -> Counters:
    """The counters after these samples; meters that are no longer sampled are gone."""
    return {sample.uuid: _counted(last.get(sample.uuid), sample, clock_s) for sample in samples}


def _counted(last: Counted | None, sample: Sample, clock_s: float) -> Counted:
    passed_s = max(0.0, clock_s - last.clock_s) if last is not None else 0.0
    watts, joules = sample.watts, sample.joules
    if watts is None:
        watts = last.watts if last is not None else 0.0
        before = last.sample.joules if last is not None else None
        if joules is not None and before is not None and passed_s > 0 and joules >= before:
            watts = (joules - before) / passed_s
    if joules is None:
        joules = 0.0 if last is None else last.joules + (last.watts + watts) / 2 * passed_s
    return Counted(sample, watts, joules, clock_s)


@dataclass(frozen=True, slots=True)
class Node:
    """One node's back ends and what they have counted."""

    name: str
    epoch: str
    boards: BoardsOrHost | None
    host: BoardsOrHost | None
    probes: tuple[Probe, ...]
    counters: Counters
    clock_s: float


def sampled(node: Node, clock_s: float) -> Node:
    """The node after one look at its meters. Raises what its back ends raise."""
    samples = [s for back_end in (node.boards, node.host) if back_end for s in back_end.sample(clock_s)]
    counters = counted(node.counters, samples, clock_s)
    return Node(node.name, node.epoch, node.boards, node.host, node.probes, counters, clock_s)


def report(
    node: Node, limiter: Limiter | None = None, pods: Mapping[str, tuple[str, ...]] = NO_PODS
) -> AgentReport:
    """What the node says; without a limiter its boards may not be limited.

    Args:
        pods: on each board of which it is known who holds it.
    """
    meters = {
        uuid: Meter(
            uuid=uuid,
            watts=counter.watts,
            joules=counter.joules,
            floor_watts=counter.sample.floor_w,
            nameplate_watts=counter.sample.nameplate_w,
            limit_watts=limiter.limit_w(uuid) if limiter is not None else None,
            refuses=limiter is not None and uuid != HOST and limiter.refuses(uuid),
            pods=pods.get(uuid),
        )
        for uuid, counter in node.counters.items()
    }
    return AgentReport(
        node=node.name,
        epoch=node.epoch,
        clock_s=node.clock_s,
        boards_from=node.boards.backend if node.boards is not None else Backend.NONE,
        host_from=node.host.backend if node.host is not None else Backend.NONE,
        boards=tuple(meter for uuid, meter in meters.items() if uuid != HOST),
        host=meters.get(HOST),
        probes=node.probes,
        limits=limiter.report() if limiter is not None else None,
    )
