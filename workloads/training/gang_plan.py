"""The step of a gang for `busbar plan`: `prediction` with what data sheets say of the accelerator, and people of the network.

What is not stated is assumed, and the answer says so. No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from busbar.kube.types.quantity import to_bytes
from busbar.scheduler.fit import Accelerator, BatchShape, ModelShape
from busbar.scheduler.fit.exchange import (
    ASSUMED_NETWORK,
    NETWORK_GB_PER_S,
    SequenceExchange,
    among_neighbours,
    of_sequences,
    stated,
)
from busbar.scheduler.fit.speed import micro_batch_times
from busbar.workloads.training.demand import Demand
from busbar.workloads.training.division import Division
from busbar.workloads.training.errors import InvalidJob
from busbar.workloads.training.plan import MemoryPlan
from busbar.workloads.training.prediction import PassTimes, Prediction, Probe, most_micro_batches, predict

_BITS = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?)(?:bit|bps|bit/s)", re.IGNORECASE)
_SCALE = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


@dataclass(frozen=True)
class Network:
    """Between pods."""

    bytes_per_s: float
    name: str
    """Of its class; "": a rate was stated."""
    assumed: bool = False


def network_of(text: str | None) -> Network:
    """What was stated: a class, bits per second (`400Gbit`) or bytes per second (`25Gi`); None: nothing. Raises InvalidJob."""
    if text is None:
        return Network(NETWORK_GB_PER_S[ASSUMED_NETWORK] * 1e9, ASSUMED_NETWORK, assumed=True)
    if text in NETWORK_GB_PER_S:
        return Network(NETWORK_GB_PER_S[text] * 1e9, text)
    if bits := _BITS.fullmatch(text):
        rate = float(bits[1]) * _SCALE[bits[2].upper()] / 8
    else:
        try:
            rate = float(to_bytes(text))
        except ValueError as problem:
            raise InvalidJob("--network", f"{text} is no rate", _REMEDY) from problem
    if rate <= 0:
        raise InvalidJob("--network", f"{text} moves nothing", _REMEDY)
    return Network(rate, "")


_REMEDY = f"write 400Gbit, or 25Gi for bytes per second, or one of {', '.join(NETWORK_GB_PER_S)}"


@dataclass(frozen=True)
class GangMachine:
    """What the processes run on."""

    accelerator: Accelerator
    network: Network | None
    """None: there is one pod."""
    processes: int
    """Of each pod."""
    disk_bytes_per_s: float | None = None

    @property
    def _host_bytes_per_s(self) -> float:
        return self.accelerator.link_gb_per_s * 1e9

    @property
    def _network_bytes_per_s(self) -> float | None:
        return None if self.network is None else self.network.bytes_per_s

    def probe(self, shape: ModelShape, batch: BatchShape, made: MemoryPlan) -> Probe:
        """What measuring it would find if it is as its data sheet says."""
        times = micro_batch_times(shape, batch, self.accelerator, made.offloaded_fraction)
        exchanged = self.sequences(shape, batch)
        link = float("inf") if self.accelerator.name == "cpu" else self._host_bytes_per_s
        return Probe(
            PassTimes(
                times.block_forward_s + exchanged.forward_s,
                times.block_backward_s + exchanged.backward_s,
                0.0,
                shape.layer_parameters,
            ),
            PassTimes(times.around_forward_s, times.around_backward_s, times.update_s, 0),
            link,
            link,
            self.disk_bytes_per_s or float("inf"),
            stated(self._network_bytes_per_s, self._host_bytes_per_s, made.ranks, self.processes),
        )

    def sequences(self, shape: ModelShape, batch: BatchShape) -> SequenceExchange:
        neighbours = among_neighbours(
            self._network_bytes_per_s, self._host_bytes_per_s, batch.sequence_parallel, self.processes
        )
        return of_sequences(shape, batch, neighbours)


def step_of_gang(
    machine: GangMachine,
    shape: ModelShape,
    batch: BatchShape,
    made: MemoryPlan,
    demand: Demand,
    division: Division,
) -> dict[str, Any]:
    """Seconds of a step, and of what its processes exchange, as JSON; `batch` with the activations of the plan."""
    found: Prediction = predict(made, demand, machine.probe(shape, batch, made), division)
    sequences, passes = machine.sequences(shape, batch), shape.layers * most_micro_batches(division)
    inside_s = passes * (sequences.forward_s + sequences.backward_s)
    inside = passes * (sequences.forward_bytes + sequences.backward_bytes)
    return {
        "secondsPerStep": found.step_s,
        "exchangeSeconds": found.exchange_s + inside_s,
        "exposedSeconds": found.exposed_s + inside_s,
        "sentBytes": found.sent_bytes + inside,
    }


def network_json(network: Network | None) -> dict[str, Any] | None:
    if network is None:
        return None
    return {
        "bytesPerSecond": round(network.bytes_per_s),
        "name": network.name or None,
        "assumed": network.assumed,
    }


def exchange_as_text(answer: Mapping[str, Any]) -> list[str]:
    """What the processes exchange in the job's mode, and over what."""
    chosen, network = answer["modes"][answer["mode"]], answer["network"]
    if network is None:
        over = "Inside a pod exchanges are taken to go over the link to the host, as its data sheet says."
    else:
        name = f" ({network['name']})" if network["name"] else ""
        why = "as --network says nothing" if network["assumed"] else "as stated"
        over = f"The network is taken to move {network['bytesPerSecond'] / 1e9:.3g} GB/s each way for a pod{name}, {why}."
    if not chosen["fits"]:
        return [over]
    return [
        f"In each step a process hands over {chosen['sentBytes'] / 2**20:,.1f} MiB in {chosen['exchangeSeconds']:.3g} s, of which "
        f"{chosen['exposedSeconds']:.3g} s are on top of the computation. {over}"
    ]
