"""How many more pods a namespace may have: pods that run, that admitted jobs will make, and that are being promised."""

from __future__ import annotations

from dataclasses import replace

from tests.operator.builders import admitted, gang, pod, running, tenant

from busbar.kube.informer import Key
from busbar.kube.types import Tenant, TrainingPhase
from busbar.operator.pods.room import PodRoom, Promised, pod_room

ME = Key("team", "me")


def limited(most: int = 8) -> Tenant:
    return tenant("a", ["team"], limits={"pods": most})


def test_nothing_is_said_where_nothing_is_limited() -> None:
    assert pod_room(None, ME, (), (), Promised()) is None
    assert pod_room(tenant("a", ["team"]), ME, (), (), Promised()) is None
    assert pod_room(tenant("a", ["team"], limits={"trainingJobs": 3}), ME, (), (), Promised()) is None


def test_pods_that_have_not_ended_count_whoever_made_them() -> None:
    alone = pod(0, owner="deployment", kind="", owner_uid="uid-x")
    ended = replace(running(1), phase="Succeeded")
    elsewhere = replace(running(2), key=Key("other", "p"))
    assert pod_room(limited(), ME, (alone, ended, elsewhere, running(3)), (), Promised()) == PodRoom(8, 6)


def test_an_admitted_gang_keeps_the_pods_that_it_has_not_made_yet() -> None:
    job = admitted(gang(4), 4)
    assert pod_room(limited(), ME, (), (job,), Promised()) == PodRoom(8, 4)
    assert pod_room(limited(), ME, (running(0), running(1)), (job,), Promised()) == PodRoom(8, 4)
    assert pod_room(limited(2), ME, (running(0), running(1)), (job,), Promised()) == PodRoom(2, 0)


def test_pods_that_have_ended_and_jobs_that_have_are_owed_nothing() -> None:
    job = admitted(gang(4), 4)
    halves = (replace(running(0), phase="Succeeded"), replace(running(1), phase="Succeeded"), running(2))
    assert pod_room(limited(), ME, halves, (job,), Promised()) == PodRoom(8, 6)
    over = admitted(gang(4), 4, phase=TrainingPhase.SUCCEEDED)
    assert pod_room(limited(), ME, (), (over,), Promised()) == PodRoom(8, 8)


def test_an_admission_that_is_being_written_counts_once() -> None:
    job = admitted(gang(4), 4)
    promised = Promised({Key("team", job.metadata.name): 4, Key("other", "x"): 3, ME: 2})
    assert pod_room(limited(), ME, (), (), promised) == PodRoom(8, 4)
    assert pod_room(limited(), ME, (), (job,), promised) == PodRoom(8, 4)


def test_the_sentence_says_what_helps() -> None:
    assert PodRoom(8, 4).lacking(4) == ""
    busy = PodRoom(8, 4).lacking(5)
    assert "needs 5 pods" in busy
    assert "4 of the 8 are left" in busy
    assert "until others have ended" in busy
    assert "ask for fewer pods" in PodRoom(8, 4).lacking(9)
