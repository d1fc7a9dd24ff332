"""Which replicas answer nobody, before Kubernetes says so: by what gateways have had from them, and by their own ports.

    changes = reach.look(replicas, now_s)      what to note, by replica: it is lost, or answers again

A gateway may be cut off from a replica that is well, or lie. So its word alone counts only where no gateway has heard the replica
since, and only for half of a service's replicas. A replica whose process was started again meanwhile is left to that.

The operator decides by it, on pods, gateways and ports, and so does the simulator. Here are also the times by which the others who
look after a replica give it up: the kubelet, Kubernetes and the operator.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol


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


@dataclass(frozen=True, slots=True)
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
    """Part of the service's replicas that may be lost by it; those that start do not count."""


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
POLL_PERIOD_S = 2.0
"""How often the operator asks a port."""
POLL_TIMEOUT_S = 2.0
NODE_UNREADY_S = 40.0
"""Kubernetes' default until a node without a heartbeat counts as one that does not answer."""
NODE_LOST_S = 60.0
"""The operator gives up what is on such a node so much later; and a replica that answers nobody, where enough others serve."""


@dataclass(frozen=True, slots=True)
class Probe:
    """How the kubelet asks a replica."""

    period_s: int
    failures: int
    """In a row, until it counts as failed."""
    timeout_s: int

    @property
    def failed_s(self) -> float:
        """How long at most after a replica has fallen silent that is."""
        return self.period_s + (self.failures - 1) * max(self.period_s, self.timeout_s) + self.timeout_s


READINESS = Probe(period_s=1, failures=2, timeout_s=2)
"""Of a replica that takes requests."""
LIVENESS = Probe(period_s=20, failures=6, timeout_s=5)
"""Its container is started again."""


class Told(Protocol):
    """What one gateway has had from one replica lately (`contacts.Said`, `ReplicaContact` on the wire)."""

    @property
    def failures(self) -> int: ...
    @property
    def failing_seconds(self) -> float | None: ...
    @property
    def heard_seconds(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class PortSeen:
    """Whether a replica's port answers, and since which ask (of the prober's clock) it has done so or not."""

    answers: bool
    since_s: float


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of one replica."""

    word: Word = Word.NONE
    failures: int = 0
    failing_s: float = 0.0
    port: Port = Port.UNKNOWN
    port_s: float = 0.0
    """For how long the port has answered, or been silent."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A replica that should answer."""

    name: str
    evidence: Evidence
    runs_s: float | None
    """For how long its process has run; None: it does not run."""
    lost: bool = False
    """It is noted that it answers nobody."""
    ready: bool = True
    """Kubernetes counts it as one that serves."""

    @property
    def starts(self) -> bool:
        """Whether it has not served yet."""
        return starts(self.ready, self.lost, self.evidence)


def heard(rows: Sequence[Told]) -> Evidence:
    """What the gateways say together, one row each."""
    failing = [row for row in rows if row.failing_seconds is not None]
    if not failing:
        return Evidence()
    longest = max(row.failing_seconds or 0.0 for row in failing)
    others = [row for row in rows if row.failing_seconds is None]
    since = any(row.heard_seconds is not None and row.heard_seconds < longest for row in others)
    failures = sum(row.failures for row in failing)
    return Evidence(Word.SOME if since else Word.ALL, failures, longest)


def starts(ready: bool, lost: bool, said: Evidence) -> bool:
    """Whether a replica has not served yet: nobody says that it should, so the silence of its port tells nothing."""
    return not (ready or lost) and said.word is Word.NONE


def is_deaf(ports: Collection[PortSeen]) -> bool:
    """Whether none of the ports that the operator asks answers, so that it is no witness; without those of replicas that start."""
    return len(ports) >= FEW_PORTS and not any(each.answers for each in ports)


def with_port(said: Evidence, seen: PortSeen | None, deaf: bool, now_s: float) -> Evidence:
    """What the gateways say, beside what the operator has from the port; None: it has not been asked, or has refused."""
    if seen is None or (deaf and not seen.answers):
        port, port_s = Port.UNKNOWN, 0.0
    else:
        port, port_s = Port.ANSWERS if seen.answers else Port.SILENT, now_s - seen.since_s
    return Evidence(said.word, said.failures, said.failing_s, port, port_s)


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


@dataclass(slots=True)
class _Losses:
    """How often a replica was lost lately."""

    count: int
    last_s: float


class Reach:
    """Decides, and remembers how often each replica was lost lately."""

    def __init__(self) -> None:
        self._losses: dict[str, _Losses] = {}

    def look(self, replicas: Iterable[Seen], now_s: float) -> dict[str, bool]:
        """What changes, by name, among the replicas of one service that should answer. True: it is lost; False: it answers again."""
        serving = list(replicas)
        found: dict[str, bool] = {}
        lost = sum(each.lost for each in serving)
        known = sum(not each.starts for each in serving)
        for each in serving:
            if each.lost:
                if self._is_back(each):
                    found[each.name] = False
            elif each.runs_s is not None and each.runs_s > each.evidence.failing_s:
                # (One that was started since then is not what failed.)
                rule = rule_of(each.evidence)
                if rule is not None and lost + 1 <= rule.most * known:
                    lost += 1
                    found[each.name] = True
                    self._count(each.name, now_s)
        return found

    def _is_back(self, replica: Seen) -> bool:
        losses, evidence = self._losses.get(replica.name), replica.evidence
        return_s = (
            min(MOST_RETURN_S, RETURN_S * 2.0 ** (losses.count - 1)) if losses is not None else RETURN_S
        )
        return evidence.port is Port.ANSWERS and evidence.port_s >= return_s and evidence.word is not Word.ALL

    def _count(self, name: str, now_s: float) -> None:
        self._losses = {n: each for n, each in self._losses.items() if now_s - each.last_s < AGAIN_S}
        before = self._losses.get(name)
        self._losses[name] = _Losses(1 if before is None else before.count + 1, now_s)


def may_answer_again(waited_s: float, serving: int, desired: int, lost_s: float = NODE_LOST_S) -> bool:
    """Whether a replica that answers nobody is left where it is: for as long as one on a silent node, and until others serve."""
    return desired > 0 and (waited_s < lost_s or serving < desired)
