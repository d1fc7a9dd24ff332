"""The ledger at one moment, in a form that fits one object: what a new operator goes on from. Pure.

    totals of all accounts, and how far each node's meters were counted by then

A new operator counts each meter again from there by the meter's own counter, so what was counted after the checkpoint,
and what was drawn while no operator ran, is neither lost nor counted twice. Statuses may already have a part of it:
see `accounts.py`. Times are told as seconds before the checkpoint, as monotonic clocks do not outlive their process.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from busbar.kube.contracts.power import Backend
from busbar.operator.energy.metering import Metering
from busbar.operator.power.readings import Metered, Reading
from busbar.operator.write.kept_object import MOST_BYTES, unpacked

Number = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class MeterCut(NamedTuple):
    """One meter."""

    joules: Positive
    watts: Positive
    ahead_j: Positive
    """See `Metering`."""


class NodeCut(NamedTuple):
    """How far one node is counted."""

    epoch: str
    clock_s: Number
    """Of the agent, at its last reading."""
    read_ago_s: Number
    counted_ago_s: Number
    meters: dict[str, MeterCut]


class Checkpoint(BaseModel):
    """See the module's head."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    at_s: Number
    """Time of day."""
    totals: dict[str, Number]
    """Joules by account."""
    nodes: dict[str, NodeCut]


def encode(checkpoint: Checkpoint, most_bytes: int = MOST_BYTES) -> tuple[bytes, int]:
    """The object's data, and how many nodes are left out of it because it would be too large.

    Of a node that is left out, the time between the checkpoint and the next operator's first reading is not counted.
    Raises ValueError: not even the totals fit.
    """
    nodes = dict(checkpoint.nodes)
    while True:
        plain = checkpoint.model_copy(update={"nodes": nodes}).model_dump_json()
        data = zlib.compress(plain.encode())
        if len(data) <= most_bytes:
            return data, len(checkpoint.nodes) - len(nodes)
        if not nodes:
            raise ValueError(f"{len(checkpoint.totals)} totals do not fit into {most_bytes} bytes")
        nodes = dict(list(nodes.items())[: len(nodes) * 3 // 4])


def decode(data: bytes) -> Checkpoint:
    """Raises ValueError."""
    return Checkpoint.model_validate_json(unpacked(data))  # a ValidationError is a ValueError


def cut_of(metering: Metering, now_s: float) -> NodeCut:
    """How far a node is counted at `now_s`, the clock of its reading."""
    reading, ahead = metering.reading, metering.ahead_j
    return NodeCut(
        epoch=reading.epoch,
        clock_s=reading.clock_s,
        read_ago_s=round(now_s - reading.at_s, 3),
        counted_ago_s=round(now_s - metering.until_s, 3),
        meters={
            name: MeterCut(round(meter.joules, 3), round(meter.watts, 1), round(ahead.get(name, 0.0), 3))
            for name, meter in reading.meters.items()
        },
    )


def metering_of(node: str, cut: NodeCut, cut_s: float) -> Metering:
    """The same in another process, by whose clock the checkpoint was made at `cut_s`."""
    meters: Mapping[str, Metered] = {
        name: Metered(meter.watts, meter.joules, floor_w=0.0, nameplate_w=0.0)
        for name, meter in cut.meters.items()
    }
    reading = Reading(
        node=node,
        at_s=cut_s - cut.read_ago_s,
        epoch=cut.epoch,
        clock_s=cut.clock_s,
        meters=meters,
        boards_from=Backend.NONE,
        host_from=Backend.NONE,
    )
    ahead = {name: meter.ahead_j for name, meter in cut.meters.items() if meter.ahead_j}
    return Metering(reading, cut_s - cut.counted_ago_s, ahead)
