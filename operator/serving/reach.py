"""Which replicas answer nobody, before Kubernetes says so (`scheduler/autoscale/reach.py` decides).

    gateways' /demand: requests without an answer ──┐
    its own port, which the operator asks at once ──┼──► rules ──► lost ──► annotation on its pod, another one starts beside it
                                                    └──► answers again for a while ──► annotation gone, the other one leaves

A replica whose container Kubernetes is starting again is left to that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime

from busbar.kube.contracts.demand import ReplicaContact
from busbar.operator.watch.projections import Pod, Sleep
from busbar.scheduler.autoscale import reach
from busbar.scheduler.autoscale.reach import PortSeen, Seen, Word


class Reach:
    """What to note at the replicas of services. `look` is asked at each reconcile."""

    def __init__(
        self,
        ask: Callable[[Pod], None],
        url_of: Callable[[Pod], str],
        ports: Mapping[str, PortSeen],
        clock: Callable[[], float],
    ) -> None:
        """
        Args:
            ask: reads a replica's port now, in the background.
            url_of: the address under which the gateways know it; empty: none.
            ports: by pod uid; the times are those of `clock`.
        """
        self._ask, self._url_of, self._ports, self._clock = ask, url_of, ports, clock
        self._reach = reach.Reach()

    def look(
        self, pods: Collection[Pod], rows: Iterable[ReplicaContact], now: datetime
    ) -> Mapping[str, bool]:
        """What changes, by pod uid. True: it is lost; False: it answers again."""
        by_url: dict[str, list[ReplicaContact]] = {}
        for row in rows:
            by_url.setdefault(row.url, []).append(row)
        should = [pod for pod in pods if _should_answer(pod)]
        said = {
            pod.uid: reach.heard([r for r in by_url.get(self._url_of(pod), ()) if r.pod == pod.key.name])
            for pod in should
        }
        starting = {
            pod.uid
            for pod in should
            if reach.starts(pod.ready, pod.unanswered_since is not None, said[pod.uid])
        }
        deaf = reach.is_deaf([seen for uid, seen in self._ports.items() if uid not in starting])
        now_s, serving = self._clock(), list[Seen]()
        for pod in should:
            evidence = reach.with_port(said[pod.uid], self._ports.get(pod.uid), deaf, now_s)
            lost = pod.unanswered_since is not None
            if lost or evidence.word is not Word.NONE:
                self._ask(pod)
            runs_s = None if pod.started_at is None else (now - pod.started_at).total_seconds()
            serving.append(Seen(pod.uid, evidence, runs_s, lost, pod.ready))
        return self._reach.look(serving, now_s)


def _should_answer(pod: Pod) -> bool:
    return pod.phase == "Running" and not pod.leaving and pod.sleep in (None, Sleep.AWAKE)
