"""What the caches keep of our own kinds: a spec is read once, and objects that are alike share what they can."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, cast

from tests.cluster.harness import engine_job
from tests.operator.builders import pod

from busbar.kube.client import Object
from busbar.kube.errors import ConnectionFailed, NotFound
from busbar.kube.informer import Key
from busbar.kube.types import TrainingJob
from busbar.kube.types.meta import share_equal_parts
from busbar.kube.types.shape import GangShape
from busbar.operator.watch.caches import Caches

NAME = Key("ns", "job")


def made(name: str = "job", version: int = 1, generation: int = 1, **more: Any) -> Object:
    job = engine_job(name)
    meta = {
        "namespace": "ns",
        "uid": f"uid-{name}",
        "generation": generation,
        "resourceVersion": str(version),
    }
    return {**job, "metadata": {**job["metadata"], **meta}, **more}


def caches() -> Caches:
    return Caches(cast(Any, None), lambda *_: None, inactivity_s=60.0)


def test_a_spec_of_the_same_generation_is_not_read_again_and_a_later_one_is() -> None:
    found = caches().jobs
    found.observe(made())
    first = found.items[NAME]
    found.observe(made(version=2, status={"phase": "Running"}))
    assert found.items[NAME].spec is first.spec
    assert found.items[NAME].status is not None
    changed = made(version=3, generation=2)
    changed["spec"]["priority"] = 7
    found.observe(changed)
    assert found.items[NAME].spec.priority == 7
    again = made(version=4, generation=2)
    again["metadata"]["uid"] = "another"  # deleted and made anew, whatever its generation
    found.observe(again)
    assert found.items[NAME].spec.priority == first.spec.priority


def test_an_object_that_matched_no_schema_is_read_anew_when_it_is_corrected() -> None:
    found = caches().jobs
    bad = made()
    bad["spec"]["shape"] = "wrong"
    found.observe(bad)
    assert NAME not in found.items
    found.observe(made(version=2, generation=2))
    assert NAME in found.items


def test_the_tenant_of_a_namespace_follows_the_tenants() -> None:
    kept = caches()
    assert kept.tenant_of == {}
    for version, spaces in ((1, ["a"]), (2, ["a", "b"]), (3, [])):
        meta = {"name": "t", "uid": "u", "generation": version, "resourceVersion": str(version)}
        kept.tenants.observe({"kind": "Tenant", "metadata": meta, "spec": {"namespaces": spaces}})
        assert kept.tenant_of == dict.fromkeys(spaces, "t")


def test_models_with_the_same_fields_share_their_sets_and_copies_do_not() -> None:
    one, other = (TrainingJob.model_validate(made(name)) for name in ("one", "other"))
    plain = copy.deepcopy(one)
    for model in (one, other):
        share_equal_parts(model)
    assert one == plain
    assert one.model_dump(exclude_unset=True) == plain.model_dump(exclude_unset=True)
    assert one.spec.model_fields_set is other.spec.model_fields_set
    assert one.metadata.model_fields_set is other.metadata.model_fields_set
    changed = one.spec.model_copy(update={"priority": 3})
    assert "priority" in changed.model_fields_set
    assert "priority" not in other.spec.model_fields_set


def test_models_in_lists_share_their_sets_and_a_part_that_was_done_is_left_alone() -> None:
    ready = {
        "type": "Ready",
        "status": "True",
        "reason": "Running",
        "lastTransitionTime": "2026-03-01T12:00:00Z",
    }
    one, other = (
        TrainingJob.model_validate(made(name, status={"conditions": [ready]})) for name in ("one", "other")
    )
    share_equal_parts(one)
    share_equal_parts(other, done=other.spec)
    sets = [model.status.conditions[0].model_fields_set for model in (one, other)]  # type: ignore[union-attr,index]
    assert sets[0] is sets[1]
    assert one.spec.model_fields_set == other.spec.model_fields_set
    assert one.spec.model_fields_set is not other.spec.model_fields_set


def test_equal_parts_of_different_jobs_are_one_and_others_stay() -> None:
    def ended(name: str, second: int, **shape: Any) -> TrainingJob:
        at = f"2026-03-01T12:00:0{second}Z"
        conditions = [
            {"type": kind, "status": "False", "reason": "Queued", "message": "m", "lastTransitionTime": at}
            for kind in ("Ready", "Failed")
        ]
        model = TrainingJob.model_validate(made(name, status={"conditions": conditions}))
        model = model.model_copy(update={"spec": model.spec.model_copy(update={"shape": GangShape(**shape)})})
        share_equal_parts(model)
        return model

    one, same, later = ended("one", 1), ended("same", 1), ended("later", 2)
    conditions = [model.status.conditions for model in (one, same, later) if model.status is not None]
    assert conditions[0] is not None
    assert conditions[1] is not None
    assert conditions[2] is not None
    assert conditions[0][0] is conditions[1][0]
    assert conditions[0][0] is not conditions[0][1]
    assert conditions[2] != conditions[0]
    assert one.metadata is not same.metadata
    assert [model.metadata.name for model in (one, same, later)] == ["one", "same", "later"]
    assert one.spec.shape is same.spec.shape
    told = ended("told", 1, min_pods=1)
    assert told.spec.shape == one.spec.shape
    assert told.spec.shape.model_fields_set == {"min_pods"}, "what was given differs, so they are two"


def test_the_pods_of_the_newest_attempt_that_are_gone_are_known_until_their_job_is() -> None:
    kept = caches()
    kept.jobs.observe(made())

    def lose(name: str, attempt: int, owner: str = "uid-job") -> None:
        gone = replace(pod(attempt=attempt, owner_uid=owner), key=Key("ns", name))
        kept._pod_changed(gone.key, gone, None)

    assert kept.gone_pods("uid-job") == frozenset()
    for name, attempt in (("job-1-0", 1), ("job-2-0", 2), ("job-1-1", 1), ("job-2-1-r1", 2)):
        lose(name, attempt)
    lose("job-9-0", 9, owner="uid-of-another-job-of-this-name")
    assert kept.gone_pods("uid-job") == {"job-2-0", "job-2-1-r1"}
    again = made(version=2)
    again["metadata"]["uid"] = "another"
    kept.jobs.observe(again)
    assert kept.gone_pods("uid-job") == frozenset()


async def test_one_object_is_read_again_where_the_server_answers() -> None:
    answers: list[Object | Exception] = [
        ConnectionFailed("no answer"),
        made(version=2, status={"phase": "Queued"}),
        NotFound(404, "NotFound", "gone", "GET"),
    ]

    class Server:
        async def get(self, *what: object) -> Object:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    seen = Caches(cast(Any, Server()), lambda *_: None, inactivity_s=60.0)
    seen.jobs.observe(made())
    assert not await seen.read_again("TrainingJob", NAME)
    assert seen.jobs.items[NAME].status is None
    assert await seen.read_again("TrainingJob", NAME)
    assert seen.jobs.items[NAME].status is not None
    assert await seen.read_again("TrainingJob", NAME)
    assert not seen.jobs.items
