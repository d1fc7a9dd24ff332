"""A disk that takes checkpoints slower than before is noticed."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
import torch
from tests.training.small import manifest

from busbar.workloads.machine.direct_file import BusyClock, DirectFile
from busbar.workloads.training import disk_pace
from busbar.workloads.training.control import Control
from busbar.workloads.training.disk_pace import LEAST_BYTES, DiskPace
from busbar.workloads.training.environment import run_from_manifest
from busbar.workloads.training.report import Lines
from busbar.workloads.training.run import run
from busbar.workloads.training.status import Status
from busbar.workloads.training.usual_rate import ENOUGH, KEPT

SIZE = LEAST_BYTES


def after(*seconds: float, probed: float | None = None, size: int = SIZE) -> DiskPace:
    """Checkpoints that kept the disk busy for so long."""
    pace = DiskPace()
    pace.probed = probed
    for each in seconds:
        pace.moved(size, each)
    return pace


def test_slow_checkpoints_are_counted_beside_the_usual_rate() -> None:
    said = after(1.0, 1.1, 0.9, 2.5, 3.0).said()
    assert said == {"bytesPerSecond": round(SIZE / 3), "usualBytesPerSecond": SIZE, "slowInARow": 2}
    assert after(1.0, 1.1, 0.9, 2.5, 1.2).said()["slowInARow"] == 0
    assert after(1.0, 1.1, 0.9, 1.9).said()["slowInARow"] == 0


def test_what_is_slow_never_becomes_usual() -> None:
    said = after(1.0, 1.0, 1.0, *[5.0] * 50).said()
    assert (said["slowInARow"], said["usualBytesPerSecond"]) == (50, SIZE)


def test_a_disk_that_becomes_faster_is_measured_by_that() -> None:
    said = after(*[4.0] * ENOUGH, *[1.0] * KEPT, 3.0).said()
    assert (said["slowInARow"], said["usualBytesPerSecond"]) == (1, SIZE)


def test_before_there_are_enough_a_probe_says_what_is_usual() -> None:
    assert after(1.0, 1.0).said()["usualBytesPerSecond"] is None
    assert after(9.0, 9.0).said()["slowInARow"] == 0
    assert after(9.0, 9.0, probed=SIZE).said()["slowInARow"] == 2


def test_it_is_warned_of_once() -> None:
    pace, warnings = after(1.0, 1.0, 1.0), []
    for seconds in (3.0, 4.0, 3.0, 1.0, 3.0):
        pace.moved(SIZE, seconds)
        warnings.append(pace.warning())
    assert [bool(each) for each in warnings] == [False, True, False, False, False]
    assert "the usual 32 MiB/s, the newest at 8 MiB/s" in warnings[1]


def test_what_is_too_little_to_count_repeats_no_warning() -> None:
    pace = after(1.0, 1.0, 1.0, 3.0, 4.0)
    assert pace.warning()
    pace.moved(LEAST_BYTES - 1, 1.0)
    assert (pace.warning(), pace.is_slow) == ("", True)


def test_a_run_says_at_what_rate_its_checkpoints_were_written(
    text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_pace, "LEAST_BYTES", 1)
    monkeypatch.setattr(disk_pace, "SLOW", 1e9)  # as if every one after the third had been slow
    job = run_from_manifest(manifest(steps=24), tmp_path, None, {})
    status, said = Status(), io.StringIO()
    assert run(job, status, Control(), Lines("small", said)) == 0
    found = status.to_json()["checkpoint"]
    assert found["bytesPerSecond"] > 0
    assert found["usualBytesPerSecond"] > 0
    assert found["slowInARow"] >= 2
    assert said.getvalue().count("the disk took the last 2 checkpoints") == 1


@pytest.mark.parametrize(("size", "seconds"), [(LEAST_BYTES - 1, 1.0), (SIZE, 0.0), (SIZE, -1.0)])
def test_too_little_says_nothing(size: int, seconds: float) -> None:
    said = after(seconds, size=size, probed=SIZE).said()
    assert said == {"bytesPerSecond": None, "usualBytesPerSecond": SIZE, "slowInARow": 0}


class Clock:
    """Time that passes when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr("busbar.workloads.machine.direct_file.time.monotonic", lambda: self.now_s)


def test_time_in_which_several_write_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, busy = Clock(monkeypatch), BusyClock()
    with busy:
        clock.now_s += 1.0
        with busy:
            clock.now_s += 2.0
        clock.now_s += 3.0
        assert busy.seconds == 0.0, "it has not ended"
    assert busy.seconds == 6.0
    clock.now_s += 50.0
    assert busy.seconds == 6.0
    with busy:
        clock.now_s += 0.5
    assert busy.seconds == 6.5


def test_a_file_counts_its_writes_and_what_makes_it_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, write = Clock(monkeypatch), os.pwrite

    def slow_write(descriptor: int, data: memoryview, offset: int) -> int:
        clock.now_s += 2.0
        return write(descriptor, data, offset)

    def slow_sync(descriptor: int) -> None:
        clock.now_s += 3.0

    monkeypatch.setattr(os, "pwrite", slow_write)
    monkeypatch.setattr(os, "fsync", slow_sync)
    with DirectFile(tmp_path / "file", 8192) as file:
        clock.now_s += 50.0
        file.write(torch.zeros(8192, dtype=torch.uint8), 0)
        written_s = file.busy.seconds
        clock.now_s += 50.0
    assert written_s >= 2.0
    assert written_s % 2.0 == 0.0, "each call of the system takes two seconds here"
    assert file.busy.seconds == written_s + 3.0
