"""Which of how many processes this one is, where they meet, and how long they wait for each other. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from busbar.kube.contracts.workload import MASTER_PORT, Env
from busbar.workloads.training.errors import InvalidJob


@dataclass(frozen=True)
class World:
    """`size` processes, numbered from 0, in pods of `per_pod` each. They meet at rank 0's `address`."""

    rank: int = 0
    size: int = 1
    address: str = "127.0.0.1"
    port: int = MASTER_PORT
    per_pod: int = 1

    @property
    def pods(self) -> int:
        return self.size // self.per_pod

    @property
    def speaks_for_pod(self) -> bool:
        """Whether this is the first process of its pod."""
        return self.rank % self.per_pod == 0


ALONE = World()


@dataclass(frozen=True)
class Patience:
    """How long ranks wait for each other, in seconds."""

    join_s: float = 900.0  # until all pods have started; images are pulled meanwhile
    beat_s: float = 1.0
    lost_after_s: float = 60.0  # of silence; more than any pause of a healthy process
    suspected_after_s: float = 5.0  # of silence, once a collective has failed
    collective_s: float = 1800.0  # until a rank that is alive, and does not come, is given up
    leave_s: float = 3.0  # for a rank's own end, when another one has ended


def world_of(environment: Mapping[str, str]) -> World:
    """The place in the gang that a pod's variables name. Raises InvalidJob."""
    rank, size, per_pod = (_number(environment, name, default) for name, default in _DEFAULTS)
    if not 0 <= rank < size:
        raise InvalidJob(Env.RANK, f"is {rank}, and {Env.WORLD_SIZE} is {size}", "set it from 0 to one less")
    if not per_pod or size % per_pod:
        raise InvalidJob(
            Env.LOCAL_WORLD_SIZE,
            f"is {per_pod}, and {Env.WORLD_SIZE} is {size}",
            "give all pods as many processes",
        )
    port = _number(environment, Env.MASTER_PORT, str(MASTER_PORT))
    if size > 1 and Env.MASTER_ADDR not in environment:
        raise InvalidJob(Env.MASTER_ADDR, "is not set", "set it to the address of rank 0")
    return World(rank, size, environment.get(Env.MASTER_ADDR, ALONE.address), port, per_pod)


_DEFAULTS = ((Env.RANK, "0"), (Env.WORLD_SIZE, "1"), (Env.LOCAL_WORLD_SIZE, "1"))


def _number(environment: Mapping[str, str], name: str, default: str) -> int:
    text = environment.get(name, default)
    if not text.isdecimal():
        raise InvalidJob(name, f"is {text!r} and not a number", "set it as torchrun does")
    return int(text)


PATIENT = Patience()
