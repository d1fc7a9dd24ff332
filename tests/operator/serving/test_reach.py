"""Replicas that answer nobody: by which evidence they are lost, when they count again, and what becomes of their pods."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tests.operator.builders import NOW, SETTINGS, admit, replica
from tests.operator.serving.test_reconcile import view, wanting

from busbar.kube.contracts.demand import ReplicaContact
from busbar.kube.informer import Key
from busbar.operator.serving.claims import claims
from busbar.operator.serving.metrics import LOST_BY, ScalingMetrics
from busbar.operator.serving.reach import Reach
from busbar.operator.serving.reconcile import reconcile
from busbar.operator.watch.projections import ANNOTATION_UNANSWERED, Pod, project_pod
from busbar.operator.write.actions import Create, Delete, Patch
from busbar.scheduler.autoscale.reach import RETURN_S, Evidence, Port, PortSeen, Word, heard, rule_of

URL = "http://10.0.0.{}:9400"


def row(index: int = 0, **fields: Any) -> ReplicaContact:
    return ReplicaContact(pod=f"web-{index}", url=URL.format(index), **fields)


def fails(index: int = 0, failures: int = 1, seconds: float = 1.0) -> ReplicaContact:
    return row(index, failures=failures, failing_seconds=seconds)


def serving(index: int, **fields: Any) -> Pod:
    return replica(index, **{"ip": f"10.0.0.{index}", "started_at": NOW - timedelta(hours=1), **fields})


@dataclass
class World:
    """Replicas, what their ports do, and the operator's clock."""

    pods: list[Pod]
    now_s: float = 1000.0
    ports: dict[str, PortSeen] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reach = Reach(
            lambda pod: self.asked.append(pod.key.name),
            lambda pod: f"http://{pod.ip}:9400",
            self.ports,
            lambda: self.now_s,
        )
        for pod in self.pods:
            self.ports[pod.uid] = PortSeen(True, 0.0)

    def port(self, index: int, answers: bool) -> None:
        self.ports[self.pods[index].uid] = PortSeen(answers, self.now_s)

    def look(self, *rows: ReplicaContact) -> dict[str, bool]:
        """What changes, by the pods' names; it is noted at them."""
        found = self.reach.look(self.pods, rows, NOW)
        for place, pod in enumerate(self.pods):
            if pod.uid in found:
                since = NOW if found[pod.uid] else None
                self.pods[place] = replace(pod, unanswered_since=since)
        return {pod.key.name: found[pod.uid] for pod in self.pods if pod.uid in found}

    def after(self, seconds: float, *rows: ReplicaContact) -> dict[str, bool]:
        self.now_s += seconds
        return self.look(*rows)


@pytest.mark.parametrize(
    ("evidence", "is_lost"),
    [
        (Evidence(Word.ALL, 1, 0.0, Port.SILENT, 3.0), True),
        (Evidence(Word.ALL, 1, 0.0, Port.SILENT, 2.9), False),
        (Evidence(Word.SOME, 1, 0.0, Port.SILENT, 3.0), True),
        (Evidence(Word.NONE, 0, 0.0, Port.SILENT, 300.0), False),
        (Evidence(Word.ALL, 3, 10.0, Port.ANSWERS, 300.0), True),
        (Evidence(Word.ALL, 2, 10.0, Port.ANSWERS, 300.0), False),
        (Evidence(Word.ALL, 3, 9.9, Port.ANSWERS, 300.0), False),
        (Evidence(Word.SOME, 99, 99.0, Port.ANSWERS, 300.0), False),
        (Evidence(Word.ALL, 3, 10.0, Port.UNKNOWN), True),
        (Evidence(Word.SOME, 99, 99.0, Port.UNKNOWN), False),
    ],
)
def test_what_gateways_say_and_what_the_port_does_decide_together(evidence: Evidence, is_lost: bool) -> None:
    assert (rule_of(evidence) is not None) is is_lost


def test_a_gateway_that_has_heard_a_replica_since_contradicts_another_and_an_older_word_does_not() -> None:
    assert heard([]) == heard([row(heard_seconds=2.0)]) == Evidence()
    assert heard([fails(seconds=5.0), row(heard_seconds=4.0)]).word is Word.SOME
    assert heard([fails(seconds=5.0), row(heard_seconds=6.0)]).word is Word.ALL
    both = heard([fails(failures=2, seconds=5.0), fails(failures=3, seconds=9.0)])
    assert (both.word, both.failures, both.failing_s) == (Word.ALL, 5, 9.0)


