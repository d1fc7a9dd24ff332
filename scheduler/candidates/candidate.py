"""One way to run a job, and all ways of one job."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

from ..model.snapshot import Job, Placement, Resources


@dataclass(unsafe_hash=True, slots=True)
class Candidate:
    """One way to run a job. `value` is per hour; 1.0 of it is one job of weight 1 at its best speed.

    Never changed once it is made, like all candidates and options: `frozen` would make a plan's many seven times as slow
    to build.
    """

    pool: str
    accelerator: str
    mode: str
    pods: int
    per_pod: Resources
    speed: float
    """Work units per second (mean)."""
    value: float
    watts: float
    draw_w: int = 0
    """What each pod adds to its power domains; 0 where none limits."""
    nodes: int = 0
    """Different nodes that it may stand on at most; 0: any number, at the speed of the most that are known."""
    link: str = ""
    """Link class of the pool."""
    power_cap: float = 1.0
    """As in `Placement`; below 1, only on nodes that `capped.py` allows."""

    @property
    def accelerators_m(self) -> int:
        return self.pods * self.per_pod.accelerators_m

    @property
    def form(self) -> Form:
        """What tells it from other candidates of a job."""
        return self.pool, self.mode, self.pods, self.per_pod, self.nodes, self.power_cap

    def placed(self, nodes: tuple[str, ...], devices: tuple[int, ...] = ()) -> Placement:
        """This candidate on these nodes, shares on these devices of them (one per rank)."""
        return Placement(
            self.pool,
            self.accelerator,
            self.mode,
            nodes,
            self.per_pod,
            devices,
            self.draw_w,
            self.link,
            self.power_cap,
        )


Sizes = tuple[tuple[str, int], ...]
Form = tuple[str, str, int, Resources, int, float]
"""Pool, mode, pods, what each requests, nodes, power cap."""


@dataclass(frozen=True, slots=True)
class SharedCandidates:
    """What jobs with the same request have in common: candidates worth `value` per unit of weight."""

    candidates: tuple[Candidate, ...]
    best_speed: float
    excluded: tuple[str, ...]
    sizes: Sizes
    """The different (accelerator, amount) of the candidates."""


@dataclass(unsafe_hash=True, slots=True)
class Options:
    """All candidates of a job, best value first, and the scale of their values."""

    job: Job
    candidates: tuple[Candidate, ...]
    weight: float
    best_speed: float
    shared: SharedCandidates

    @property
    def excluded(self) -> tuple[str, ...]:
        """Why no candidate is left: "accelerator", "tenant", "memory" (in the order of the checks)."""
        return self.shared.excluded

    @property
    def sizes(self) -> Sizes:
        """The different (accelerator, amount) of the candidates."""
        return self.shared.sizes

    def listed(self, placement: Placement) -> Candidate | None:
        """The candidate that a placement is an instance of; None: it is of another size, or the job could not be
        started like this today."""
        found: list[Candidate] = []
        for candidate in self.candidates:
            if (
                candidate.pool == placement.pool
                and candidate.mode == placement.mode
                and candidate.pods == placement.pods
                and candidate.per_pod == placement.per_pod
                and candidate.power_cap == placement.power_cap
            ):
                if not candidate.nodes and not found:
                    return candidate  # most jobs: no speed is known by nodes
                found.append(candidate)
        return on_nodes(found, len(set(placement.nodes)))


def on_nodes(candidates: Iterable[Candidate], nodes: int = 0) -> Candidate | None:
    """Of candidates that differ in nodes, the one for fewest that may stand on so many (0: for fewest of all)."""
    able = [one for one in candidates if not (nodes and one.nodes) or one.nodes >= nodes]
    return min(able, key=lambda one: one.nodes or sys.maxsize, default=None)
