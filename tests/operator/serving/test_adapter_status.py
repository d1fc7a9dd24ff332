"""What a service's status says of its adapters."""

from __future__ import annotations

from typing import Any

from tests.operator.builders import replica, service

from busbar.kube.contracts.workload import AdapterReport, ServingStatus
from busbar.kube.types.service_status import AdapterStatus
from busbar.operator.serving.adapter_status import adapter_problem, adapter_rows
from busbar.operator.watch.projections import Pod

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
