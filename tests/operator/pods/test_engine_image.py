"""The image that nodes report decides whether a run is the platform's engine; no field that a member writes does."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.operator.builders import NOW, RENDERING, SETTINGS, admitted, ended, gang, job, running, view
from tests.operator.builders import with_status as written

from busbar.kube.types import TrainingJob
from busbar.kube.types.training_status import CheckedImage
from busbar.operator.pods.engine_image import EngineImage, check, digest_of
from busbar.operator.training.reconcile import reconcile
from busbar.operator.watch.projections import Pod, project_pod

OURS = RENDERING.workloads_image
DIGEST, OTHER = f"sha256:{'a' * 64}", f"sha256:{'b' * 64}"


def runs(rank: int = 0, image: str = OURS, digest: str = DIGEST, **fields: Any) -> Pod:
    return running(rank, image=image, image_id=f"registry/x@{digest}" if digest else "", **fields)


def seen(of: TrainingJob, *pods: Pod, digests: tuple[str, ...] = (), **fields: Any) -> TrainingJob:
    """The job after one more reconcile of its pods."""
    settings = replace(SETTINGS, workloads_digests=digests)
    return written(of, reconcile(view(of, *pods, settings=settings, **fields)))


def image_of(of: TrainingJob) -> CheckedImage | None:
    assert of.status is not None
    return of.status.admission.image if of.status.admission is not None else None


@pytest.mark.parametrize(
    ("image", "digest"),
    [
        (f"registry/x@{DIGEST}", DIGEST),
        (f"docker-pullable://registry/x@{DIGEST}", DIGEST),
        (f"registry:5000/x:tag@{DIGEST}", DIGEST),
        (DIGEST, DIGEST),
        (f"docker://{DIGEST}", DIGEST),
        ("", ""),
        ("registry:5000/x:tag", ""),
        (DIGEST[:-1], ""),
        (f"registry/x@{DIGEST}0", ""),
        (f"registry/x@{DIGEST.upper()}", ""),
    ],
)
def test_a_digest_is_read_from_what_runtimes_write(image: str, digest: str) -> None:
    assert digest_of(image) == digest


def test_our_image_is_verified_once_it_runs_and_not_before() -> None:
    begun = admitted(job())
    assert image_of(begun) is None
    assert image_of(seen(begun, runs())) == CheckedImage(verified=True, digest=DIGEST)


def test_an_image_that_is_not_the_configured_one_is_refused_and_stays_so() -> None:
    forged = seen(admitted(job()), runs(image="registry/mine:1"))
    found = image_of(forged)
    assert found is not None
    assert (found.verified, found.message) == (
        False,
        "Pod job-1-0 runs registry/mine:1, not the platform's image.",
    )
    later = seen(forged, runs(), now=NOW + timedelta(hours=1))
    assert image_of(later) == found


def test_a_tag_that_moved_to_another_digest_is_refused_where_digests_are_named() -> None:
    begun = admitted(job())
    for accepted, verified in (((), True), ((OTHER,), False), ((OTHER, DIGEST), True)):
        found = image_of(seen(begun, runs(), digests=accepted))
        assert found is not None
        assert found.verified is verified


def test_a_digest_in_the_configured_reference_is_accepted_besides_those_that_are_named() -> None:
    pinned = EngineImage(f"registry/x@{DIGEST}", (OTHER,))
    for digest, verified in ((DIGEST, True), (OTHER, True), (f"sha256:{'c' * 64}", False)):
        pod = runs(image=pinned.reference, digest=digest)
        assert check(None, [pod], pinned).verified is verified
    alone = replace(pinned, accepted=())
    assert not check(None, [runs(image=alone.reference, digest=OTHER)], alone).verified


def test_a_node_that_names_no_digest_verifies_nothing_until_it_does() -> None:
    silent = seen(admitted(job()), runs(digest=""))
    found = image_of(silent)
    assert found is not None
    assert (found.verified, found.digest) == (False, None)
    told = image_of(seen(silent, runs()))
    assert told is not None
    assert told.verified


@pytest.mark.parametrize("odd", [{"image": "registry/mine:1"}, {"digest": OTHER}, {"digest": ""}])
def test_one_differing_pod_is_enough(odd: dict[str, Any]) -> None:
    engine = EngineImage(OURS)
    assert check(None, [runs(0), runs(1)], engine).verified
    assert not check(None, [runs(0), runs(1, **odd)], engine).verified


def test_a_container_that_comes_back_with_another_digest_takes_it_back_at_once() -> None:
    known = seen(admitted(job()), runs())
    restarted = seen(known, runs(digest=OTHER, restarts=1), now=NOW + timedelta(seconds=1))
    found = image_of(restarted)
    assert found is not None
    assert (found.verified, found.digest) == (False, DIGEST)
    assert OTHER in found.message
    assert image_of(seen(restarted, runs(restarts=2), now=NOW + timedelta(hours=1))) == found


def test_an_end_under_another_digest_takes_it_back_and_one_without_a_digest_does_not() -> None:
    known = seen(admitted(job()), runs())
    for image_id, verified in ((OTHER, False), ("", True), (DIGEST, True)):
        found = image_of(seen(known, ended(image=OURS, image_id=image_id)))
        assert found is not None
        assert found.verified is verified


def test_a_new_release_of_the_platform_does_not_take_it_from_a_run() -> None:
    known = seen(admitted(job()), runs())
    newer = replace(RENDERING, workloads_image="registry/busbar-workloads:2")
    later = reconcile(view(known, runs(), rendering=newer, now=NOW + timedelta(hours=1)))
    assert later.status is not None
    assert later.status.admission is not None
    assert later.status.admission.image == CheckedImage(verified=True, digest=DIGEST)


def test_an_own_image_is_never_looked_at() -> None:
    own = admitted(gang(1))
    assert image_of(seen(own, running(image=OURS, image_id=DIGEST))) is None


def test_the_image_is_our_containers_whatever_stands_beside_it() -> None:
    beside, main = {"name": "proxy", "image": "mesh/proxy"}, {"name": "main", "image": OURS}
    told = [{"name": "proxy", "imageID": OTHER}, {"name": "main", "imageID": DIGEST, "restartCount": 2}]
    pod: dict[str, Any] = {
        "metadata": {"name": "p", "namespace": "team"},
        "spec": {"containers": [beside, main]},
        "status": {"containerStatuses": told},
    }
    found = project_pod(pod)
    assert (found.image, found.image_id, found.restarts) == (OURS, DIGEST, 2)
    pod["status"] = {"containerStatuses": told[:1]}
    assert project_pod(pod).image_id == ""
