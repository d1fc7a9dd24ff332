"""What replicas of our engine are told while they run: how many KV blocks tenants may hold, which adapters to serve.

A replica starts with what the spec says at that moment. It tells what it was asked for last, so whoever operates it
next knows whether it has to be asked again: after a change of the spec, and after its container began anew with the
former one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from busbar.kube.contracts.wire import WireModel
from busbar.kube.contracts.workload import ServingStatus
from busbar.kube.types.engines import ServiceEngine
from busbar.operator.serving.view import ServiceView
from busbar.operator.write.actions import PostToPod


def ask(
    view: ServiceView, path: str, wanted: WireModel, differs: Callable[[ServingStatus], bool]
) -> Iterator[PostToPod]:
    """Of the replicas that are awake and were asked for something else."""
    if view.service.spec.engine is not ServiceEngine.BUILTIN:
        return
    body = wanted.model_dump(mode="json", by_alias=True)
    for pod in view.pods:
        reading = view.readings.get(pod.uid)
        if reading is None or not reading.ready or not pod.stays or not differs(reading):
            continue
        yield PostToPod(pod.key, pod.uid, path, view.settings.poll_timeout_s, repeats=True, body=body)
