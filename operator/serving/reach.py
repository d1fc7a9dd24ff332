"""Which replicas answer nobody, before Kubernetes says so: by what gateways have had from them, and by their own ports.

    gateways' /demand: requests without an answer ──┐
    its own port, which the operator asks at once ──┼──► RULES ──► lost ──► annotation on its pod, another one starts beside it
                                                    └──► answers again for a while ──► annotation gone, the other one leaves

A gateway may be cut off from a replica that is well, or lie. So its word alone counts only where no gateway has heard the replica
since, and only for half of a service's replicas. A replica whose container Kubernetes is starting again is left to that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, auto

from busbar.kube.contracts.demand import ReplicaContact
from busbar.operator.pods.prober import PortSeen
from busbar.operator.watch.projections import Pod, Sleep


class Word(Enum):
    """What the gateways say of a replica."""

    NONE = auto()
    """No request lacks an answer."""
    SOME = auto()
    """Requests lack one; another gateway has heard the replica since."""
    ALL = auto()
    """Requests lack one, and no gateway has heard it since."""


class Port(Enum):
    """What the operator has from the replica's own port."""

    ANSWERS = auto()
    SILENT = auto()
    UNKNOWN = auto()
    """It may not be asked, has refused, or the operator hears from no replica at all."""


@dataclass(frozen=True)
class Rule:
    """A replica is lost where all of it holds."""

    words: frozenset[Word]
    ports: frozenset[Port]
    failures: int = 1
    """Requests without an answer, at least."""
    failing_s: float = 0.0
    """For so long."""
    silent_s: float = 0.0
    """The port has been silent for so long."""
    most: float = 1.0
    """Part of the service's replicas that may be lost by it."""


RULES = (
    Rule(frozenset({Word.SOME, Word.ALL}), frozenset({Port.SILENT}), silent_s=3.0),
    Rule(
        frozenset({Word.ALL}),
        frozenset({Port.ANSWERS, Port.UNKNOWN}),
        failures=3,
        failing_s=10.0,
        most=0.5,
    ),
)
"""A port is polled every two seconds: three of silence are at least two asks, and by then Kubernetes has told of a container that
ended. Without the port's silence it takes more than one request that kills its connection."""
RETURN_S, MOST_RETURN_S = 10.0, 300.0
"""A lost replica counts again when its port has answered for so long; twice as long each time it is lost again."""
AGAIN_S = 600.0
"""That is forgotten after so long."""
FEW_PORTS = 3
"""Where as many are asked and none answers, it is the operator that is cut off."""


@dataclass(frozen=True)
class Evidence:
    """What is known of one replica."""

    word: Word = Word.NONE
    failures: int = 0
    failing_s: float = 0.0
    port: Port = Port.UNKNOWN
    port_s: float = 0.0
    """For how long the port has answered, or been silent."""


def heard(rows: Sequence[ReplicaContact]) -> Evidence:
    """What the gateways say together, one row each."""
    failing = [row for row in rows if row.failing_seconds is not None]
    if not failing:
        return Evidence()
    longest = max(row.failing_seconds or 0.0 for row in failing)
    others = [row for row in rows if row.failing_seconds is None]
    since = any(row.heard_seconds is not None and row.heard_seconds < longest for row in others)
    failures = sum(row.failures for row in failing)
    return Evidence(Word.SOME if since else Word.ALL, failures, longest)


def rule_of(evidence: Evidence) -> Rule | None:
    """The first rule by which it is lost; None: it is not."""
    return next((rule for rule in RULES if _holds(rule, evidence)), None)


def _holds(rule: Rule, evidence: Evidence) -> bool:
    silent_s = evidence.port_s if evidence.port is Port.SILENT else 0.0
    return (
        evidence.word in rule.words
        and evidence.port in rule.ports
        and evidence.failures >= rule.failures
        and evidence.failing_s >= rule.failing_s
        and silent_s >= rule.silent_s
    )


@dataclass
class _Losses:
    """How often a replica was lost lately."""

    count: int
    last_s: float


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
        self._losses: dict[str, _Losses] = {}

    def look(
        self, pods: Collection[Pod], rows: Iterable[ReplicaContact], now: datetime
    ) -> Mapping[str, bool]:
        """What changes, by pod uid. True: it is lost; False: it answers again."""
        by_url: dict[str, list[ReplicaContact]] = {}
        for row in rows:
            by_url.setdefault(row.url, []).append(row)
        serving = [pod for pod in pods if _should_answer(pod)]
        found: dict[str, bool] = {}
        lost = sum(pod.unanswered_since is not None for pod in serving)
        for pod in serving:
            said = [row for row in by_url.get(self._url_of(pod), ()) if row.pod == pod.key.name]
            evidence = self._with_port(pod, heard(said))
            if pod.unanswered_since is not None or evidence.word is not Word.NONE:
                self._ask(pod)
            if pod.unanswered_since is not None:
                if self._is_back(pod, evidence):
                    found[pod.uid] = False
            elif _runs_since(pod, evidence.failing_s, now):
                rule = rule_of(evidence)
                if rule is not None and lost + 1 <= rule.most * len(serving):
                    lost += 1
                    found[pod.uid] = True
                    self._count(pod.uid)
        return found

    def _with_port(self, pod: Pod, said: Evidence) -> Evidence:
        seen = self._ports.get(pod.uid)
        deaf = len(self._ports) >= FEW_PORTS and not any(each.answers for each in self._ports.values())
        if seen is None or (deaf and not seen.answers):
            port, port_s = Port.UNKNOWN, 0.0
        else:
            port, port_s = Port.ANSWERS if seen.answers else Port.SILENT, self._clock() - seen.since_s
        return Evidence(said.word, said.failures, said.failing_s, port, port_s)

    def _is_back(self, pod: Pod, evidence: Evidence) -> bool:
        losses = self._losses.get(pod.uid)
        return_s = (
            min(MOST_RETURN_S, RETURN_S * 2.0 ** (losses.count - 1)) if losses is not None else RETURN_S
        )
        return evidence.port is Port.ANSWERS and evidence.port_s >= return_s and evidence.word is not Word.ALL

    def _count(self, uid: str) -> None:
        now_s = self._clock()
        self._losses = {u: each for u, each in self._losses.items() if now_s - each.last_s < AGAIN_S}
        before = self._losses.get(uid)
        self._losses[uid] = _Losses(1 if before is None else before.count + 1, now_s)


def _should_answer(pod: Pod) -> bool:
    return pod.phase == "Running" and not pod.leaving and pod.sleep in (None, Sleep.AWAKE)


def _runs_since(pod: Pod, seconds: float, now: datetime) -> bool:
    """Whether its process has run for so long, as Kubernetes says: one that was started since then is not what failed."""
    return pod.started_at is not None and (now - pod.started_at).total_seconds() > seconds
