"""Actions from the difference between current and planned placements."""

from __future__ import annotations

from dataclasses import replace

from busbar.scheduler import Action, ActionKind, Job, JobId, Policy, Snapshot
from busbar.scheduler.search.actions import actions
from busbar.scheduler.search.round import Round
from busbar.scheduler.search.state import PlanningState

from ..build import NOW, cluster, job, placed, speeds


def _round(snapshot: Snapshot) -> Round:
    return Round(PlanningState(snapshot, Policy(), NOW), NOW)


def _put(round_: Round, name: str, *nodes: str, of: str = "H100", release: bool = False) -> None:
    """Give the job this placement, whatever it has now."""
    assignment = round_.assignments[JobId(f"uid-{name}")]
    round_.clear(assignment)
    candidate = next(c for c in assignment.option.candidates if c.pool == of and c.pods == len(nodes))
    round_.put(assignment, candidate, nodes, release)


def _running(name: str, *nodes: str, size: int = 8, of: str = "H100", **more: object) -> Job:
    on = placed(of, *nodes, size=size)
    return replace(job(name, size=size, pods=len(nodes), on=on, saved=NOW - 60), **more)  # type: ignore[arg-type]


def _kinds(round_: Round) -> list[tuple[str, ActionKind]]:
    return [(str(action.job)[4:], action.kind) for action in actions(round_)]


def test_a_job_that_keeps_its_place_gets_no_action() -> None:
    round_ = _round(cluster(_running("r", "H100-0000"), H100=1))
    _put(round_, "r", "H100-0000")
    assert actions(round_) == ()


def test_a_waiting_job_starts() -> None:
    round_ = _round(cluster(job("w", size=4), H100=1))
    _put(round_, "w", "H100-0000")
    (start,) = actions(round_)
    assert (start.kind, start.assumed, start.after, start.cost) == (ActionKind.START, None, (), 0.0)
    assert start.to == placed("H100", "H100-0000", size=4)
    assert start.gain == round_.assignments[start.job].option.candidates[0].value
    assert start.reason == "starts on 1 x 4 H100 in pool H100: 100% of its best speed"


def test_a_start_in_a_victims_place_waits_for_it_and_comes_last() -> None:
    round_ = _round(cluster(_running("r", "H100-0000"), job("w", size=4), job("v", size=1), H100=2))
    round_.clear(round_.assignments[JobId("uid-r")])
    _put(round_, "w", "H100-0000")
    _put(round_, "v", "H100-0001")
    stop, free, late = actions(round_)
    assert (stop.kind, stop.to, stop.assumed) == (
        ActionKind.PREEMPT,
        None,
        placed("H100", "H100-0000", size=8),
    )
    assert stop.cost == 8 * (30 + 60), "the restart and the work since the last checkpoint, on eight"
    assert (free.job, free.after) == ("uid-v", ())
    assert (late.job, late.after) == ("uid-w", ("uid-r",))


def test_the_kind_says_what_changes() -> None:
    two = _running("two", "H100-0000", "H100-0001", min_pods=1, max_pods=4)
    table = speeds("", H100=1.0, L4=0.5)
    snapshot = replace(cluster(two, H100=4, L4=2), table=table)

    def kind(*nodes: str, of: str = "H100") -> ActionKind:
        round_ = _round(snapshot)
        _put(round_, "two", *nodes, of=of)
        ((_, found),) = _kinds(round_)
        return found

    assert kind("H100-0000") is ActionKind.SHRINK
    assert kind(*(f"H100-{i:04d}" for i in range(4))) is ActionKind.GROW
    assert kind("H100-0002", "H100-0003") is ActionKind.MOVE
    assert kind("L4-0000", "L4-0001", of="L4") is ActionKind.MOVE


def test_a_job_whose_next_place_is_not_free_yet_stops_or_goes_on_waiting() -> None:
    leaving = _running("s", "H100-0000")
    assert leaving.run is not None
    leaving = replace(leaving, run=replace(leaving.run, releasing=True))
    round_ = _round(cluster(leaving, _running("r", "H100-0001"), job("w", size=8), H100=2))
    _put(round_, "w", "H100-0000", release=True)
    assert _kinds(round_) == []
    round_.rewind()
    _put(round_, "r", "H100-0000", release=True)
    assert _kinds(round_) == [("r", ActionKind.PREEMPT)]


def test_the_same_decision_has_the_same_id() -> None:
    def start(node: str, **more: object) -> Action:
        one = replace(job("w", size=4), **more)  # type: ignore[arg-type]
        round_ = _round(cluster(one, job("other"), H100=2))
        _put(round_, "w", node)
        (found,) = actions(round_)
        return found

    first = start("H100-0000")
    assert start("H100-0000").id == first.id
    assert start("H100-0001").id != first.id
    assert start("H100-0000", preemptions=1).id != first.id, "it was stopped since: another start"