def test_a_replica_whose_port_is_silent_too_is_asked_at_once_and_lost_within_seconds() -> None:
    world = World([serving(0), serving(1)])
    assert world.look(fails()) == {}
    assert world.asked == ["web-0"], "only that of which somebody complains"
    world.port(0, answers=False)
    assert world.after(2.0, fails(seconds=2.0)) == {}
    assert world.after(1.0, fails(seconds=3.0)) == {"web-0": True}
    assert world.after(1.0, fails(seconds=4.0)) == {}, "it is told once"


def test_a_gateway_that_is_cut_off_or_lies_takes_nothing_from_a_replica_that_others_hear() -> None:
    world = World([serving(0), serving(1)])
    lies = [fails(index, 50, 100.0) for index in range(2)]
    hears = [row(index, heard_seconds=0.5) for index in range(2)]
    assert world.look(*lies, *hears) == {}
    # Alone it is believed of half of them at most, and then another replica starts; none is stopped.
    assert world.look(*lies) == {"web-0": True}
    assert world.after(1.0, *lies) == {}
    only = World([serving(0)])
    assert only.look(fails(0, 50, 100.0)) == {}, "it is the gateway's own network"


def test_replicas_that_start_beside_lost_ones_make_them_no_smaller_part() -> None:
    world = World([serving(index) for index in range(4)])
    lies = [fails(index, 50, 100.0) for index in range(4)]
    assert world.look(*lies) == {"web-0": True, "web-1": True}
    for index in (4, 5):
        world.pods.append(serving(index, ready=False))
        world.ports[world.pods[index].uid] = PortSeen(False, world.now_s)
    assert world.after(1.0, *lies) == {}
    world.pods[4:] = [serving(index) for index in (4, 5)]
    assert world.after(60.0, *lies) == {"web-2": True}, "three of six"


def test_an_operator_that_hears_no_replica_at_all_is_no_witness() -> None:
    world = World([serving(index) for index in range(4)])
    for index in range(4):
        world.port(index, answers=False)
    assert world.after(60.0, fails(0), row(0, heard_seconds=0.1)) == {}
    world.port(3, answers=True)
    assert world.after(60.0, fails(0), row(0, heard_seconds=0.1)) == {"web-0": True}


def test_the_ports_of_replicas_that_start_say_nothing_of_the_operator() -> None:
    world = World([serving(0), *(serving(index, ready=False) for index in (1, 2))])
    for index in range(3):
        world.port(index, answers=False)
    assert world.after(3.0, fails(seconds=3.0)) == {"web-0": True}


@pytest.mark.parametrize(
    "changes",
    [
        {"started_at": NOW - timedelta(seconds=1)},
        {"started_at": None},
        {"draining_since": NOW},
        {"phase": "Pending"},
        {"ip": "10.0.0.9"},
    ],
)
def test_what_kubernetes_starts_again_or_takes_away_or_has_replaced_is_left_to_that(changes: Any) -> None:
    world = World([serving(0, **changes), serving(1)])
    world.port(0, answers=False)
    assert world.after(60.0, fails(seconds=5.0)) == {}


def test_a_restarted_gateway_knows_of_no_failure_and_the_replica_stays_lost_until_its_port_answers() -> None:
    world = World([serving(0), serving(1)])
    world.port(0, answers=False)
    assert world.after(3.0, fails()) == {"web-0": True}
    assert world.after(60.0) == {}
    assert world.asked[-1] == "web-0"
    world.port(0, answers=True)
    assert world.after(RETURN_S - 0.1) == {}
    assert world.after(0.1, fails(seconds=70.0)) == {}, "a gateway still misses answers, and none has one"
    assert world.after(0.1, row(heard_seconds=0.2)) == {"web-0": False}


def test_a_replica_that_flaps_must_answer_twice_as_long_each_time() -> None:
    world = World([serving(0), serving(1)])
    for times in range(4):
        world.port(0, answers=False)
        assert world.after(3.0, fails()) == {"web-0": True}
        world.port(0, answers=True)
        assert world.after(RETURN_S * 2**times - 0.1) == {}
        assert world.after(0.1) == {"web-0": False}
    assert World([serving(0)]).look() == {}


