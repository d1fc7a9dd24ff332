"""A link that became slow is said, once, with the direction; and what copies took is counted."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.small import manifest, with_text
from tests.training.test_bit_equality import CPU
from tests.training.test_schedule import make_trainer

from busbar.workloads.machine.streams import CallerStream, Streams, WorkerStream
from busbar.workloads.training import link_pace
from busbar.workloads.training import trainer as trainer_module
from busbar.workloads.training.control import Control
from busbar.workloads.training.environment import run_from_manifest
from busbar.workloads.training.link_pace import LOAD, STORE, LinkPace, TimedStream
from busbar.workloads.training.report import Lines
from busbar.workloads.training.run import run
from busbar.workloads.training.status import Status

MIB = 2**20


class Clock:
    """Seconds that pass only where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


class Paced(WorkerStream):
    """A direction of a link whose copies take as long as their bytes need."""

    def __init__(self, bytes_per_s: float, clock: Clock) -> None:
        super().__init__("paced")
        self.bytes_per_s, self.clock = bytes_per_s, clock

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        def paced() -> None:
            target.copy_(source)
            self.clock.passes(source.nbytes / self.bytes_per_s)

        self.submit(paced)


def test_copies_are_timed_and_what_they_wait_for_is_not() -> None:
    clock, data = Clock(), torch.zeros(MIB, dtype=torch.uint8)
    queue = TimedStream(Paced(4 * MIB, clock), CPU, clock)
    for _ in range(2):
        queue.submit(lambda: clock.passes(8.0))
        queue.copy(torch.empty_like(data), data)
    queue.synchronize()
    queue.count()
    assert (queue.bytes, queue.seconds) == (2 * MIB, 0.5)
    queue.close()


def test_a_copy_that_is_not_over_is_counted_when_it_is() -> None:
    clock, gate, data = Clock(), threading.Event(), torch.zeros(MIB, dtype=torch.uint8)
    inner = Paced(4 * MIB, clock)
    queue = TimedStream(inner, CPU, clock)
    inner.submit(gate.wait)
    queue.copy(torch.empty_like(data), data)
    queue.count()
    assert (queue.bytes, queue.seconds) == (0, 0.0)
    gate.set()
    queue.synchronize()
    queue.count()
    assert (queue.bytes, queue.seconds) == (MIB, 0.25)
    queue.close()


@pytest.fixture
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the device had a link, of which little is enough to tell."""
    monkeypatch.setattr(trainer_module, "has_link", lambda device: True)
    monkeypatch.setattr(link_pace, "LEAST_BYTES", 1)
    monkeypatch.setattr(link_pace, "SLOW_ENOUGH", 3)


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("direction", [LOAD, STORE])
def test_the_direction_that_became_slow_is_named_once(direction: str) -> None:
    clock, caller = Clock(), CallerStream()
    ways = {each: Paced(1000 * MIB, clock) for each in (LOAD, STORE)}
    pace = LinkPace(Streams(ways[LOAD], caller, caller, ways[STORE]), CPU, clock)
    data, warnings, told = torch.zeros(4 * MIB, dtype=torch.uint8), [], []
    for step in range(9):
        if step == 4:
            ways[direction].bytes_per_s = 100 * MIB
        for queue in (pace.streams.load, pace.streams.store):
            queue.copy(torch.empty_like(data), data)
            queue.synchronize()
        pace.finish_step()
        warnings.append(pace.warning())
        told.append(pace.slow())
    assert [bool(each) for each in warnings] == [step == 6 for step in range(9)]
    assert [each is not None for each in told] == [step >= 6 for step in range(9)]
    assert f"the link {'to' if direction == LOAD else 'from'} the device moved less than half" in warnings[6]
    said = told[6]
    assert said is not None
    assert said == {
        "direction": direction,
        "bytesPerSecond": 100 * MIB,
        "usualBytesPerSecond": 1000 * MIB,
    }
    pace.streams.close()


@pytest.mark.usefixtures("_emulated")
def test_a_step_counts_what_crosses_the_link() -> None:
    from tests.training.test_bit_equality import packed

    trainer = make_trainer(manifest(steps=3)["spec"]["engine"], "optimizer-offload")
    trainer.step(packed())
    trainer.drain()
    assert trainer.link is not None
    trainer.link.finish_step()
    optimizer = trainer.optimizer
    assert trainer.link.bytes == {LOAD: optimizer.loaded_bytes, STORE: optimizer.stored_bytes}
    assert min(trainer.link.seconds.values()) > 0
    trainer.close()


@pytest.mark.usefixtures("_emulated")
def test_a_run_says_that_its_link_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_pace, "SLOW", 1e9)  # as if every step after the third had been slow
    given: dict[str, Any] = {"steps": 12, "mode": "optimizer-offload"}
    job = run_from_manifest(manifest(**given), with_text(tmp_path), None, {})
    status, said = Status(), io.StringIO()
    assert run(job, status, Control(), Lines("small", said)) == 0
    assert said.getvalue().count("less than half of the usual") in (1, 2), "once for each direction"
    found = status.to_json()["link"]
    assert found["direction"] in (LOAD, STORE)
    assert found["usualBytesPerSecond"] > 0
    assert b"busbar_training_link_seconds_total" in status.to_prometheus()
