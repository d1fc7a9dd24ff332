"""Profiles tell gangs on one node from those on more, and pools of one type by their link class."""

from __future__ import annotations

from datetime import timedelta

import pytest
from tests.operator.builders import ENGINE, NOW, pool
from tests.operator.profiles.parts import POOLS, TEAM, TENANT_OF, look, profile, snapshot, written
from tests.operator.profiles.test_speeds import CONFIG, done, tokens

from busbar.api.portal.pool_views import profile_view
from busbar.kube.types import PerformanceProfile, TrainingJob
from busbar.kube.types.performance_profile import CellSource
from busbar.operator.pools.nodes import scheduler_pool
from busbar.operator.profiles.observations import place_of_admission, read, slack_at
from busbar.operator.profiles.table import performance_table
from busbar.operator.training.view import placement_of
from busbar.scheduler import Cell, Source, TableView

LATER = NOW + timedelta(hours=1)


def gang(name: str, speed: float, *nodes: str, link: str | None = None) -> TrainingJob:
    """Two pods that ended after their work at this speed, on these nodes."""
    at = done(speed, tokens() / speed + 60, name=name)
    assert at.status is not None
    assert at.status.admission is not None
    admission = at.status.admission.model_copy(update={"pods": 2, "nodes": list(nodes), "link_class": link})
    status = at.status.model_copy(update={"admission": admission})
    shape = at.spec.shape.model_copy(update={"min_pods": 2, "max_pods": 2})
    return at.model_copy(update={"status": status, "spec": at.spec.model_copy(update={"shape": shape})})


def waiting() -> TrainingJob:
    return gang("next", 1.0, "n").model_copy(update={"status": None})


def formula(key: str = "A100") -> float:
    table = performance_table((waiting(),), POOLS, TENANT_OF)
    return next(c.speed for c in table.cells if c.accelerator == key)


def measured(of: PerformanceProfile) -> dict[int, float]:
    assert of.status is not None
    return {c.nodes: c.tokens_per_second for c in of.status.cells or () if c.source is CellSource.MEASURED}


def kept(base: PerformanceProfile | None = None) -> PerformanceProfile:
    """The profile after a run on one node and one on two."""
    speed = formula()
    jobs = gang("one", 0.9 * speed, "a", "a"), gang("two", 0.5 * speed, "a", "b"), waiting()
    return written(base or profile(), *jobs, now=LATER)


def test_runs_on_one_node_and_on_two_are_two_cells_of_the_profile() -> None:
    of = kept()
    assert measured(of)[1] == pytest.approx(0.9 * formula(), rel=0.1)
    assert measured(of)[2] == pytest.approx(0.5 * formula(), rel=0.1)
    assert of.status is not None
    assert {c.nodes for c in of.status.evidence or ()} == {1, 2}
    shown = [row["place"] for row in profile_view(of).rows if row["place"].startswith("2 × A100")]
    assert shown == ["2 × A100 on 1 node", "2 × A100 on 2 nodes"]  # and none by formula, for any number


def test_when_the_jobs_are_gone_the_table_still_tells_them_apart() -> None:
    of = kept()
    view = TableView(performance_table((waiting(),), POOLS, TENANT_OF, (of,), (TEAM,)))
    speeds = [view.estimate(of.spec.workload_class, "A100", "resident", 2000, nodes=n) for n in (1, 2)]
    assert [round(each.speed / formula(), 1) for each in speeds if each is not None] == [0.9, 0.5]
    empty = read(of, {})
    assert {(c.nodes, c.source) for c in empty.predicted} == {(0, Source.FORMULA)}
    assert look(of, waiting(), now=LATER + timedelta(hours=1)).status is None


def test_an_end_is_told_by_the_speed_on_as_many_nodes() -> None:
    of = kept()
    admission = gang("x", 1.0, "a", "b").status.admission  # type: ignore[union-attr]
    assert admission is not None
    assert place_of_admission(admission) == ("A100", 2000, "resident", 1.0, 2)
    assert slack_at(of, admission) is not None


def test_what_was_stored_before_nodes_were_told_counts_for_any_number() -> None:
    of = written(profile(), gang("old", 0.6 * formula(), "a", "a"), waiting()).to_wire()
    for part in ("cells", "evidence"):
        for line in of["status"][part]:
            assert line.pop("nodes", 0) in (0, 1)
            line.pop("linkClass", None)
    old = PerformanceProfile.model_validate(of)
    view = TableView(performance_table((waiting(),), POOLS, TENANT_OF, (old,), (TEAM,)))
    found = [view.estimate(old.spec.workload_class, "A100", "resident", 2000, nodes=n) for n in (0, 1, 2)]
    assert len({each.speed for each in found if each is not None}) == 1
    assert found[0] is not None
    assert found[0].speed == pytest.approx(0.6 * formula(), rel=0.15)
    now = kept(old)
    assert measured(now).keys() == {0, 1, 2}
    assert measured(now)[2] == pytest.approx(0.5 * formula(), rel=0.15)


def test_a_stated_speed_may_name_its_nodes_and_its_link_class() -> None:
    line = {"accelerator": "A100", "accelerators": 2, "nodes": 2, "tokensPerSecond": 7.0, "override": True}
    of = profile(cells=[line, {**line, "nodes": 1, "linkClass": "pcie4", "tokensPerSecond": 9.0}])
    cells = read(of, {}).stated
    assert [(c.accelerator, c.nodes, c.speed) for c in cells] == [("A100", 2, 7.0), ("A100/pcie4", 1, 9.0)]


def test_pools_of_one_type_and_other_links_have_cells_of_their_own() -> None:
    pools = (
        POOLS[0],
        pool(
            "fast",
            accelerator="A100",
            resourceName="nvidia.com/gpu",
            interconnect={"linkClass": "nvlink-c2c"},
        ),
        pool("slow", accelerator="A100", resourceName="nvidia.com/gpu", interconnect={"linkClass": "pcie3"}),
    )
    engine = {**ENGINE, "model": {"config": CONFIG}, "steps": 10, "mode": "optimizer-offload"}
    spec = waiting().spec.model_dump(by_alias=True, exclude_none=True, mode="json") | {"engine": engine}
    job = TrainingJob.model_validate({**waiting().to_wire(), "spec": spec})
    table = performance_table((job,), pools, TENANT_OF)
    speed = {c.accelerator: c.speed for c in table.cells if isinstance(c, Cell)}
    assert speed["A100/pcie3"] < speed["A100"] < speed["A100/nvlink-c2c"]
    assert [rate.accelerator for rate in table.rates] == ["A100"]
    assert [scheduler_pool(each).key for each in pools] == ["A100", "A100/nvlink-c2c", "A100/pcie3"]


def test_an_admission_keeps_the_link_class_of_its_pool_and_reports_say_it() -> None:
    at = gang("linked", 0.5 * formula(), "a", "b", link="pcie4")
    assert at.status is not None
    assert at.status.admission is not None
    assert placement_of(at.status.admission).key == "A100/pcie4"
    [record] = snapshot(profile(), jobs=(at,)).table.records
    assert (record.accelerator, record.nodes) == ("A100/pcie4", 2)
    of = written(profile(), at, waiting())
    assert of.status is not None
    assert {(c.accelerator, c.link_class) for c in of.status.evidence or ()} == {("A100", "pcie4")}
    assert "2 × A100 (pcie4) on 2 nodes" in [row["place"] for row in profile_view(of).rows]
