"""Which claims pods mount, and what is said of those that do not exist."""

from __future__ import annotations

from typing import Any

import pytest
from tests.operator.builders import ENGINE, RENDERING, job, placement, pool, service

from busbar.kube.informer import Key
from busbar.operator.pods import replica_pods, training_pods
from busbar.operator.pods.volume_claims import claims_of_job, claims_of_service, missing

DATA = {"uri": "pvc://corpus/rows.jsonl"}


def mounted(body: dict[str, Any]) -> tuple[str, ...]:
    volumes = body["spec"]["volumes"]
    return tuple(
        sorted(v["persistentVolumeClaim"]["claimName"] for v in volumes if "persistentVolumeClaim" in v)
    )


@pytest.mark.parametrize(
    ("spec", "claims"),
    [
        ({"engine": ENGINE, "output": {"uri": "pvc://out/a"}}, ("out",)),
        (
            {
                "engine": {
                    **ENGINE,
                    "data": DATA,
                    "tokenizer": {"uri": "pvc://words"},
                    "model": {"uri": "pvc://base/m"},
                },
                "output": {"uri": "pvc://out/a"},
                "checkpoint": {"uri": "pvc://saved/a"},
            },
            ("base", "corpus", "out", "saved", "words"),
        ),
        (
            {
                "engine": {
                    **ENGINE,
                    "model": {"uri": "pvc://base/m"},
                    "adapters": [{"name": "a", "data": DATA}, {"name": "b"}],
                },
                "output": {"uri": "pvc://out/a"},
            },
            ("base", "corpus", "out"),
        ),
        (
            {
                "output": None,
                "template": {
                    "image": "x",
                    "volumes": [
                        {"name": "v", "mountPath": "/v", "claim": "mine"},
                        {"name": "s", "mountPath": "/s", "emptyDir": {}},
                    ],
                },
            },
            ("mine",),
        ),
        ({"template": {"image": "x"}, "output": {"uri": "pvc://out"}}, ("out",)),
    ],
)
def test_the_claims_of_a_job_are_those_that_its_pods_mount(
    spec: dict[str, Any], claims: tuple[str, ...]
) -> None:
    of = job(**spec)
    body = training_pods.training_pod(
        of, attempt=1, rank=0, admission_id="a", placement=placement(1), pool=pool(), rendering=RENDERING
    )
    assert claims_of_job(of) == mounted(body) == claims


def test_the_claims_of_a_service_are_those_that_its_replicas_mount() -> None:
    of = service(adapters=[{"name": "a", "uri": "pvc://adapters/a"}])
    uri = of.spec.model.uri or "pvc://weights/m"
    body = replica_pods.service_pod(
        of, index=0, model_uri=uri, placement=placement(1), pool=pool(), rendering=RENDERING
    )
    assert claims_of_service(of, uri) == mounted(body)
    assert "adapters" in mounted(body)


def test_what_is_missing_is_told_by_name() -> None:
    there = {Key("team", "a"), Key("other", "b")}
    assert missing("team", ("a",), there) == ""
    assert missing("team", ("a", "b"), there) == (
        "PersistentVolumeClaim b does not exist in namespace team; it starts when it is there."
    )
    assert missing("team", ("b", "c"), there) == (
        "PersistentVolumeClaims b, c do not exist in namespace team; it starts when they are there."
    )
