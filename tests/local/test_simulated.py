"""The simulated machine room fits our own kinds: what the models refuse, the API server would refuse too."""

from __future__ import annotations

import random

import pytest

from busbar.kube.types import AcceleratorPool, Tenant, TrainingJob
from busbar.local import simulated, traffic
from busbar.local.commands import parse_counts
from busbar.local.instance import Instance


def test_there_are_24_nodes_of_four_types() -> None:
    nodes = simulated.nodes({})
    assert len(nodes) == 24
    assert {n["metadata"]["labels"]["busbar.dev/accelerator"] for n in nodes} == {
        "H100",
        "A100",
        "L4",
        "V100",
    }


def test_every_simulated_node_keeps_real_pods_away() -> None:
    assert all(node["spec"]["taints"] == [simulated.TAINT] for node in simulated.nodes({}))


def test_the_number_of_nodes_can_be_chosen() -> None:
    names = [node["metadata"]["name"] for node in simulated.nodes({"H100": 1, "A100": 0, "L4": 0, "V100": 2})]
    assert names == ["sim-h100-0", "sim-v100-0", "sim-v100-1"]


def test_pools_are_valid_and_tolerate_the_taint() -> None:
    for pool in simulated.pools():
        model = AcceleratorPool.model_validate(pool)
        assert model.spec.tolerations is not None
        assert model.spec.tolerations[0].key == simulated.TAINT["key"]


def test_tenants_are_valid_and_guarantees_fit_the_pools() -> None:
    tenants = [Tenant.model_validate(o) for o in simulated.tenants() if o["kind"] == "Tenant"]
    assert len(tenants) == 4
    for model in simulated.MODELS:
        promised = sum(g.get(model.accelerator, 0) for _, g in simulated.TENANTS.values())
        assert promised <= model.nodes * model.per_node


@pytest.mark.parametrize("instance", [Instance("busbar", 77, 1, 2), None])
def test_the_demo_owns_the_real_cpus_and_no_simulated_tenant_does(instance: Instance | None) -> None:
    pool = next(o for o in simulated.demo(instance) if o["kind"] == "AcceleratorPool")
    model = AcceleratorPool.model_validate(pool)
    assert model.spec.tenants == ["demo"]
    assert model.spec.unit == "500m"


def test_a_thousand_drawn_jobs_are_valid_and_fit_a_node_of_an_allowed_pool() -> None:
    chance = random.Random(7)
    for number in range(1000):
        drawn = traffic.draw(chance, number, "image")
        job = TrainingJob.model_validate(drawn)
        tenant = drawn["metadata"]["namespace"].removeprefix("sim-")
        sizes = [m.per_node for m in simulated.MODELS if m.accelerator in drawn["spec"]["accelerators"]]
        assert job.spec.shape.accelerators_per_pod <= min(sizes)
        assert all(
            tenant in m.tenants for m in simulated.MODELS if m.accelerator in drawn["spec"]["accelerators"]
        )


def test_counts_are_parsed() -> None:
    assert parse_counts(("H100=2", "L4=0")) == {"H100": 2, "L4": 0}


@pytest.mark.parametrize("text", ["H100", "B200=1", "H100=x", "H100=-1", "H100=65"])
def test_bad_counts_are_refused_with_the_form(text: str) -> None:
    with pytest.raises(Exception, match="TYPE=N"):
        parse_counts((text,))
