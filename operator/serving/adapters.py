"""The adapters of a service: replicas are asked to serve those of the spec, and the status and the routes say which do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from busbar.kube.contracts.adapters import ADAPTERS_PATH, AskedAdapter, AskedAdapters
from busbar.kube.contracts.workload import AdapterReport, ServingStatus
from busbar.kube.types import ModelService
from busbar.kube.types.engines import ServiceEngine
from busbar.kube.types.model_service import ModelServiceSpec
from busbar.kube.types.reasons import Reason
from busbar.kube.types.service_status import AdapterStatus
from busbar.operator.serving.asking import ask
from busbar.operator.serving.view import ServiceView
from busbar.operator.watch.projections import Pod
from busbar.operator.write.actions import Action
from busbar.operator.write.status import clip

NOT_YET = "no replica has read it yet"


def wanted_adapters(service: ModelService) -> AskedAdapters:
    return AskedAdapters(
        adapters=[AskedAdapter(name=each.name, uri=each.uri) for each in service.spec.adapters or ()]
    )


def ask_for_adapters(view: ServiceView) -> Iterator[Action]:
    """Of the replicas that are awake and were asked for others."""
    wanted = wanted_adapters(view.service)
    return ask(view, ADAPTERS_PATH, wanted, lambda told: told.adapters_asked not in (None, wanted.digest))


def lacking(spec: ModelServiceSpec, reading: ServingStatus | None) -> list[str]:
    """Adapters of the spec that a replica does not serve; none where it does not tell."""
    if reading is None or reading.adapters_asked is None or spec.engine is not ServiceEngine.BUILTIN:
        return []
    served = {report.name for report in reading.adapters if report.message is None}
    return [each.name for each in spec.adapters or () if each.name not in served]


def adapter_problem(name: str, pods: Iterable[Pod], readings: Mapping[str, ServingStatus]) -> str | None:
    """Why none of the replicas that take requests serves the adapter; None where one does, or may."""
    reasons = []
    for pod in pods:
        if not pod.takes_requests:
            continue
        reading = readings.get(pod.uid)
        report = None if reading is None else next((r for r in reading.adapters if r.name == name), None)
        if report is not None and report.message is None:
            return None
        if report is not None:
            reasons.append(report.message)
        elif reading is not None and reading.adapters_asked is not None:
            reasons.append(NOT_YET)
    return next((why for why in reasons if why != NOT_YET), reasons[0] if reasons else None)


def adapter_rows(
    service: ModelService,
    serving: Iterable[Pod],
    readings: Mapping[str, ServingStatus],
    old: Iterable[AdapterStatus] | None,
) -> list[AdapterStatus]:
    """One row for each adapter of the spec, from the replicas that take requests; other engines than ours report none.

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


def adapter_notices(view: ServiceView, rows: Iterable[AdapterStatus] | None) -> list[tuple[str, str]]:
    """Events of adapters that came, went, or were refused since the last status, while replicas serve."""
    serving = sum(pod.takes_requests for pod in view.pods)
    old = {row.name: row for row in view.status.adapters or ()}
    new = {row.name: row for row in rows or ()}
    found: list[tuple[str, str]] = []
    if serving and view.status.ready_replicas:
        replicas = f"{serving} {'replica' if serving == 1 else 'replicas'}"
        found += [
            (Reason.ADAPTER_ADDED, f"Adapter {name} is new; {replicas} shall serve it.")
            for name in new
            if name not in old
        ]
        found += [
            (
                Reason.ADAPTER_REMOVED,
                f"Adapter {name} is not in the spec any more; requests that have it end with it.",
            )
            for name in old
            if name not in new
        ]
    found += [
        (Reason.ADAPTER_REFUSED, f"Adapter {row.name} is refused: {row.message}")
        for row in new.values()
        if row.message is not None and (row.name not in old or old[row.name].message is None)
    ]
    return [(reason, clip(words)) for reason, words in found]
