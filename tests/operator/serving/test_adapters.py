"""Replicas are asked for the adapters that the spec has now, and its status says which they serve."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from tests.operator.builders import RENDERING, SETTINGS, replica, service

from busbar.kube.contracts.adapters import AskedAdapter, AskedAdapters
from busbar.kube.contracts.workload import AdapterReport, ServingStatus
from busbar.kube.types.service_status import AdapterStatus
from busbar.operator.serving.adapters import NOT_YET, adapter_problem, adapter_rows, lacking
from busbar.operator.serving.reconcile import reconcile
from busbar.operator.serving.view import ModelPlace, ServiceUpdate, ServiceView
from busbar.operator.watch.projections import Pod
from busbar.operator.write.actions import PostToPod

ADAPTERS = [{"name": "a", "uri": "pvc://claim/a"}, {"name": "b", "uri": "pvc://claim/b"}]
GOOD, BAD = AdapterReport(name="a"), AdapterReport(name="b", message="rank 4096")


def rows(
    *reports: AdapterReport, old: list[AdapterStatus] | None = None, **spec: Any
) -> list[tuple[str, int, str | None]]:
    pods: list[Pod] = [replica(0), replica(1)]
    readings = {pods[0].uid: ServingStatus(adapters=list(reports))}
    found = adapter_rows(service(**({"adapters": ADAPTERS} | spec)), pods, readings, old)
    return [(row.name, row.replicas, row.message) for row in found]


def test_each_adapter_says_how_many_replicas_serve_it_or_why_none_does() -> None:
    assert rows(GOOD, BAD) == [("a", 1, None), ("b", 0, "rank 4096")]
    assert rows() == [("a", 0, None), ("b", 0, None)]


def test_a_message_stays_until_a_replica_serves_the_adapter() -> None:
    old = [AdapterStatus(name="b", replicas=0, message="rank 4096")]
    assert rows(old=old)[1] == ("b", 0, "rank 4096")
    assert rows(AdapterReport(name="b"), old=old)[1] == ("b", 1, None)


def test_there_is_a_problem_where_a_replica_refuses_the_adapter_and_none_serves_it() -> None:
    pods: list[Pod] = [replica(0), replica(1)]
    served, refused = AdapterReport(name="b"), AdapterReport(name="b", message="rank 4096")

    def problem(*reports: AdapterReport) -> str | None:
        readings = {pod.uid: ServingStatus(adapters=[each]) for pod, each in zip(pods, reports, strict=False)}
        return adapter_problem("b", pods, readings)

    assert problem(refused) == problem(refused, refused) == "rank 4096"
    assert problem(refused, served) is None
    assert problem() is None  # nobody has said


def test_adapters_that_the_spec_does_not_name_and_those_of_vllm_are_left_out() -> None:
    assert rows(AdapterReport(name="c")) == [("a", 0, None), ("b", 0, None)]
    assert rows(GOOD, engine="vllm", image="vllm") == []
    assert rows(GOOD, adapters=None) == []


ASKED = AskedAdapters(adapters=[AskedAdapter(**each) for each in ADAPTERS]).digest


def update(
    *reports: AdapterReport, asked: str | None = ASKED, status: dict[str, Any] | None = None, **fields: Any
) -> ServiceUpdate:
    pod = replica(0, ip="10.0.0.1", port=9400)
    spec: dict[str, Any] = {"replicas": 1, "minReplicas": 0, "adapters": ADAPTERS} | fields
    reading = ServingStatus(ready=True, adapters=list(reports), adapters_asked=asked)
    return reconcile(
        ServiceView(
            service(status=status, **spec),
            (pod,),
            datetime(2026, 1, 1, tzinfo=UTC),
            SETTINGS,
            RENDERING,
            ModelPlace(uri="pvc://claim/model"),
            readings={pod.uid: reading},
        )
    )


def posts(*reports: AdapterReport, **fields: Any) -> list[tuple[str, Any]]:
    return [
        (each.path, each.body) for each in update(*reports, **fields).actions if isinstance(each, PostToPod)
    ]


def test_a_replica_that_was_asked_for_others_is_asked_for_those_of_the_spec() -> None:
    assert posts() == []
    assert posts(asked="others") == [("/adapters", {"adapters": ADAPTERS})]
    assert posts(adapters=None) == [("/adapters", {"adapters": []})]
    assert posts(adapters=ADAPTERS[::-1]) == [], "their order does not matter"
    assert posts(asked=None) == [], "an engine of an older release cannot be asked"
    assert posts(asked="others", engine="vllm", image="vllm:1") == []


def test_events_tell_what_came_and_went_while_a_replica_serves_and_what_is_refused() -> None:
    old = [{"name": "gone", "replicas": 1}, {"name": "a", "replicas": 1}]
    found = update(GOOD, BAD, status={"adapters": old, "readyReplicas": 1})
    assert [each for each in found.notices if each[0].startswith("Adapter")] == [
        ("AdapterAdded", "Adapter b is new; 1 replica shall serve it."),
        ("AdapterRemoved", "Adapter gone is not in the spec any more; requests that have it end with it."),
        ("AdapterRefused", "Adapter b is refused: rank 4096"),
    ]
    assert found.status is not None
    again = update(GOOD, BAD, status=found.status.model_dump(mode="json", by_alias=True))
    assert not [each for each in again.notices if each[0].startswith("Adapter")]
    started = update(GOOD, GOOD, status={"readyReplicas": 0})
    assert not [each for each in started.notices if each[0].startswith("Adapter")], "a start is no change"


def test_an_adapter_that_no_replica_has_read_is_a_problem_and_one_that_some_have_is_not() -> None:
    pods: list[Pod] = [replica(0), replica(1)]

    def problem(*reports: list[AdapterReport]) -> str | None:
        told = [ServingStatus(adapters=each, adapters_asked=ASKED) for each in reports]
        return adapter_problem("b", pods, {p.uid: each for p, each in zip(pods, told, strict=True)})

    served = AdapterReport(name="b")
    assert problem([GOOD], [GOOD]) == NOT_YET
    assert problem([GOOD], [BAD]) == "rank 4096"
    assert problem([GOOD], [served]) is None


def test_routes_know_what_each_replica_lacks() -> None:
    spec = service(adapters=ADAPTERS).spec
    assert lacking(spec, ServingStatus(adapters=[GOOD, BAD], adapters_asked=ASKED)) == ["b"]
    assert lacking(spec, ServingStatus(adapters=[GOOD], adapters_asked="others")) == ["b"]
    assert lacking(spec, ServingStatus(adapters=[GOOD])) == [], "it does not tell what it was asked for"
    assert lacking(spec, None) == []