# -- what becomes of its pod ---------------------------------------------------------------------------


def noted(**fields: Any) -> Pod:
    return serving(0, **{"unanswered_since": NOW - timedelta(seconds=5), **fields})


def test_it_is_noted_at_the_pod_and_told_once() -> None:
    for lost, note, reason in ((True, NOW.isoformat(), "ReplicaUnanswered"), (False, None, "ReplicaAnswers")):
        pod = serving(0) if lost else noted()
        update = reconcile(view(wanting(1), pod, reach={pod.uid: lost}))
        [patch] = [a for a in update.actions if isinstance(a, Patch)]
        assert patch.patch == {"metadata": {"annotations": {ANNOTATION_UNANSWERED: note}}}
        assert [r for r, _ in update.notices] == [reason]
    told = {"metadata": {"name": "x", "annotations": {ANNOTATION_UNANSWERED: NOW.isoformat()}}}
    assert project_pod(told).unanswered_since == NOW


def test_another_one_starts_beside_it_and_leaves_again_if_it_answers_before() -> None:
    of, beside = wanting(1), serving(1, ready=False)
    assert [c.job.id.split("/")[1] for c in claims(of, (noted(),), (), "team", NOW)] == ["1"]
    assert claims(of, (serving(0),), (), "team", NOW) == []
    update = reconcile(view(of, noted()), (admit(index=1),))
    assert [a.key.name for a in update.actions if isinstance(a, Create)] == ["web-1"]
    assert not [a for a in update.actions if isinstance(a, Patch | Delete)]
    assert update.status is not None
    assert (update.status.ready_replicas, update.status.desired_replicas) == (0, 1)
    assert reconcile(view(of, noted(), beside)).actions == (), "it may answer again"
    back = reconcile(view(of, serving(0), beside))
    assert [a.key.name for a in back.actions if isinstance(a, Patch)] == ["web-1"], "it is to drain"


def test_it_leaves_once_another_one_serves_and_its_time_is_up() -> None:
    of, beside = wanting(1), serving(1)
    long_ago = NOW - timedelta(seconds=SETTINGS.node_lost_s)
    assert reconcile(view(of, noted(), beside)).actions == ()
    alone = noted(unanswered_since=long_ago)
    assert reconcile(view(of, alone, serving(1, ready=False))).actions == ()
    update = reconcile(view(of, alone, beside))
    assert [a.key.name for a in update.actions if isinstance(a, Patch)] == ["web-0"], "it is to drain"
    off = reconcile(view(wanting(1, suspend=True), noted()))
    assert [a.key.name for a in off.actions if isinstance(a, Patch)] == ["web-0"]


def test_the_gateway_goes_on_asking_it() -> None:
    assert (noted().takes_requests, noted().stays, noted().is_open) == (False, False, True)
    assert not noted(draining_since=NOW).is_open


def test_each_lost_replica_is_counted_once_by_who_says_it_first() -> None:
    registry, key = CollectorRegistry(), Key("team", "web")
    metrics = ScalingMetrics(registry)

    def counted() -> tuple[float | None, ...]:
        name = "busbar_service_lost_replicas_total"
        return tuple(registry.get_sample_value(name, {"cause": cause}) for cause in LOST_BY)

    assert counted() == (0, 0)
    of = serving(0)
    for _ in range(2):
        metrics.show_lost(key, [of, serving(1, silent=True), serving(2)], {of.uid: True})
    assert counted() == (1, 1)
    metrics.show_lost(key, [noted(), serving(1, silent=True)], {})
    metrics.show_lost(key, [noted(silent=True), serving(1)], {})
    assert counted() == (1, 1), "it was lost before its node was"
    metrics.show_lost(key, [noted(), serving(1, silent=True)], {of.uid: False})
    assert counted() == (1, 2), "the other one had come back, and is lost again"
    metrics.show_lost(key, [of], {of.uid: True})
    assert counted() == (2, 2)
    metrics.show_lost(key, [serving(3, silent=True, draining_since=NOW)], {})
    assert counted() == (2, 2), "beside what leaves none starts"
    metrics.gone(key)
    metrics.show_lost(key, [noted()], {})
    assert counted() == (2, 2), "a restarted operator has counted it before"
