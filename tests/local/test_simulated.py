"""Our models, which have the API server's rules, accept the simulated nodes and tenants."""

from __future__ import annotations

import random

import click
import pytest

from busbar.kube.types import AcceleratorPool, Tenant, TrainingJob
from busbar.local import simulated, traffic
from busbar.local.commands import check_options, parse_counts, up
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
    keys = [one.key for one in model.spec.tolerations or ()]
    assert keys == ([simulated.POOL_TAINT["key"]] if instance else []), (
        "nodes of other clusters have no such taint"
    )


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


@pytest.mark.parametrize(
    ("unfinished", "waiting", "wanted"),
    [(0, 0, 6), (40, 2, 4), (40, 3, 1), (40, 7, 1), (40, 8, 0), (40, 30, 0), (119, 0, 1), (120, 0, 0)],
)
def test_arrivals_follow_the_length_of_the_queue(unfinished: int, waiting: int, wanted: int) -> None:
    assert traffic.arrivals(traffic.Load(unfinished, waiting)) == wanted


@pytest.mark.parametrize("seed", range(5))
def test_between_three_and_eight_jobs_wait_once_the_pools_are_full(seed: int) -> None:
    """Jobs start in order of arrival on 144 accelerators, whatever their type: only the submission loop is under
    test."""
    chance = random.Random(seed)
    capacity = sum(m.nodes * m.per_node for m in simulated.MODELS)
    queue: list[tuple[int, int]] = []  # accelerators, seconds
    running: list[tuple[float, int]] = []  # end, accelerators
    lengths: list[int] = []
    number, now = 0, 0.0
    while now < 3600:
        for _ in range(traffic.arrivals(traffic.Load(len(queue) + len(running), len(queue)))):
            number += 1
            spec = traffic.draw(chance, number, "image")["spec"]
            count = spec["shape"]["minPods"] * spec["shape"]["acceleratorsPerPod"]
            queue.append((count, int(spec["template"]["metadata"]["annotations"][simulated.DURATION])))
        running = [(end, count) for end, count in running if end > now]
        while queue and sum(count for _, count in running) + queue[0][0] <= capacity:
            count, seconds = queue.pop(0)
            running.append((now + seconds, count))
        if now > 300:
            lengths.append(len(queue))
        now += chance.expovariate(1 / traffic.PAUSE_S)
    assert sum(traffic.WAITING_LEAST <= n <= traffic.WAITING_MOST for n in lengths) > 0.9 * len(lengths)
    assert max(lengths) <= traffic.WAITING_MOST + 1


def test_counts_are_parsed() -> None:
    assert parse_counts(("H100=2", "L4=0")) == {"H100": 2, "L4": 0}


@pytest.mark.parametrize("text", ["H100", "B200=1", "H100=x", "H100=-1", "H100=65", "H100=²", "L4=1"])
def test_bad_counts_are_refused_with_the_form(text: str) -> None:
    with pytest.raises(Exception, match="TYPE=N"):
        parse_counts(("L4=0", text))


OWN = ["--current", "--registry", "registry.example/team"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--no-sim", "--nodes", "H100=2"], "--nodes has no effect with --no-sim"),
        (["--build-only", "--nodes", "H100=2"], "--nodes has no effect with --build-only"),
        (["--build-only", "--no-sim"], "--no-sim has no effect with --build-only"),
        ([*OWN, "--build-only"], "--build-only has no effect with --current"),
        ([*OWN, "--name", "second"], "--name has no effect with --current"),
        ([*OWN, "--nodes", "H100=2"], "--nodes has no effect with --current"),
        ([*OWN, "--no-sim"], "--no-sim has no effect with --current"),
        ([*OWN, "--internet"], "--internet has no effect with --current"),
        (["--current"], "--current needs --registry"),
        (["--registry", "registry.example/team"], "--registry needs --current"),
    ],
)
def test_options_of_up_that_would_have_no_effect_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(click.UsageError, match=said):
        check_options(up.make_context("up", words))


@pytest.mark.parametrize(
    "words",
    [
        [],
        OWN,
        ["--no-sim"],
        ["--nodes", "H100=2"],
        ["--build-only", "--internet"],
        ["--name", "second", "--no-sim", "--internet"],
    ],
)
def test_options_of_up_that_go_together_are_accepted(words: list[str]) -> None:
    check_options(up.make_context("up", words))
