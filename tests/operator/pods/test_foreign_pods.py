"""Which pools a pod of another controller may use, by its tolerations."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.operator.builders import NOW, pod, pool

from busbar.operator.pods.foreign_pods import claim, lacking
from busbar.operator.pools.capacities import Capacities
from busbar.operator.watch.projections import Pod

TAINT = {"key": "busbar.dev/pool", "value": "cpu", "effect": "NoSchedule"}


def opted_in(*tolerations: tuple[str, str, str, str]) -> Pod:
    return replace(pod(), kind="", queued=True, gates=("busbar.dev/admission",), tolerations=tolerations)


def pools_of(one: Pod, **spec: object) -> tuple[str, ...]:
    places = Capacities()
    places.set_pools((pool("plain", tenants=["other"]), pool("tainted", **spec)))
    found = claim(one, "team", places, NOW)
    assert found is not None
    return found.job.pools


@pytest.mark.parametrize(
    "toleration",
    [
        ("busbar.dev/pool", "Equal", "cpu", "NoSchedule"),
        ("busbar.dev/pool", "Equal", "cpu", ""),
        ("busbar.dev/pool", "Exists", "", "NoSchedule"),
        ("", "Exists", "", ""),
    ],
)
def test_a_pod_may_use_a_pool_whose_taint_it_tolerates(toleration: tuple[str, str, str, str]) -> None:
    assert pools_of(opted_in(toleration), tolerations=[TAINT]) == ("plain", "tainted")


@pytest.mark.parametrize(
    "tolerations",
    [
        (),
        (("busbar.dev/pool", "Equal", "gpu", "NoSchedule"),),
        (("busbar.dev/pool", "Exists", "", "NoExecute"),),
        (("other", "Exists", "", ""),),
    ],
)
def test_a_pod_never_gets_a_pool_whose_taint_it_does_not_tolerate(
    tolerations: tuple[tuple[str, str, str, str], ...],
) -> None:
    assert pools_of(opted_in(*tolerations), tolerations=[TAINT]) == ("plain",)


def test_a_taint_that_is_only_a_preference_keeps_no_pod_away() -> None:
    preferred = {**TAINT, "effect": "PreferNoSchedule"}
    assert pools_of(opted_in(), tolerations=[preferred]) == ("plain", "tainted")


def test_a_pod_is_told_which_toleration_it_lacks_for_every_pool_of_its_tenant() -> None:
    tainted, foreign = pool("tainted", tolerations=[TAINT]), pool("plain", tenants=["other"])
    said = lacking(opted_in(), "team", [tainted, foreign])
    assert said.startswith("It does not tolerate the taint busbar.dev/pool of the nodes that it may use")
    assert lacking(opted_in(), "other", [tainted, foreign]) == ""
    assert lacking(opted_in(("", "Exists", "", "")), "team", [tainted, foreign]) == ""
