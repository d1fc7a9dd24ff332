"""What the seconds of a step are spent on: told by the training thread, and all of them."""

from __future__ import annotations

from typing import Any

import pytest
from tests.training.small import SEQUENCES, VOCABULARY, engine
from tests.training.test_bit_equality import CPU, packed, plan_for
from torch.utils._python_dispatch import TorchDispatchMode

from busbar.workloads.training.job import parse_engine
from busbar.workloads.training.model import open_model
from busbar.workloads.training.step_clock import PHASES, StepClock, Stopwatch
from busbar.workloads.training.trainer import Trainer


def test_each_moment_belongs_to_what_ended_it() -> None:
    moments = iter([10.0, 10.5, 11.5, 13.0, 13.25])
    clock = StepClock(CPU, lambda: next(moments))
    clock.ended("forward")  # outside of a step
    clock.begin()
    for phase in ("other", "forward", "backward", "forward"):
        clock.ended(phase)
    clock.finish()
    clock.finish()
    assert clock.seconds == {**dict.fromkeys(PHASES, 0.0), "other": 0.5, "forward": 1.25, "backward": 1.5}


def test_a_stopwatch_counts_what_is_inside() -> None:
    moments = iter([10.0, 10.5, 20.0, 20.25])
    watch = Stopwatch(CPU, lambda: next(moments))
    assert watch.seconds == 0
    for _ in range(2):
        with watch:
            pass
    assert watch.seconds == 0.75


class Work(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What torch does in one thread: each operation takes a second, and to look at the clock a thousandth."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seconds += 1.0
        return func(*args, **(kwargs or {}))

    def clock(self) -> float:
        self.seconds += 0.001
        return self.seconds


@pytest.mark.parametrize(
    ("placement", "changes", "spent", "not_spent"),
    [
        ("resident", {}, {"forward", "backward", "update"}, {"exchange", "load"}),
        ("optimizer-offload", {"schedule": "gated"}, {"forward", "backward", "wait"}, {"exchange", "load"}),
        ("parameter-offload", {}, {"forward", "backward", "load"}, {"exchange"}),
        ("resident", {"parallelism": {"order": "fixed"}}, {"forward", "backward", "exchange"}, {"load"}),
        (
            "resident",
            {"mode": "auto", "optimizer": {"name": "ZerothOrder"}},
            {"forward", "update"},
            {"backward", "exchange", "load"},
        ),
    ],
    ids=["resident", "gated", "weights on the host", "fixed order", "no backward pass"],
)
def test_the_seconds_of_all_phases_are_those_of_the_steps(
    placement: str, changes: dict[str, Any], spent: set[str], not_spent: set[str]
) -> None:
    spec = parse_engine(engine(steps=6, batch={"sequences": SEQUENCES, "microBatch": 1}, **changes))
    recipe = open_model(spec, None, VOCABULARY, 0)
    work = Work()
    trainer = Trainer(spec, recipe, plan_for(spec, recipe, placement), CPU, clock=work.clock)
    data = packed()
    with work:
        whole = sum(trainer.step(data).seconds for _ in range(6))
    trainer.drain()
    trainer.close()
    seconds = trainer.clock.seconds
    assert 0.9 * whole < sum(seconds.values()) <= whole  # what is not said is between two lines
    for phase, each in seconds.items():
        assert phase not in spent or each > 0, phase
        assert phase not in not_spent or each == 0, phase
