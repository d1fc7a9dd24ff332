"""The forecasts row resumes where it stopped, uses no future data, and is scored as documented."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from benchmarks.scheduling.forecasts import Asked, Promises, Trailing, ask, pinball
from benchmarks.scheduling.parts import folder, kept, lines
from benchmarks.scheduling.philly import FIRST, Load, Row, as_seen, light

from busbar.scheduler import Policy, what_if
from busbar.scheduler.simulate.trace import TraceJob


def sent(number: int, at: float, pods: int, hours: float) -> TraceJob:
    return TraceJob(
        f"{number:03d}", at, hours * 3600, {"gpu": 1.0}, pods=pods, per_pod_m=8000, tenant=f"t{number % 2}"
    )


def load() -> Load:
    """Two tenants fill the cluster for a day; later arrivals have to wait."""
    before = [sent(i, FIRST - 86400 + i, 10, 25 + 2 * i) for i in range(8)]
    waiting = [sent(8 + i, FIRST + 60 * i, 5, 1 + i) for i in range(6)]
    return Load((*before, *waiting), {"t0": 0.5, "t1": 0.5})


def asked(trace: Load, rows: list[Row], part: Path) -> list[Asked]:
    return [found for _, found in ask(trace, rows, Policy(), Promises(part), 1)]


def test_promises_of_an_interrupted_run_are_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, part = load(), tmp_path / "forecasts.jsonl"
    rows = light(trace, Policy(), FIRST + 9 * 86400)
    whole = asked(trace, rows, part)
    assert len(whole) == 3
    text = part.read_text()
    part.write_text("".join(text.splitlines(keepends=True)[:4]) + text.splitlines()[4][:-3])
    made = []

    def counted(*question: object) -> object:
        made.append(question)
        return what_if(*question)  # type: ignore[arg-type]

    monkeypatch.setattr("benchmarks.scheduling.forecasts.what_if", counted)
    assert asked(trace, rows, part) == whole
    assert len(made) == 2
    assert part.read_text() == text


def test_a_promise_does_not_depend_on_what_happens_later(tmp_path: Path) -> None:
    trace = load()
    rows = light(trace, Policy(), FIRST + 9 * 86400)
    later = [
        Row(row.at + (5000 if row.at > FIRST + 400 else 0), row.kind, row.job, row.nodes) for row in rows
    ]
    one = {a["job"]: a for a in asked(trace, rows, tmp_path / "one")}
    other = {a["job"]: a for a in asked(trace, later, tmp_path / "other")}
    assert one.keys() == other.keys()
    for job, found in one.items():
        assert {k: v for k, v in found.items() if k != "waited_s"} == {
            k: v for k, v in other[job].items() if k != "waited_s"
        }


def test_an_unfinished_replay_is_made_again_and_a_finished_one_is_not(tmp_path: Path) -> None:
    part = tmp_path / "replay.jsonl"

    def breaks() -> object:
        yield [1]
        raise RuntimeError("power")

    with pytest.raises(RuntimeError):
        kept(part, breaks())  # type: ignore[arg-type]
    assert kept(part, [[1], [2]]) == [[1], [2]]
    assert kept(part, [[3]]) == [[1], [2]]
    assert lines(tmp_path / "nothing") == []


def test_parts_of_other_data_or_another_policy_are_not_taken_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    data = tmp_path / "data.csv"
    data.write_text("a")
    first = folder("x", data, "policy")
    assert first == folder("x", data, "policy")
    assert first != folder("x", data, "other")
    data.write_text("b")
    assert first != folder("x", data, "policy")


def test_the_reference_forecast_is_the_week_before_by_tenant_and_size() -> None:
    week = Trailing(60.0)
    few, many = sent(0, 0.0, 1, 1.0), sent(0, 0.0, 4, 1.0)
    for i in range(10):
        week.add(100.0 + 10 * i, as_seen(few))
    week.add(5000.0, as_seen(many))
    assert week.quantiles(6000.0, as_seen(few)) == pytest.approx((145.0, 181.0))
    # One wait of its size is too few, so all waits of its tenant are used.
    assert week.quantiles(6000.0, as_seen(many)) == pytest.approx((150.0, 190.0))
    assert week.quantiles(8 * 86400.0, as_seen(few)) == (0.0, 0.0)


def test_pinball_loss() -> None:
    """One hour late at p50 costs half of it, at p90 nine tenths; one hour early a half and a tenth."""
    hour = 3600.0
    assert pinball(np.array([2 * hour]), np.array([[hour, hour]])) == pytest.approx((0.5 + 0.9) / 2)
    assert pinball(np.array([hour]), np.array([[2 * hour, 2 * hour]])) == pytest.approx((0.5 + 0.1) / 2)
