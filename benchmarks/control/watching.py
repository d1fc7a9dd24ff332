"""When jobs and pods of a benchmark were submitted, admitted, ran and ended, as a client of the API server sees it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

from benchmarks.progress import show

from busbar.kube.client import KubeClient, Object
from busbar.kube.informer import Informer, Key
from busbar.kube.resources import PODS, TRAINING_JOBS

ENDED = ("Succeeded", "Failed")
LIMIT_S = 1800.0
MOMENTS = ("admitted", "running", "ended")


class Watcher:
    """Follows TrainingJobs, or bare pods and those of Jobs; times are seconds since the first was submitted."""

    def __init__(self, client: KubeClient, *, of_pods: bool) -> None:
        self._of_pods = of_pods
        self.pods: Informer[Object] = Informer(client, PODS, lambda obj: obj, self._pod_changed)
        self.informers: list[Informer[Object]] = [self.pods]
        if not of_pods:
            self.informers.append(Informer(client, TRAINING_JOBS, lambda obj: obj, self._job_changed))
        self.reset()

    def reset(self) -> None:
        """The next thing that is seen is the first; what is known now is never counted."""
        self._known = {key for informer in self.informers for key in informer.items}
        self.began = time.monotonic()
        self.at: dict[str, dict[Key, float]] = {moment: {} for moment in MOMENTS}
        self.phases: Counter[str] = Counter()
        self.pods_seen: dict[Key, set[str]] = {}
        """By name, the uids of the pods that had it."""
        self.pods_ended: dict[Key, float] = {}
        self.queued_writes = 0
        """Statuses that say that a job waits."""
        self.repeats = 0
        """Pod statuses that KWOK wrote again: nothing but times is another."""

    @property
    def now_s(self) -> float:
        return time.monotonic() - self.began

    def _job_changed(self, key: Key, old: Object | None, new: Object | None) -> None:
        if new is None or key in self._known:
            return
        status = new.get("status") or {}
        phase = status.get("phase", "New")
        if status.get("admission"):
            self.at["admitted"].setdefault(key, self.now_s)
        self.queued_writes += phase == "Queued"
        self._reached(key, phase)

    def _pod_changed(self, key: Key, old: Object | None, new: Object | None) -> None:
        if new is None or key in self._known:
            return
        if old is not None and old["metadata"]["uid"] == new["metadata"]["uid"]:
            self.repeats += _facts(old) == _facts(new)
        else:
            self.pods_seen.setdefault(key, set()).add(new["metadata"]["uid"])
        phase = (new.get("status") or {}).get("phase", "Pending")
        if phase in ENDED or new["metadata"].get("deletionTimestamp"):
            self.pods_ended.setdefault(key, self.now_s)
        if self._of_pods:
            if not new["spec"].get("schedulingGates"):
                self.at["admitted"].setdefault(key, self.now_s)
            self._reached(key, phase)

    def _reached(self, key: Key, phase: str) -> None:
        if phase in ("Running", *ENDED):
            self.at["running"].setdefault(key, self.now_s)
        if phase in ENDED and key not in self.at["ended"]:
            self.at["ended"][key] = self.now_s
            self.phases[phase] += 1

    def count(self, what: str, wanted: Callable[[Key], bool] = lambda key: True) -> int:
        """How many of those wanted did so."""
        return sum(map(wanted, self.at[what]))

    async def until(self, what: str, count: int, wanted: Callable[[Key], bool] = lambda key: True) -> bool:
        """Whether so many did so within the limit; shows how many have."""
        while (done := self.count(what, wanted)) < count and self.now_s < LIMIT_S:
            show(what, done, count)
            await asyncio.sleep(0.2)
        show(what, done, count)
        return done >= count

    def last(self, what: str) -> float | None:
        return round(max(self.at[what].values()), 1) if self.at[what] else None

    def pods_doubled(self) -> int:
        """Names that more than one pod had."""
        return sum(len(uids) > 1 for uids in self.pods_seen.values())


def _facts(pod: Object) -> tuple[object, ...]:
    """What a pod's writers decide: phase, node, gates, why it is not bound, and the spec's and the object's end."""
    status, spec, meta = pod.get("status") or {}, pod["spec"], pod["metadata"]
    bound: Object = next((c for c in status.get("conditions") or () if c["type"] == "PodScheduled"), {})
    return (
        status.get("phase"), spec.get("nodeName"), str(spec.get("schedulingGates")), bound.get("reason"),
        meta.get("generation"), meta.get("deletionTimestamp"), str(meta.get("finalizers")), str(meta.get("labels")),
    )  # fmt: skip


def longest_free_s(submitted: list[float], admitted: list[float], freed: list[float], places: int) -> float:
    """The longest that a free place was not given to a job that waited.

    The k-th place that becomes free is that of admission number `places` + k; it waits for the later of the two: the place,
    and the job of that number.
    """
    submitted, admitted, freed = sorted(submitted), sorted(admitted), sorted(freed)
    waits = [
        at - max(freed[number], submitted[number + places])
        for number, at in enumerate(admitted[places:])
        if number < len(freed) and number + places < len(submitted)
    ]
    return max(waits, default=0.0)
