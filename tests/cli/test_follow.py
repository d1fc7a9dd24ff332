"""Following an object: when it ends, what it prints, and how long it waits for a server that does not answer."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rich.console import Console

from busbar.cli import follow
from busbar.cli.errors import JobFailed, Unreachable
from busbar.cli.output import columns, duration, facts
from busbar.cli.results import MODEL_SERVICE, TRAINING_JOB, Kind, Object


def found(
    phase: str, kind: Kind = TRAINING_JOB, generation: int = 1, observed: int = 1, **status: Any
) -> Object:
    return Object(
        kind,
        {
            "metadata": {"name": "x", "namespace": "n", "generation": generation},
            "status": {"phase": phase, "observedGeneration": observed, **status},
        },
    )


class Time:
    """A clock that moves only when the code under test sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def script(*steps: Object | Exception) -> Callable[[], Object]:
    left: Iterator[Object | Exception] = iter(steps)

    def get() -> Object:
        step = next(left)
        if isinstance(step, Exception):
            raise step
        return step

    return get


def phases(get: Callable[[], Object], time: Time, timeout_s: float | None = None) -> list[str]:
    states = follow.states(get, timeout_s=timeout_s, clock=time.clock, sleep=time.sleep)
    return [state.phase for state in states]


def test_a_job_is_followed_until_it_has_ended() -> None:
    get = script(found("Queued"), found("Running"), found("Succeeded"), found("never asked"))
    assert phases(get, Time()) == ["Queued", "Running", "Succeeded"]


def test_an_object_that_takes_the_place_of_the_one_that_is_followed_is_not_taken_for_it() -> None:
    first, second = found("Running"), found("Succeeded")
    first.metadata["uid"], second.metadata["uid"] = "a", "b"
    with pytest.raises(JobFailed, match="job/x was deleted, and another object of that name was created"):
        phases(script(first, second), Time())


def test_a_service_is_followed_until_it_is_ready() -> None:
    get = script(found("Starting", MODEL_SERVICE), found("Ready", MODEL_SERVICE))
    assert phases(get, Time()) == ["Starting", "Ready"]


def test_an_end_before_the_last_change_was_seen_is_not_the_end() -> None:
    get = script(found("Succeeded", generation=2, observed=1), found("Succeeded", generation=2, observed=2))
    assert len(phases(get, Time())) == 2


def test_a_server_that_is_away_for_a_while_is_waited_for() -> None:
    get = script(found("Running"), *[Unreachable("away")] * 60, found("Succeeded"))
    assert phases(get, Time()) == ["Running", "Succeeded"]


def test_a_server_that_stays_away_is_given_up() -> None:
    time = Time()
    with pytest.raises(Unreachable):
        phases(script(found("Running"), *[Unreachable("away")] * 1000), time)
    assert follow.PATIENCE_S < time.now < follow.PATIENCE_S + 3


def test_the_wait_ends_after_the_time_given() -> None:
    time = Time()
    with pytest.raises(TimeoutError):
        phases(script(*[found("Running")] * 100), time, timeout_s=10)
    assert time.now == 10


def test_a_failed_job_is_an_error_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    get = script(found("Failed", reason="RetriesExhausted", message="It broke."))
    with pytest.raises(JobFailed, match=r"RetriesExhausted.*It broke\..*busbar logs trainingjob/x"):
        follow.follow(get)


def test_without_a_terminal_each_change_and_each_tenth_is_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = follow.Display()
    shown.show(found("Queued", message="Waits for 1 cpu."))
    shown.show(found("Queued", message="Waits for 1 cpu."))
    for step in (1, 5, 10, 11, 25):
        shown.show(
            found("Running", progress={"step": step, "totalSteps": 100, "loss": 2.0, "etaSeconds": 90})
        )
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "trainingjob/x: Queued: Waits for 1 cpu.",
        "trainingjob/x: Running",
        "trainingjob/x: step 10/100, loss 2.0000, 1m30s left",
        "trainingjob/x: step 25/100, loss 2.0000, 1m30s left",
    ]


def test_on_a_terminal_a_run_is_a_bar_below_its_lines() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    with follow.bar_on(console) as shown:
        for _ in range(3):  # one read a second; one line per change
            shown.show(found("Queued", message="Waits for [1] cpu."))
        shown.show(found("Running", progress={"step": 25, "totalSteps": 100, "loss": 2.0}))
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert text.count("trainingjob/x: Queued: Waits for [1] cpu.") == 1
    assert "step 25/100, loss 2.0000" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0, "0s"), (59.6, "1m00s"), (310, "5m10s"), (11520, "3h12m"), (532800, "6d4h")],
)
def test_durations_read_as_kubectl_writes_them(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_columns_are_aligned_and_nothing_is_cut() -> None:
    text = columns(["a", "long head"], [("x" * 200, None), ("y", True)])
    lines = text.splitlines()
    assert lines[0] == "A" + " " * 201 + "LONG HEAD"
    assert lines[1].endswith("  -")
    assert lines[2].split() == ["y", "yes"]


def test_facts_leave_out_what_is_not_known() -> None:
    assert facts([("Name", "x"), ("Pool", ""), ("Attempts", 0)]) == "Name:     x\nAttempts: 0"
