"""What a service's status says of its adapters, from what the replicas report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from busbar.kube.contracts.workload import AdapterReport, ServingStatus
from busbar.kube.types import ModelService
from busbar.kube.types.model_service import ServiceEngine
from busbar.kube.types.service_status import AdapterStatus
from busbar.operator.watch.projections import Pod
from busbar.operator.write.status import clip


def adapter_problem(name: str, pods: Iterable[Pod], readings: Mapping[str, ServingStatus]) -> str | None:
    """Why none of the replicas that take requests serves the adapter; None where one does, or none has said."""
    told = [
        report
        for pod in pods
        if pod.takes_requests and pod.uid in readings
        for report in readings[pod.uid].adapters
        if report.name == name
    ]
    if not told or any(report.message is None for report in told):
        return None
    return told[0].message


def adapter_rows(
    service: ModelService,
    serving: Iterable[Pod],
    readings: Mapping[str, ServingStatus],
    old: Iterable[AdapterStatus] | None,
) -> list[AdapterStatus]:
    """One row for each adapter of the spec, from the replicas that take requests; vLLM reports none.

    A message stays until a replica serves the adapter, so that it is there while no replica answers.
    """
    if service.spec.engine is not ServiceEngine.BUILTIN:
        return []
    told: dict[str, list[AdapterReport]] = {}
    for pod in serving:
        reading = readings.get(pod.uid)
        for report in reading.adapters if reading is not None else ():
            told.setdefault(report.name, []).append(report)
    messages = {row.name: row.message for row in old or ()}
    rows = []
    for adapter in service.spec.adapters or ():
        reports = told.get(adapter.name, [])
        served = sum(report.message is None for report in reports)
        why = next((report.message for report in reports if report.message is not None), None)
        if why is None and not served:
            why = messages.get(adapter.name)
        rows.append(AdapterStatus(name=adapter.name, replicas=served, message=clip(why) if why else None))
    return rows
